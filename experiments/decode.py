"""Speed and acceptance of decoding methods on benchmarks, one prompt at a time.

    python -m experiments.decode target=smollm2_135m 'method=[plain,top1,dcoco]' 'benchmark=[gsm8k,humaneval]' limit=20

The methods take turns prompt by prompt, so that drift of the machine hits all alike. The table and `results.json` in
the run's folder hold a cell for each benchmark and method; `speedup` is over `plain` in the same run.
"""

import json
import math
import time
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

from dcoco import DCOCODecoder, RequestOutput, SamplingParams
from dcoco.output import PHASES
from experiments.benchmarks import Conversation, load_benchmark
from experiments.environment import CONF, describe

TRANSFORMERS = "transformers"  # the method name of transformers' own `generate`


@dataclass
class Cell:
    """Sums over the prompts of one benchmark with one method."""

    target: str
    benchmark: str
    method: str
    prompts: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    committed: int = 0
    accepted_at: list[int] = field(default_factory=list)
    traced_rounds: int = 0
    top1_tokens: int = 0
    oracle_tokens: int = 0
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    identical: int = 0

    def add(self, output: RequestOutput, plain: RequestOutput | None) -> None:
        """Count one answer; `plain` is the plain decoder's answer to the same prompt."""
        stats = output.stats
        self.prompts += 1
        self.new_tokens += len(output.token_ids)
        self.seconds += stats.seconds
        self.rounds += stats.rounds
        self.committed += stats.committed_tokens
        self.accepted_at += [0] * (len(stats.accepted_at) - len(self.accepted_at))
        for position, count in enumerate(stats.accepted_at):
            self.accepted_at[position] += count
        for phase in PHASES:
            self.phase_seconds[phase] += stats.phase_seconds[phase]
        self.identical += plain is not None and plain.token_ids == output.token_ids
        for trace in output.trace or ():
            top1, oracle = 1, 1  # of a round without a draft
            if trace.candidates is not None:
                top1, oracle = lattice_lengths(trace.candidates, output.token_ids[trace.start :])
            self.traced_rounds += 1
            self.top1_tokens += top1
            self.oracle_tokens += oracle

    def result(self, plain: "Cell | None") -> dict[str, Any]:
        """The cell as it stands in results.json."""
        rate = self.new_tokens / self.seconds if self.seconds else 0.0
        phases = {phase: value / self.seconds if self.seconds else 0.0 for phase, value in self.phase_seconds.items()}
        return {
            "target": self.target,
            "benchmark": self.benchmark,
            "method": self.method,
            "prompts": self.prompts,
            "new_tokens": self.new_tokens,
            "seconds": self.seconds,
            "tokens_per_second": rate,
            "speedup": rate / (plain.new_tokens / plain.seconds) if plain and plain.seconds else None,
            "mean_acceptance_length": self.committed / self.rounds if self.rounds else None,
            "acceptance_per_position": [count / self.rounds for count in self.accepted_at],
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
    methods = [config.method] if isinstance(config.method, str) else list(config.method)
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
    runners: dict[str, Any] = {name: Runner(decoder, name) for name in methods}
    if config.transformers:
        runners[TRANSFORMERS] = TransformersRunner(config, decoder)
    for runner in runners.values():  # the first calls compile kernels and allocate
        runner.run([{"role": "user", "content": "Count to ten."}], SamplingParams(max_tokens=32))

    folder = Path(HydraConfig.get().runtime.output_dir)
    cells = {(name, method): Cell(config.target, name, method) for name in benchmarks for method in runners}
    for name, conversations in sets.items():
        for number, conversation in enumerate(tqdm(conversations, desc=name, unit="prompt")):
            params = SamplingParams(
                max_tokens=config.max_tokens,
                temperature=config.temperature,
                top_p=config.top_p,
                seed=config.seed + number,
            )
            run_conversation(conversation, params, runners, cells, number)
        write(folder / "results.json", cells, config)
    show([cell.result(cells.get((name, "plain"))) for (name, _), cell in cells.items()])
    Console().print(f"results in {folder / 'results.json'}")


def run_conversation(
    conversation: Conversation, params: SamplingParams, runners: dict[str, Any], cells: dict[Any, Cell], number: int
) -> None:
    """Each turn with every method, in rotating order; later turns see the first method's answers for all."""
    messages: list[dict[str, str]] = []
    names = list(runners)
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn})
        order = names[number % len(names) :] + names[: number % len(names)]
        outputs = {name: runners[name].run(messages, params) for name in order}
        for name in names:
            cells[conversation.benchmark, name].add(outputs[name], outputs.get("plain"))
        messages.append({"role": "assistant", "content": outputs[names[0]].text})


@dataclass
class Runner:
    """One of our methods, a prompt at a time."""

    decoder: DCOCODecoder
    method: Any

    def run(self, messages: list[dict[str, str]], params: SamplingParams) -> RequestOutput:
        """Answer a conversation; a target without a chat template completes the bare text."""
        return self.decoder.generate(
            [self.decoder.asked(messages)], params, self.method, trace=self.method in ("dcoco", "walk")
        )[0]


class TransformersRunner:
    """transformers' own `generate` on the same weights and dtype: what a user would run without us."""

    def __init__(self, config: DictConfig, decoder: DCOCODecoder):
        from dcoco.targets import load_target

        dtype = decoder.target.dtype
        self.model, self.tokenizer, _ = load_target(config.target, dtype=dtype, device=config.device)
        self.decoder = decoder

    @torch.inference_mode()
    def run(self, messages: list[dict[str, str]], params: SamplingParams) -> RequestOutput:
        """Answer a conversation; sampled text differs from ours, as its random numbers do."""
        from dcoco.output import Stats

        ids = torch.tensor([self.decoder.encode(self.decoder.asked(messages))], device=self.model.device)
        sample = {"do_sample": True, "temperature": params.temperature, "top_p": params.top_p, "top_k": 0}
        begun = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=params.max_tokens,
            repetition_penalty=1.0,  # whatever the model's generation config says
            eos_token_id=list(self.decoder.eos_ids) or None,
            **(sample if params.temperature else {"do_sample": False}),
        )
        new = out[0, ids.shape[1] :].tolist()
        stats = Stats(rounds=len(new), committed_tokens=len(new), seconds=time.perf_counter() - begun)
        return RequestOutput(
            ids[0].tolist(), new, self.tokenizer.decode(new, skip_special_tokens=True), "length", stats
        )


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
