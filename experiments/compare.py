"""Who is faster, on the same target, prompts and machine: our methods, rival drafters, other engines.

    python -m experiments.compare target=smollm2_135m
    python -m experiments.compare skip_missing=true 'temperature=[0]' 'batch=[1]' limit=4 repeats=1
    python -m experiments.compare llamacpp=/opt/llamacpp/bin/python gguf=SmolLM2-135M-Instruct.Q4_1.gguf

All drafters share one target in memory, the engine and the verification; only who drafts differs. Systems take turns
prompt by prompt (batch by batch), in rotating order, so that drift of the machine hits all alike. The run's folder
holds `raw.jsonl` (a line for each system and batch of prompts), and what follows from it: `compare.json`, `compare.md`
and plots. With `resume=FOLDER` a stopped run does what it lacks.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from dcoco import DCOCODecoder, RequestOutput, SamplingParams, Stats
from dcoco.decoder import METHODS, NO_DRAFTER
from dcoco.errors import ConfigError
from dcoco.targets import load_target
from experiments.bandwidth import ceiling
from experiments.comparison import cells, markdown, means
from experiments.comparison_plots import plot
from experiments.environment import CONF, describe
from experiments.records import Records, check_resumed
from experiments.settings import check_numbers
from experiments.systems import LlamaCpp, Ours, System, Transformers, first_turns, load_decoders, rotated
from verifier.cache import RaggedCache
from verifier.sampling import SamplingBatch, probabilities
from verifier.target import Target

# Settings that a run may change when it goes on: they add cells, or don't matter to them.
FREE = {"systems", "skip_missing", "transformers", "llamacpp", "gguf", "temperature", "batch", "repeats", "resume"}
FREE |= {"memory_mib"}
LISTS = ("benchmark", "temperature", "batch")


@dataclass(frozen=True)
class Group:
    """Prompts that are answered together, under one setting."""

    benchmark: str
    temperature: float
    batch: int
    repeat: int
    group: int  # which of the benchmark's groups of this size


@hydra.main(version_base=None, config_path=CONF, config_name="compare")
def main(config: DictConfig) -> None:
    torch.set_num_threads(config.threads or torch.get_num_threads())
    folder = Path(config.resume or HydraConfig.get().runtime.output_dir)
    check(config, folder)
    base = DCOCODecoder.from_pretrained(config.target, NO_DRAFTER, device=config.device, dtype=config.dtype)
    prompts = first_turns(base, config.benchmark, config.benchmark_dir, config.limit)
    systems = ours(config, base) + others(config, base, max(len(ids) for of in prompts.values() for ids in of))
    try:
        run(systems, prompts, base.target, config, folder)
    finally:
        for system in systems:
            if isinstance(system, LlamaCpp):
                system.stop()
    print((folder / "compare.md").read_text(), f"results in {folder / 'compare.json'}", sep="\n")


def run(
    systems: Sequence[System], prompts: dict[str, list[list[int]]], target: Target, config: DictConfig, folder: Path
) -> None:
    """Measure what the folder doesn't hold yet, and write what follows."""
    records = Records(folder / "raw.jsonl")
    done = {(row["system"], *(row[key] for key in Group.__dataclass_fields__)) for row in records.rows}
    todo = []
    for turn, group in enumerate(schedule(config, {name: len(of) for name, of in prompts.items()})):
        taking_part = [system for system in systems if system.serves(group.temperature, group.batch)]
        for system in rotated(taking_part, turn):
            if (system.name, *asdict(group).values()) not in done:
                todo.append((system, group))
    top, warm = ceiling(target, config.memory_mib), set[tuple[str, int]]()
    write(cells(records.rows, plain_of(config)), top, config, folder)  # whatever comes, the settings are noted
    try:
        for system, group in (bar := tqdm(todo, unit="batch")):
            bar.set_postfix_str(f"{system.name}, {group.benchmark}, T={group.temperature:g}, batch {group.batch}")
            numbers = range(group.group * group.batch, (group.group + 1) * group.batch)
            asked = [prompts[group.benchmark][number] for number in numbers]
            params = [
                SamplingParams(max_tokens=config.max_tokens, temperature=group.temperature, seed=config.seed + number)
                for number in numbers
            ]
            if (system.name, group.batch) not in warm:  # the first calls compile kernels, allocate and measure costs
                system.answer(asked, [SamplingParams(max_tokens=16)] * len(asked))
                warm.add((system.name, group.batch))
            outputs = system.answer(asked, params)
            row = record(system, group, outputs)
            if system.name == plain_of(config) and group.temperature > 0:
                row["max_p"] = largest_p(target, outputs, params)
            records.append(row)
    finally:
        results = cells(records.rows, plain_of(config), [system.name for system in systems])
        write(results, top, config, folder)
    plot(results, means(results), plain_of(config), folder)


def schedule(config: DictConfig, counts: dict[str, int]) -> Iterator[Group]:
    """All groups, so that the benchmarks advance together and a run cut short has seen each of them."""
    for repeat in range(config.repeats):
        for temperature in config.temperature:
            for batch in config.batch:
                for group in range(max(counts.values()) // batch):
                    for name, count in counts.items():
                        if (group + 1) * batch <= count:
                            yield Group(name, float(temperature), batch, repeat, group)


def record(system: System, group: Group, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The line of one system's answers, as `experiments/comparison.py` describes it."""
    return {
        "system": system.name,
        **asdict(group),
        "prompts": len(outputs),
        "new_tokens": sum(len(output.token_ids) for output in outputs),
        "seconds": max(output.stats.seconds for output in outputs),
        "texts": [zlib.crc32(json.dumps(output.token_ids).encode()) for output in outputs],
        "stats": asdict(Stats.total(output.stats for output in outputs)),
        "max_p": None,
    }


@torch.inference_mode()
def largest_p(target: Target, outputs: Sequence[RequestOutput], params: Sequence[SamplingParams]) -> float:
    """The mean over the answers' tokens of the largest probability that the target gave any token there.

    A fixed draft d is accepted with probability p(d) (rules match and one-hot): this is the most that it can hope for.
    """
    found = []
    for output, one in zip(outputs, params, strict=True):
        ids = torch.tensor([output.prompt_token_ids + output.token_ids[:-1]], device=target.device)
        hidden = target.forward(ids, RaggedCache(1, ids.shape[1] + 1, target.device)).hidden
        logits = target.logits(hidden[:, len(output.prompt_token_ids) - 1 :])
        found.append(probabilities(logits, SamplingBatch.stack([one], [0], target.device)).amax(-1)[0])
    return float(torch.cat(found).mean())


# ------------------------------------------------------------------------------------------------ who takes part


def ours(config: DictConfig, base: DCOCODecoder) -> list[System]:
    """The configured systems, on one target; ConfigError for one whose drafter isn't there, unless `skip_missing`."""
    options = {"max_rows": max(config.batch), "adaptive": config.adaptive}
    found = load_decoders(config.systems, base, config.skip_missing, **options)
    return [Ours(entry.name, decoder, entry.method) for entry, decoder in found]


def others(config: DictConfig, base: DCOCODecoder, longest: int) -> list[System]:
    """Other engines, with weights of their own; prompts have up to `longest` tokens."""
    systems: list[System] = []
    if config.transformers:
        model, tokenizer, _ = load_target(config.target, dtype=base.target.dtype, device=config.device)
        for name, lookup in (
            ("transformers", None),
            ("transformers prompt lookup", config.prompt_lookup_num_tokens),
        ):
            systems.append(Transformers(name, model, tokenizer, base.eos_ids, lookup))
    if config.llamacpp:
        length = longest + config.max_tokens
        paths = (Path(config.llamacpp), Path(config.gguf))
        systems.append(
            LlamaCpp(f"llama.cpp {paths[1].stem}", *paths, base.tokenizer, base.eos_ids, length, max(config.batch))
        )
    return systems


def plain_of(config: DictConfig) -> str:
    """The name of the system that speed-ups are over."""
    return next(entry.name for entry in config.systems if entry.method == "plain")


def check(config: DictConfig, folder: Path) -> None:
    """Refuse settings that make no sense, or that differ from those of the run that goes on.

    One value stands for a list of one.
    """
    for name in LISTS:
        if not OmegaConf.is_list(config[name]):
            config[name] = [config[name]]
        if not config[name]:
            raise ConfigError(f"{name}=[]: name at least one")
    check_numbers(config)
    for entry in config.systems:
        if entry.get("method") not in METHODS:
            raise ConfigError(
                f"system {entry.name!r}: method={entry.get('method')!r} must be one of {', '.join(METHODS)}"
            )
    names = [entry.name for entry in config.systems]
    if len(set(names)) < len(names):
        raise ConfigError(f"systems: each needs a name of its own, and these are {', '.join(names)}")
    if [entry.method for entry in config.systems].count("plain") != 1:
        raise ConfigError('systems: exactly one must have method "plain"; speed-ups are over it')
    for batch in config.batch:
        if config.limit % batch:
            raise ConfigError(f"limit={config.limit}: must be a multiple of batch={batch}, so that batches are full")
    if config.llamacpp and not config.gguf:
        raise ConfigError("llamacpp: name the weights too, gguf=/path/to/model.gguf")
    check_resumed(config, folder / "compare.json", FREE)


def write(results: list[dict[str, Any]], top: dict[str, float], config: DictConfig, folder: Path) -> None:
    """compare.json and compare.md: the cells so far and the ceiling of plain decoding, with what produced them."""
    content = {
        "cells": results,
        "means": means(results),
        "ceiling": top,
        "config": OmegaConf.to_container(config, resolve=True),
        **describe(),
    }
    (folder / "compare.json").write_text(json.dumps(content, indent=1))
    (folder / "compare.md").write_text(markdown(results, plain_of(config), top["tokens_per_second"]))


if __name__ == "__main__":
    main()
