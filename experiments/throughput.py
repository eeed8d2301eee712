"""Throughput and latency under load: requests that come together, decoded by several methods.

    python -m experiments.throughput target=smollm2_135m 'method=[plain,top1,dcoco]' 'concurrency=[1,4,8,16,32]'
    python -m experiments.throughput target=smollm2_135m 'concurrency=[]' 'rate=[0.5,1,2]'
    python -m experiments.throughput target=smollm2_135m engine=http baseline=vllm vllm_python=/opt/vllm/bin/python

Prompts of several benchmarks alternate. Under each load the methods take turns, in rotating order, `repeats` times, so
that drift of the machine hits all alike; each pass has fresh prompts, the same for every method. The run's folder holds
`passes.jsonl` (a line a pass, with every request's timeline), and what follows from it: `throughput.json` and
`throughput.png`. With `resume=FOLDER` a stopped run does the passes that are missing.
"""

import asyncio
import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoTokenizer

from dcoco import DCOCODecoder, SamplingParams
from dcoco.decoder import Method
from dcoco.engine import Engine
from dcoco.errors import ConfigError
from dcoco.fetch import fetch
from dcoco.targets import resolve_target
from experiments.benchmarks import load_benchmark
from experiments.environment import CONF, describe
from experiments.load import Load, Timeline, drive, drive_server
from experiments.metrics import Pass, figures
from experiments.records import Records, check_resumed
from experiments.servers import Server, serve_command
from experiments.systems import rotated

ENGINES = ("inprocess", "http")
# Settings that a run may change when it goes on: they add cells, or don't matter to them.
FREE = {"method", "fixed", "baseline", "concurrency", "rate", "repeats", "resume", "vllm_python"}


class System(Protocol):
    """Something that decodes: a method of ours, or another engine."""

    name: str

    def run(self, prompts: list[list[int]], params: SamplingParams, load: Load, seed: int) -> list[Timeline]:
        """Put the load on it."""


@dataclass
class InProcess:
    """An engine of this process, made anew for each pass."""

    name: str
    decoder: DCOCODecoder
    method: Method
    max_num_seqs: int
    max_model_len: int
    warmup: SamplingParams

    def run(self, prompts: list[list[int]], params: SamplingParams, load: Load, seed: int) -> list[Timeline]:
        rows = load.concurrency or self.max_num_seqs
        engine = Engine(self.decoder, self.method, rows, self.max_model_len)
        drive(engine, prompts[:rows], self.warmup, Load(rows))  # allocates the cache
        return drive(engine, prompts, params, load, seed)


@dataclass
class Served:
    """A server, ours or another's."""

    name: str
    server: Server
    model: str
    max_num_seqs: int
    warmup: SamplingParams
    stream_options: dict[str, Any]

    def run(self, prompts: list[list[int]], params: SamplingParams, load: Load, seed: int) -> list[Timeline]:
        rows = load.concurrency or self.max_num_seqs
        ask = partial(drive_server, self.server.url, self.model, stream_options=self.stream_options)
        asyncio.run(ask(prompts[:rows], self.warmup, Load(rows)))
        return asyncio.run(ask(prompts, params, load, seed))


@hydra.main(version_base=None, config_path=CONF, config_name="throughput")
def main(config: DictConfig) -> None:
    torch.set_num_threads(config.threads or torch.get_num_threads())
    folder = Path(config.resume or HydraConfig.get().runtime.output_dir)
    check(config, folder)
    loads = [Load(concurrency=number) for number in config.concurrency] + [Load(rate=rate) for rate in config.rate]
    counts = {load: prompts_of_a_pass(load, config.prompts) for load in loads}
    prompts = mixed_prompts(config, max(counts.values()) * config.repeats)
    config.max_model_len = config.max_model_len or max(map(len, prompts)) + config.max_tokens
    servers: list[Server] = []
    try:
        systems = start(config, folder, servers)
        passes = run(systems, loads, counts, prompts, config, folder)
    finally:
        for server in servers:
            server.stop()
    show(cells(passes))
    plot(cells(passes), folder / "throughput.png")
    Console().print(f"results in {folder / 'throughput.json'}")


def run(
    systems: Sequence[System],
    loads: Sequence[Load],
    counts: dict[Load, int],
    prompts: list[list[int]],
    config: DictConfig,
    folder: Path,
) -> list[Pass]:
    """All passes: those that the folder holds, and those that it lacked."""
    params = SamplingParams(max_tokens=config.max_tokens, ignore_eos=config.ignore_eos)
    records = Records(folder / "passes.jsonl")
    passes = read(records)
    done = {(one.method, one.load, one.repeat) for one in passes}
    todo = [one for one in schedule(systems, loads, config.repeats) if (one[0].name, *one[1:]) not in done]
    for system, load, repeat in (bar := tqdm(todo, unit="pass")):
        bar.set_postfix_str(f"{system.name}, {load}")
        fresh = prompts[repeat * counts[load] : (repeat + 1) * counts[load]]
        passes.append(Pass(system.name, load, repeat, system.run(fresh, params, load, config.seed + repeat)))
        records.append(asdict(passes[-1]))
        write(folder, passes, config)
    return passes


def schedule(systems: Sequence[System], loads: Sequence[Load], repeats: int) -> Iterator[tuple[System, Load, int]]:
    """Under each load every system once a repeat, each time beginning with another one."""
    for load in loads:
        for repeat in range(repeats):
            for system in rotated(systems, repeat):
                yield system, load, repeat


def prompts_of_a_pass(load: Load, wanted: int | None) -> int:
    """How many requests a pass has: unless told, thrice the concurrency, half a minute of arrivals, or a dozen."""
    return wanted or max(12, 3 * load.concurrency if load.concurrency else round(30 * (load.rate or 0)))


def mixed_prompts(config: DictConfig, count: int) -> list[list[int]]:
    """Token ids of the first turns of the benchmarks, one of each in turn; a short one starts over."""
    source = resolve_target(config.target)
    tokenizer: Any = AutoTokenizer.from_pretrained(fetch(source), local_files_only=True)
    share = -(-count // len(config.benchmark))
    sets = [cycle(load_benchmark(name, config.benchmark_dir, share)) for name in config.benchmark]
    chat = source.chat is not False and getattr(tokenizer, "chat_template", None)
    found = []
    for item in islice((next(items) for items in cycle(sets)), count):
        if chat:
            messages = [{"role": "user", "content": item.turns[0]}]
            encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        else:
            encoded = tokenizer(item.turns[0])
        found.append(encoded["input_ids"])
    return found


# ------------------------------------------------------------------------------------------------ what is measured


def start(config: DictConfig, folder: Path, servers: list[Server]) -> list[System]:
    """The systems to measure; the servers among them are noted in `servers` as soon as they run."""
    warmup = SamplingParams(max_tokens=config.warmup, ignore_eos=True)

    def serve(name: str, command: list[Any], environment: dict[str, Any], **stream_options: bool) -> Served:
        servers.append(Server(command, folder / f"server-{name}.log", environment))
        servers[-1].wait()  # one after the other: they measure their costs as they start
        return Served(name, servers[-1], servers[-1].model(), config.max_num_seqs, warmup, stream_options)

    systems: list[System] = []
    threads = {} if config.threads is None else {"OMP_NUM_THREADS": config.threads}
    if config.baseline == "vllm":
        environment = threads | dict(config.vllm_env)
        systems.append(serve("vllm", vllm_command(config), environment, continuous_usage_stats=True))
    sizes = ["--max-num-seqs", config.max_num_seqs, "--max-model-len", config.max_model_len]
    if config.engine == "http":
        for method in config.method:
            systems.append(serve(method, serve_command(config, "--method", method, *sizes), threads))
        return systems
    decoder = DCOCODecoder.from_pretrained(
        config.target, config.drafter, device=config.device, dtype=config.dtype, max_rows=config.max_num_seqs
    )
    variants = {name: (decoder, name) for name in config.method}
    variants |= {f"dcoco-fixed-{length}": (fixed(decoder, length), "dcoco") for length in config.fixed}
    for name, (variant, method) in variants.items():
        systems.append(InProcess(name, variant, method, config.max_num_seqs, config.max_model_len, warmup))
        variant.budget(method)  # measures costs where they aren't known yet
    return systems


def fixed(decoder: DCOCODecoder, length: int) -> DCOCODecoder:
    """The same models without a budget: every draft has `length` tokens, whatever they are worth."""
    variant = copy.copy(decoder)
    variant.adaptive, variant.tree_size, variant.worth = False, length, 0.0
    return variant


def vllm_command(config: DictConfig) -> list[Any]:
    """vLLM's server on the same weights. Its `vllm` command fails in the package for CPUs: start the module."""
    sizes = ["--max-num-seqs", config.max_num_seqs, "--max-model-len", config.max_model_len]
    folder = fetch(resolve_target(config.target))
    module = ["-m", "vllm.entrypoints.openai.api_server"]
    return [config.vllm_python, *module, "--model", folder, "--host", "127.0.0.1", *sizes, *config.vllm_args]


def check(config: DictConfig, folder: Path) -> None:
    """Refuse settings that make no sense, or that differ from those of the run that goes on.

    One name stands for a list of one.
    """
    for name in ("method", "benchmark", "concurrency", "rate", "fixed"):
        if not OmegaConf.is_list(config[name]):
            config[name] = [] if config[name] is None else [config[name]]
    if config.engine not in ENGINES:
        raise ConfigError(f"engine={config.engine!r}: must be one of {', '.join(ENGINES)}")
    if config.baseline not in (None, "vllm"):
        raise ConfigError(f"baseline={config.baseline!r}: must be vllm or null")
    if config.fixed and config.engine != "inprocess":
        raise ConfigError("fixed: lengths are fixed in this process only; set engine=inprocess")
    if not config.concurrency and not config.rate:
        raise ConfigError("no load: name concurrency=[...], rate=[...] or both")
    if any(number < 1 for number in (*config.concurrency, *config.fixed, config.repeats)):
        raise ConfigError("concurrency, fixed and repeats must be at least 1")
    if any(rate <= 0 for rate in config.rate):
        raise ConfigError(f"rate={list(config.rate)}: requests a second must be above 0")
    if max(config.concurrency, default=1) > config.max_num_seqs:
        raise ConfigError(f"concurrency={list(config.concurrency)}: raise max_num_seqs={config.max_num_seqs}")
    if config.baseline == "vllm" and config.vllm_python is None:
        raise ConfigError("baseline=vllm: name the Python that has vLLM, vllm_python=/path/to/venv/bin/python")
    # A max_model_len that is left to the prompts has been settled there.
    check_resumed(config, folder / "throughput.json", FREE if config.max_model_len else FREE | {"max_model_len"})


# ------------------------------------------------------------------------------------------------ what is kept


def read(records: Records) -> list[Pass]:
    """The passes that have been made."""
    passes = []
    for row in records.rows:
        timelines = [Timeline(**timeline) for timeline in row["timelines"]]
        for timeline in timelines:
            timeline.pieces = [(at, tokens) for at, tokens in timeline.pieces]
        passes.append(Pass(row["method"], Load(**row["load"]), row["repeat"], timelines))
    return passes


def cells(passes: Sequence[Pass]) -> list[dict[str, Any]]:
    """A cell for each load and method, with its speed-up over plain under the same load."""
    found: dict[Load, dict[str, list[Pass]]] = {}
    for one in passes:
        found.setdefault(one.load, {}).setdefault(one.method, []).append(one)
    result = []
    for load, methods in found.items():
        of_methods = {method: figures(group) for method, group in methods.items()}
        plain = of_methods.get("plain", {})
        for method, of in of_methods.items():
            ratios = {
                name: of[source] / plain[source] if of[source] and plain.get(source) else None
                for name, source in (("speedup", "output_throughput"), ("steady_speedup", "steady_output_throughput"))
            }
            result.append({"method": method, **asdict(load), "passes": len(methods[method]), **ratios, **of})
    return result


def write(folder: Path, passes: Sequence[Pass], config: DictConfig) -> None:
    """`throughput.json`: the cells so far, with what produced them."""
    content = {"cells": cells(passes), "config": OmegaConf.to_container(config), **describe()}
    (folder / "throughput.json").write_text(json.dumps(content, indent=1))


def show(results: Sequence[dict[str, Any]]) -> None:
    """The table: throughput of the steady part and of everything, and latencies."""
    columns = ("load", "method", "tokens/s", "over plain", "all", "over plain", "ttft", "p99", "itl", "tpot", "accept")
    table = Table(*columns)
    for r in results:
        load = Load(r["concurrency"], r["rate"])
        names = ("steady_output_throughput", "steady_speedup", "output_throughput", "speedup")
        times = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "median_tpot_ms")
        row = [_number(r[name], 2 if "speedup" in name else 1) for name in names] + [_number(r[n], 0) for n in times]
        table.add_row(str(load), r["method"], *row, _number(r["spec_decode_acceptance_length"], 2))
    Console(width=130).print(table)


def plot(results: Sequence[dict[str, Any]], file: Path) -> None:
    """Output throughput against concurrency, and its ratio to plain; below, the same of latency against rate."""
    try:
        from matplotlib import pyplot
    except ImportError:
        Console().print("no plot: pip install 'dcoco[plots]'", markup=False)
        return
    rows = {
        "concurrency": ("output_throughput", "output tokens/s"),
        "rate": ("mean_e2el_ms", "mean time of a request, ms"),
    }
    rows = {load: row for load, row in rows.items() if any(r[load] is not None for r in results)}
    figure, axes = pyplot.subplots(len(rows), 2, figsize=(11, 4 * len(rows)), squeeze=False, layout="constrained")
    for (left, right), (load, (field, label)) in zip(axes, rows.items(), strict=True):
        mine = [r for r in results if r[load] is not None and r[field] is not None]
        plain = {r[load]: r[field] for r in mine if r["method"] == "plain"}
        for method in dict.fromkeys(r["method"] for r in mine):
            points = sorted((r[load], r[field]) for r in mine if r["method"] == method)
            left.plot(*zip(*points, strict=True), marker="o", label=method)
            ratios = [(x, y / plain[x]) for x, y in points if x in plain]
            if ratios:
                right.plot(*zip(*ratios, strict=True), marker="o", label=method)
        for axis, title in ((left, label), (right, f"{label}, over plain")):
            axis.set(xlabel=load if load == "concurrency" else "requests/s", title=title)
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted({r[load] for r in mine}), [f"{x:g}" for x in sorted({r[load] for r in mine})])
            axis.grid(alpha=0.3)
        left.set_ylim(bottom=0)
        left.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
