"""What a comparison's measurements say: a cell for each system, benchmark and setting, and means over the benchmarks.

A measurement is one system's answers to one group of prompts (as many as the batch has), a dictionary:

    system, benchmark, temperature, batch, repeat, group   which it is
    prompts, new_tokens, seconds                           seconds of the group: until its last answer's end
    texts                                                  a checksum of each answer, to tell whether it's plain's
    stats                                                  `dcoco.Stats` of the answers together
    max_p                                                  plain above temperature 0: mean of the target's largest p

Only groups that plain decoding has answered too are counted, so speed-ups are over the same prompts.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dcoco import Stats

Row = dict[str, Any]
SETTING = ("temperature", "batch")


def cells(rows: Sequence[Row], plain: str, order: Sequence[str] = ()) -> list[Row]:
    """A cell for each setting, system and benchmark; `plain` names the baseline.

    Systems come in the given order, those that it lacks at the end.
    """
    rank = {name: index for index, name in enumerate(order)}
    rows = sorted(rows, key=lambda row: rank.get(row["system"], len(rank)))
    group_of = _by(*SETTING, "benchmark", "repeat", "group")
    base = {group_of(row): row for row in rows if row["system"] == plain}
    rows = [row for row in rows if group_of(row) in base]
    found = []
    for (temperature, batch, system, benchmark), mine in _grouped(rows, _by(*SETTING, "system", "benchmark")).items():
        theirs = [base[group_of(row)] for row in mine]
        stats = Stats.total(Stats(**row["stats"]) for row in mine)
        of_repeat = _grouped(zip(mine, theirs, strict=True), lambda pair: pair[0]["repeat"])
        speedups = {
            repeat: _rate(one for one, _ in pairs) / _rate(other for _, other in pairs)
            for repeat, pairs in of_repeat.items()
        }
        same = [one == other for row, its in zip(mine, theirs, strict=True) for one, other in _texts(row, its)]
        shares = {phase: seconds / stats.seconds for phase, seconds in stats.phase_seconds.items()}
        found.append(
            {
                "system": system,
                "temperature": temperature,
                "batch": batch,
                "benchmark": benchmark,
                "repeats": len(of_repeat),
                "prompts": sum(row["prompts"] for row in mine),
                "new_tokens": sum(row["new_tokens"] for row in mine),
                "seconds": sum(row["seconds"] for row in mine),
                "rounds": stats.rounds,
                "draft_tokens": stats.draft_tokens,
                "accepted_tokens": stats.accepted_tokens,
                "committed_tokens": stats.committed_tokens,
                "tokens_per_second": _rate(mine),
                "speedup": _rate(mine) / _rate(theirs),
                "speedup_of_repeats": speedups,
                "acceptance_length": stats.mean_acceptance_length,
                "acceptance_per_position": stats.acceptance_per_position,
                "round_ms": 1000.0 * (stats.seconds - stats.prefill_seconds) / max(1, stats.rounds),
                # Of the rounds' phases in the answers' time; what other systems do inside isn't known.
                "share": {**shares, "other": 1.0 - sum(shares.values())} if any(shares.values()) else None,
                "identical_to_plain": sum(same) / len(same),
                "max_p": _mean([row["max_p"] for row in mine if row["max_p"] is not None]),
            }
        )
    return found


def means(found: Sequence[Row]) -> list[Row]:
    """Over the benchmarks, for each setting and system: speed-ups by their geometric mean, the rest by the usual one.

    `speedup_min` and `speedup_max` are of the geometric means of single repeats.
    """
    result = []
    for (temperature, batch, system), mine in _grouped(found, _by(*SETTING, "system")).items():
        whole = [
            repeat for repeat in mine[0]["speedup_of_repeats"] if all(repeat in c["speedup_of_repeats"] for c in mine)
        ]
        of_repeats = [geometric([cell["speedup_of_repeats"][repeat] for cell in mine]) for repeat in whole]
        deepest = max(len(cell["acceptance_per_position"]) for cell in mine)
        padded = [cell["acceptance_per_position"] + [0.0] * deepest for cell in mine]
        result.append(
            {
                "system": system,
                "temperature": temperature,
                "batch": batch,
                "benchmarks": len(mine),
                "tokens_per_second": geometric([cell["tokens_per_second"] for cell in mine]),
                "speedup": geometric([cell["speedup"] for cell in mine]),
                "speedup_min": min(of_repeats, default=None),
                "speedup_max": max(of_repeats, default=None),
                "acceptance_per_position": [_mean([one[t] for one in padded]) for t in range(deepest)],
                **{
                    key: _mean([cell[key] for cell in mine if cell[key] is not None])
                    for key in ("acceptance_length", "round_ms", "identical_to_plain", "max_p")
                },
                "draft_share": _mean([cell["share"]["draft"] for cell in mine if cell["share"]]),
            }
        )
    return result


def markdown(found: Sequence[Row], plain: str, ceiling: float) -> str:
    """A table a setting: speed-ups over plain decoding by benchmark, and what they come from.

    `ceiling` is the tokens/s that the memory's bandwidth allows plain decoding of one text.
    """
    together = means(found)
    parts = []
    for (temperature, batch), of_setting in _grouped(together, _by(*SETTING)).items():
        names = list(
            dict.fromkeys(c["benchmark"] for c in found if (c["temperature"], c["batch"]) == (temperature, batch))
        )
        table = [
            [
                "system",
                *names,
                "mean",
                "min–max",
                "tokens/s",
                "of the ceiling",
                "acceptance length",
                "ms a round",
                "drafting",
                "same text",
            ]
        ]
        for mean in of_setting:
            by_name = {
                c["benchmark"]: c["speedup"] for c in found if all(c[key] == mean[key] for key in (*SETTING, "system"))
            }
            table.append(
                [
                    mean["system"],
                    *(_number(by_name.get(name), ".2f") for name in names),
                    _number(mean["speedup"], ".2f"),
                    f"{_number(mean['speedup_min'], '.2f')}–{_number(mean['speedup_max'], '.2f')}",
                    _number(mean["tokens_per_second"], ".1f"),
                    _number(mean["tokens_per_second"] / (ceiling * batch), ".0%"),
                    _number(mean["acceptance_length"], ".2f"),
                    _number(mean["round_ms"], ".1f"),
                    _number(mean["draft_share"], ".0%"),
                    _number(mean["identical_to_plain"], ".0%"),
                ]
            )
        lines = [f"### Temperature {temperature:g}, batch {batch}", "", *markdown_table(table)]
        lines += [
            "",
            f"Memory gives plain decoding {ceiling * batch:.0f} tokens/s at most: each step reads all weights.",
        ]
        largest = next((mean["max_p"] for mean in of_setting if mean["system"] == plain), None)
        if largest is not None:
            lines += [
                "",
                f"The target's largest p is {largest:.3f} on average: no fixed draft token is accepted more often.",
            ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose first row is the head."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return [head, "|---" * len(rows[0]) + "|", *body]


def geometric(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _by(*keys: str) -> Callable[[Row], tuple[Any, ...]]:
    return lambda row: tuple(row[key] for key in keys)


def _grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _texts(row: Row, other: Row) -> list[tuple[int, int]]:
    return list(zip(row["texts"], other["texts"], strict=True))


def _rate(rows: Iterable[Row]) -> float:
    pairs = [(row["new_tokens"], row["seconds"]) for row in rows]
    return sum(tokens for tokens, _ in pairs) / sum(seconds for _, seconds in pairs)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
