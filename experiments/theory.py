"""Is speculative decoding here as fast as theory says? Speed-ups predicted and measured, for drafts of 1 to 8 tokens.

    python -m experiments.theory target=smollm2_135m
    python -m experiments.theory temperature=1 rule=sampled

The theory is in `experiments/prediction.py`. Times are taken from the first prompt of each benchmark; from them, and
from what the longest drafts get accepted on the other prompts, the speed-up of every length on these is predicted, and
measured. Systems and lengths take turns prompt by prompt. Above all stands the memory's bandwidth: plain decoding can't
be faster than its weights can be read. The run's folder holds `raw.jsonl` (every round), and what follows from it:
`theory.json`, `theory.md` and `theory.png`. With `resume=FOLDER` a stopped run does what it lacks.
"""

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch import Tensor
from tqdm import tqdm

from dcoco import DCOCODecoder, SamplingParams
from dcoco.decoder import NO_DRAFTER, Method
from dcoco.engine import Engine
from dcoco.errors import ConfigError
from drafters.base import Context, Draft, Drafter, DraftState, Lattice
from experiments.bandwidth import ceiling
from experiments.comparison import markdown_table
from experiments.environment import CONF, describe
from experiments.prediction import Costs, Round, acceptance_by_place, acceptance_rate, measured, predictions
from experiments.records import Records, check_resumed
from experiments.settings import check_numbers
from experiments.systems import first_turns, load_decoders, rotated
from verifier.cache import RaggedCache

PLAIN = "plain"
PREDICTED = ("paper", "iid", "by_place")


class Shortened:
    """A drafter whose blocks have at most `gamma` tokens."""

    def __init__(self, drafter: Drafter, gamma: int):
        self.drafter = drafter
        self.block_size = gamma
        self.taps = drafter.taps
        self.max_positions = drafter.max_positions

    def start(self, rows: int, max_length: int) -> DraftState:
        return self.drafter.start(rows, max_length)

    def observe(self, state: DraftState, first: int, taps: list[Tensor], counts_R: Tensor) -> None:
        self.drafter.observe(state, first, taps, counts_R)

    def draft(
        self, state: DraftState, anchors_R: Tensor, cache: RaggedCache, slots: int, context: Context
    ) -> Lattice | Draft:
        return self.drafter.draft(state, anchors_R, cache, slots, context)


@dataclass
class Case:
    """One system with drafts of one length."""

    system: str
    gamma: int
    decoder: DCOCODecoder
    method: Method


@hydra.main(version_base=None, config_path=CONF, config_name="theory")
def main(config: DictConfig) -> None:
    torch.set_num_threads(config.threads or torch.get_num_threads())
    folder = Path(config.resume or HydraConfig.get().runtime.output_dir)
    check(config, folder)
    base = DCOCODecoder.from_pretrained(config.target, NO_DRAFTER, device=config.device, dtype=config.dtype)
    cases = cases_of(config, base)
    prompts = first_turns(base, config.benchmark, config.benchmark_dir, config.limit)
    records = Records(folder / "raw.jsonl")
    (folder / "theory.json").write_text(json.dumps({"config": OmegaConf.to_container(config, resolve=True)}))
    run(cases, list(prompts.values()), records, config)
    one_pass = {entry.name: entry.one_pass for entry in config.systems}
    report = {
        "systems": results(records.rows, one_pass),
        "ceiling": ceiling(base.target, config.memory_mib),
        "config": OmegaConf.to_container(config, resolve=True),
        **describe(),
    }
    (folder / "theory.json").write_text(json.dumps(report, indent=1))
    (folder / "theory.md").write_text(markdown(report))
    plot(report["systems"], folder / "theory.png")
    print(markdown(report), f"results in {folder / 'theory.json'}", sep="\n")


def cases_of(config: DictConfig, base: DCOCODecoder) -> list[Case]:
    """Plain decoding, and every system with every length that its blocks allow."""
    found = [Case(PLAIN, 0, base, "plain")]
    options = {"rule": config.rule, "recall": False}  # what is recalled isn't the drafter's
    for entry, decoder in load_decoders(config.systems, base, config.skip_missing, **options):
        assert decoder.drafter is not None
        for gamma in range(1, min(config.gamma, decoder.drafter.block_size) + 1):
            variant = copy.copy(decoder)
            variant.drafter = Shortened(decoder.drafter, gamma)
            found.append(Case(entry.name, gamma, variant, entry.method))
    return found


def run(cases: Sequence[Case], prompts: Sequence[list[list[int]]], records: Records, config: DictConfig) -> None:
    """Measure what isn't recorded yet; a record holds the rounds of one case on one prompt."""
    done = {(row["system"], row["gamma"], row["benchmark"], row["prompt"]) for row in records.rows}
    places = [(benchmark, prompt) for prompt in range(max(map(len, prompts))) for benchmark in range(len(prompts))]
    places = [(benchmark, prompt) for benchmark, prompt in places if prompt < len(prompts[benchmark])]
    todo = [
        (case, *place)
        for turn, place in enumerate(places)
        for case in rotated(cases, turn)
        if (case.system, case.gamma, *place) not in done
    ]
    for case, benchmark, prompt in (bar := tqdm(todo, unit="answer")):
        bar.set_postfix_str(f"{case.system}, {case.gamma} tokens")
        seed = config.seed + prompt * len(prompts) + benchmark
        params = SamplingParams(max_tokens=config.max_tokens, temperature=config.temperature, seed=seed)
        rounds = [list(astuple(one)) for one in rounds_of(case, prompts[benchmark][prompt], params)]
        where = {"benchmark": benchmark, "prompt": prompt}
        records.append({"system": case.system, "gamma": case.gamma, **where, "rounds": rounds})


def rounds_of(case: Case, ids: list[int], params: SamplingParams) -> list[Round]:
    """The rounds of one answer; not the first one, which shares its step with the prompt, nor those that the answer's
    end cuts short."""
    engine = Engine(case.decoder, case.method, 1, len(ids) + params.max_tokens)
    request, found = engine.submit(ids, params), []
    while engine.busy:
        prefill = bool(engine.waiting or engine.arriving)
        drafted, accepted = request.stats.draft_tokens, request.stats.accepted_tokens
        begun = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - begun
        if not prefill and not request.done and request.stats.draft_tokens - drafted == case.gamma:
            phases = engine.batch.phase_seconds
            drafting = phases["draft"] + phases["correct"] if case.gamma else 0.0
            found.append(Round(request.stats.accepted_tokens - accepted, seconds, drafting))
    request.result()  # raises what went wrong
    return found


def results(rows: Sequence[dict[str, Any]], one_pass: dict[str, bool]) -> list[dict[str, Any]]:
    """Predictions and measurements of each system, for drafts of 1 token to the most that it was measured with."""

    def rounds(system: str, gamma: int, for_costs: bool) -> list[Round]:
        mine = [row for row in rows if (row["system"], row["gamma"]) == (system, gamma)]
        return [Round(*one) for row in mine if (row["prompt"] == 0) == for_costs for one in row["rounds"]]

    found = []
    for system in dict.fromkeys(row["system"] for row in rows if row["system"] in one_pass):
        most = max(row["gamma"] for row in rows if row["system"] == system)
        of_gamma = [rounds(system, gamma, for_costs=False) for gamma in range(1, most + 1)]
        if not all(rounds(system, gamma, costs) for gamma in range(1, most + 1) for costs in (False, True)):
            raise ConfigError(f"{system}: no answer has a whole round of {most} tokens; raise max_tokens")
        costs = Costs.of(rounds(PLAIN, 0, True), [rounds(system, gamma, True) for gamma in range(1, most + 1)])
        plain, accepted = rounds(PLAIN, 0, False), [one.accepted for one in of_gamma[-1]]
        alpha, rates = acceptance_rate(accepted, most), acceptance_by_place(accepted, most)
        lengths: list[dict[str, Any]] = []
        for predicted, each in zip(predictions(costs, alpha, rates, one_pass[system]), of_gamma, strict=True):
            came = measured(plain, each)
            errors = {kind: predicted[kind] / came["speedup"] - 1.0 for kind in PREDICTED}
            own = acceptance_rate([one.accepted for one in each], int(predicted["gamma"]))
            lengths.append({**predicted, "alpha": own, "measured": came, "error": errors})
        found.append(
            {
                "system": system,
                "one_pass": one_pass[system],
                "alpha": alpha,
                "acceptance_by_place": rates,
                "c": costs.drafting[-1] / (1 if one_pass[system] else most),
                "step_seconds": costs.step_seconds,
                "plain_tokens_per_second": measured(plain, plain)["tokens_per_second"],
                "best_gamma": {
                    **{kind: max(lengths, key=lambda one: one[kind])["gamma"] for kind in PREDICTED},
                    "measured": max(lengths, key=lambda one: one["measured"]["speedup"])["gamma"],
                },
                "largest_error": {kind: max(abs(one["error"][kind]) for one in lengths) for kind in PREDICTED},
                "lengths": lengths,
            }
        )
    return found


# ------------------------------------------------------------------------------------------------ what is shown


def markdown(report: dict[str, Any]) -> str:
    """A table for each system, and one of all against the ceiling."""
    parts = []
    for one in report["systems"]:
        table = [["gamma", "alpha", "tokens", "drafting", "v", "paper", "with v", "by place", "measured", "error"]]
        for row in one["lengths"]:
            numbers = [row[key] for key in ("drafting", "verifying", *PREDICTED)]
            cells = [row["alpha"], row["measured"]["tokens"], *numbers, row["measured"]["speedup"]]
            table.append([str(row["gamma"]), *(f"{cell:.2f}" for cell in cells), f"{row['error']['by_place']:+.1%}"])
        best = ", ".join(f"{kind} {gamma}" for kind, gamma in one["best_gamma"].items())
        cost = "a draft" if one["one_pass"] else "a token"
        parts += [
            f"### {one['system']}",
            f"alpha {one['alpha']:.3f}, c {one['c']:.3f} {cost}; times are in plain steps of "
            f"{1000 * one['step_seconds']:.1f} ms. Best gamma: {best}.",
            "\n".join(markdown_table(table)),
        ]
    top = report["ceiling"]
    rates = {
        one["system"]: max(row["measured"]["tokens_per_second"] for row in one["lengths"]) for one in report["systems"]
    }
    if report["systems"]:
        rates = {PLAIN: report["systems"][0]["plain_tokens_per_second"], **rates}
    table = [["system", "tokens/s", "of the memory's ceiling", "of the matrices'"]]
    for name, rate in rates.items():
        shares = (rate / top["tokens_per_second"], rate / top["linear_tokens_per_second"])
        table.append([name, f"{rate:.1f}", *(f"{share:.0%}" for share in shares)])
    parts += [
        "### The ceiling of plain decoding",
        f"A step reads {top['bytes_per_step'] / 1e6:.0f} MB of weights. "
        f"Memory gives {top['read_bytes_per_second'] / 1e9:.1f} GB/s: "
        f"{top['tokens_per_second']:.0f} tokens/s; the matrices alone, one token after another, "
        f"{top['linear_bytes_per_second'] / 1e9:.1f} GB/s: {top['linear_tokens_per_second']:.0f} tokens/s. "
        "Drafting systems are shown with their fastest length.",
        "\n".join(markdown_table(table)),
    ]
    return "\n\n".join(parts) + "\n"


def plot(systems: Sequence[dict[str, Any]], file: Path) -> None:
    """Speed-up against gamma, predicted and measured, a panel a system."""
    try:
        from matplotlib import pyplot
    except ImportError:
        Console().print("no plot: pip install 'dcoco[plots]'", markup=False)
        return
    if not systems:
        return
    figure, axes = pyplot.subplots(
        1, len(systems), figsize=(5 * len(systems), 4), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, one in zip(axes[0], systems, strict=True):
        gammas = [row["gamma"] for row in one["lengths"]]
        for kind, label in zip(PREDICTED, ("the papers'", "with v", "by place"), strict=True):
            axis.plot(gammas, [row[kind] for row in one["lengths"]], linestyle="--", label=label)
        axis.plot(
            gammas, [row["measured"]["speedup"] for row in one["lengths"]], marker="o", color="k", label="measured"
        )
        axis.set(title=one["system"], xlabel="gamma", xticks=gammas)
        axis.grid(alpha=0.3)
    axes[0, 0].set(ylabel="tokens/s over plain decoding", ylim=(0, None))
    axes[0, 0].legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def check(config: DictConfig, folder: Path) -> None:
    """Refuse settings that make no sense, or that differ from those of the run that goes on."""
    if not OmegaConf.is_list(config.benchmark):
        config.benchmark = [config.benchmark]
    check_numbers(config)
    if prompts := [entry.name for entry in config.systems if entry.get("drafter") == "prompt_lookup"]:
        raise ConfigError(
            f"systems: {', '.join(prompts)} drafts as much as it finds; the theory is of drafts of one length"
        )
    if config.limit < 2:
        raise ConfigError(
            f"limit={config.limit}: must be at least 2; the first prompt of each benchmark tells the costs"
        )
    if trees := [entry.name for entry in config.systems if entry.method not in ("top1", "walk")]:
        raise ConfigError(f"systems: {', '.join(trees)} must have method top1 or walk; the theory is of single paths")
    check_resumed(config, folder / "theory.json", {"systems", "skip_missing", "memory_mib", "resume"})


if __name__ == "__main__":
    main()
