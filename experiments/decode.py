"""Speed and acceptance of decoding methods on benchmarks, one prompt at a time.

    python -m experiments.decode target=smollm2_135m 'method=[plain,top1,dcoco]' 'benchmark=[gsm8k,humaneval]' limit=20

The methods take turns prompt by prompt, so that drift of the machine hits all alike. The table and `results.json` in
the run's folder hold a cell for each benchmark and method; `speedup` is over `plain` in the same run.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from dcoco import DCOCODecoder, RequestOutput, SamplingParams, Stats
from dcoco.targets import load_target
from experiments.benchmarks import Conversation, load_benchmark
from experiments.environment import CONF, describe
from experiments.systems import Ours, System, Transformers, rotated


@dataclass
class Cell:
    """Sums over the prompts of one benchmark with one method."""

    target: str
    benchmark: str
    method: str
    prompts: int = 0
    new_tokens: int = 0
    stats: Stats = field(default_factory=Stats)
    traced_rounds: int = 0
    top1_tokens: int = 0
    oracle_tokens: int = 0
    identical: int = 0

    def add(self, output: RequestOutput, plain: RequestOutput | None) -> None:
        """Count one answer; `plain` is the plain decoder's answer to the same prompt."""
        self.prompts += 1
        self.new_tokens += len(output.token_ids)
        self.stats.add(output.stats)
        self.identical += plain is not None and plain.token_ids == output.token_ids
        for trace in output.trace or ():
            top1, oracle = 1, 1  # of a round without a draft
            if trace.candidates is not None:
                top1, oracle = lattice_lengths(trace.candidates, output.token_ids[trace.start :])
            self.traced_rounds += 1
            self.top1_tokens += top1
            self.oracle_tokens += oracle

    @property
    def rate(self) -> float:
        """New tokens a second."""
        return self.new_tokens / self.stats.seconds if self.stats.seconds else 0.0

    def result(self, plain: "Cell | None") -> dict[str, Any]:
        """The cell as it stands in results.json."""
        stats, seconds = self.stats, self.stats.seconds
        phases = {phase: value / seconds if seconds else 0.0 for phase, value in stats.phase_seconds.items()}
        return {
            "target": self.target,
            "benchmark": self.benchmark,
            "method": self.method,
            "prompts": self.prompts,
            "new_tokens": self.new_tokens,
            "seconds": seconds,
            "tokens_per_second": self.rate,
            "speedup": self.rate / plain.rate if plain and plain.rate else None,
            "mean_acceptance_length": stats.mean_acceptance_length or None,
            "acceptance_per_position": stats.acceptance_per_position,
            "top1_length": self.top1_tokens / self.traced_rounds if self.traced_rounds else None,
            "oracle_length": self.oracle_tokens / self.traced_rounds if self.traced_rounds else None,
            "share": {**phases, "other": 1.0 - sum(phases.values())},
            "identical_to_plain": self.identical if plain else None,
        }


def lattice_lengths(candidates: torch.Tensor, truth: list[int]) -> tuple[int, int]:
    """Tokens that a round would commit if it drafted each slot's first candidate, and if it knew the best path.

    `candidates` int64 [n, K]; `truth` is what the target went on with. The token of the target's own counts too.
    """
    slots = min(len(candidates), len(truth))
    hits = candidates[:slots] == torch.tensor(truth[:slots], device=candidates.device)[:, None]
    lengths = [1 + int(hit.long().cumprod(0).sum()) for hit in (hits[:, 0], hits.any(1))]
    return min(lengths[0], len(truth)), min(lengths[1], len(truth))


@hydra.main(version_base=None, config_path=CONF, config_name="decode")
def main(config: DictConfig) -> None:
    torch.set_num_threads(config.threads or torch.get_num_threads())
    methods: list[Any] = [config.method] if isinstance(config.method, str) else list(config.method)
    benchmarks = [config.benchmark] if isinstance(config.benchmark, str) else list(config.benchmark)
    sets = {name: load_benchmark(name, config.benchmark_dir, config.limit) for name in benchmarks}
    decoder = DCOCODecoder.from_pretrained(
        config.target,
        config.drafter,
        device=config.device,
        dtype=config.dtype,
        rule=config.rule,
        tree_size=config.tree_size,
        worth=config.worth,
        recall=config.recall,
    )
    systems: list[System] = [Ours(name, decoder, name, trace=name in ("dcoco", "walk")) for name in methods]
    if config.transformers:
        model, tokenizer, _ = load_target(config.target, dtype=decoder.target.dtype, device=config.device)
        systems.append(Transformers("transformers", model, tokenizer, decoder.eos_ids))
    hello = decoder.encode(decoder.asked([{"role": "user", "content": "Count to ten."}]))
    for system in systems:  # the first calls compile kernels and allocate
        system.answer([hello], [SamplingParams(max_tokens=32)])

    folder = Path(HydraConfig.get().runtime.output_dir)
    names = [system.name for system in systems]
    cells = {(name, method): Cell(config.target, name, method) for name in benchmarks for method in names}
    for name, conversations in sets.items():
        for number, conversation in enumerate(tqdm(conversations, desc=name, unit="prompt")):
            params = SamplingParams(
                max_tokens=config.max_tokens,
                temperature=config.temperature,
                top_p=config.top_p,
                seed=config.seed + number,
            )
            run_conversation(conversation, params, decoder, systems, cells, number)
        write(folder / "results.json", cells, config)
    show([cell.result(cells.get((name, "plain"))) for (name, _), cell in cells.items()])
    Console().print(f"results in {folder / 'results.json'}")


def run_conversation(
    conversation: Conversation,
    params: SamplingParams,
    decoder: DCOCODecoder,
    systems: list[System],
    cells: dict[Any, Cell],
    number: int,
) -> None:
    """Each turn with every system, in rotating order; later turns see the first system's answers for all.

    A target without a chat template completes the bare text.
    """
    messages: list[dict[str, str]] = []
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn})
        ids, outputs = decoder.encode(decoder.asked(messages)), {}
        for system in rotated(systems, number):
            outputs[system.name] = system.answer([ids], [params])[0]
        for name, output in outputs.items():
            cells[conversation.benchmark, name].add(output, outputs.get("plain"))
        messages.append({"role": "assistant", "content": outputs[systems[0].name].text})


def write(file: Path, cells: dict[Any, Cell], config: DictConfig) -> None:
    """`results.json`: the cells so far, with what produced them."""
    results = [cell.result(cells.get((name, "plain"))) for (name, _), cell in cells.items() if cell.prompts]
    file.write_text(json.dumps({"cells": results, "config": OmegaConf.to_container(config), **describe()}, indent=1))


def show(results: list[dict[str, Any]]) -> None:
    """The table, with geometric and arithmetic means over the benchmarks."""
    columns = (
        "benchmark",
        "method",
        "tokens",
        "tokens/s",
        "speed-up",
        "accept",
        "top-1",
        "oracle",
        "draft",
        "correct",
        "same",
    )
    table = Table(*columns)
    for r in results:
        table.add_row(
            r["benchmark"],
            r["method"],
            str(r["new_tokens"]),
            f"{r['tokens_per_second']:.1f}",
            _number(r["speedup"], "x"),
            _number(r["mean_acceptance_length"]),
            _number(r["top1_length"]),
            _number(r["oracle_length"]),
            f"{r['share']['draft']:.1%}",
            f"{r['share']['correct']:.1%}",
            "" if r["identical_to_plain"] is None else f"{r['identical_to_plain']}/{r['prompts']}",
        )
    for method in dict.fromkeys(r["method"] for r in results):
        mine = [r for r in results if r["method"] == method]
        speedups = [r["speedup"] for r in mine if r["speedup"]]
        lengths = [r["mean_acceptance_length"] for r in mine if r["mean_acceptance_length"]]
        geometric = math.exp(sum(map(math.log, speedups)) / len(speedups)) if speedups else None
        mean = sum(lengths) / len(lengths) if lengths else None
        table.add_row("mean", method, "", "", _number(geometric, "x"), _number(mean), "", "", "", "", "", style="bold")
    Console(width=130).print(table)


def _number(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:.2f}{unit}"


if __name__ == "__main__":
    main()
