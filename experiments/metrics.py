"""Figures of requests under load, named and defined as `vllm bench serve` has them.

Times are in milliseconds. ttft: from sending to the first token; itl: between two pieces of a stream that follow each
other (with drafts a piece has several tokens); tpot: a request's time a token after the first one; e2el: to its end.
Beyond vLLM's there is the throughput of the steady part of a closed loop (`steady`), and drafting is told as
`dcoco.Stats` defines it: a round without a draft counts too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from experiments.load import Load, Timeline


@dataclass
class Pass:
    """One method under one load, once."""

    method: str
    load: Load
    repeat: int
    timelines: list[Timeline]

    @property
    def duration(self) -> float:
        """Seconds from the first request's start to the last one's end."""
        return max(timeline.ended for timeline in self.timelines) - min(timeline.begun for timeline in self.timelines)

    @property
    def output_tokens(self) -> int:
        return sum(timeline.output_tokens for timeline in self.timelines)


def steady(timelines: Sequence[Timeline], concurrency: int | None) -> tuple[int, float]:
    """Tokens that came while a closed loop was full and warm, and for how many seconds it was; (0, 0.0): never.

    From the first request's end, since before it all of them started at the same moment, to the first end behind which
    no request was left to take the place.
    """
    if concurrency is None or len(timelines) <= concurrency:
        return 0, 0.0
    ends = sorted(timeline.ended for timeline in timelines)
    first, last = ends[0], ends[len(timelines) - concurrency]
    came = sum(tokens for timeline in timelines for at, tokens in timeline.pieces if first < at <= last)
    return came, last - first


def figures(passes: Sequence[Pass]) -> dict[str, Any]:
    """All figures of a method under a load, from its passes taken together."""
    timelines = [timeline for one in passes for timeline in one.timelines]
    good = [timeline for timeline in timelines if timeline.error is None and timeline.pieces]
    seconds = sum(one.duration for one in passes)
    inputs, outputs = sum(t.input_tokens for t in good), sum(t.output_tokens for t in good)
    steadies = [steady(one.timelines, one.load.concurrency) for one in passes]
    steady_tokens, steady_seconds = sum(tokens for tokens, _ in steadies), sum(length for _, length in steadies)
    ends = [(t, t.pieces[0][0], t.pieces[-1][0]) for t in good]
    times = {
        "ttft": [first - t.begun for t, first, _ in ends],
        "tpot": [(last - first) / (t.output_tokens - 1) for t, first, last in ends if t.output_tokens > 1],
        "itl": [after - before for t in good for (before, _), (after, _) in pairwise(t.pieces)],
        "e2el": [last - t.begun for t, _, last in ends],
    }
    return {
        "duration": seconds,
        "completed": len(good),
        "failed": len(timelines) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": _rate(len(good), seconds),
        "output_throughput": _rate(outputs, seconds),
        "total_token_throughput": _rate(inputs + outputs, seconds),
        "output_throughput_of_passes": [_rate(one.output_tokens, one.duration) for one in passes],
        "steady_duration": steady_seconds,
        "steady_output_tokens": steady_tokens,
        "steady_output_throughput": _rate(steady_tokens, steady_seconds),
        **{key: value for name, values in times.items() for key, value in spread(name, values).items()},
        **drafting([timeline.stats for timeline in good if timeline.stats is not None]),
    }


def spread(name: str, seconds: Iterable[float]) -> dict[str, float | None]:
    """Mean, median, deviation and 99th percentile of times, in milliseconds; None where there are none."""
    values = 1000.0 * np.asarray(list(seconds))
    some = values if values.size else np.array([np.nan])
    found = {"mean": some.mean(), "median": np.median(some), "std": some.std(), "p99": np.percentile(some, 99)}
    return {f"{kind}_{name}_ms": float(value) if values.size else None for kind, value in found.items()}


def drafting(stats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """vLLM's spec_decode figures, from the requests' `Stats`; length and rates at positions are of all rounds."""
    names = ("rounds", "drafts", "draft_tokens", "accepted_tokens", "committed_tokens")
    rounds, drafts, drafted, accepted, committed = (sum(one[name] for one in stats) for name in names)
    deepest = max((len(one["accepted_at"]) for one in stats), default=0)
    at = [sum(one["accepted_at"][t] for one in stats if t < len(one["accepted_at"])) for t in range(deepest)]
    return {
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": 100.0 * accepted / drafted if drafted else None,  # in percent, as vLLM has it
        "spec_decode_acceptance_length": committed / rounds if rounds else None,
        "spec_decode_per_position_acceptance_rates": [count / rounds for count in at],
    }


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds else None
