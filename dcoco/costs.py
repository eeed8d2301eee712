"""What a round costs on this machine: seconds of a target pass by rows and tokens, and of a draft by rows and slots.

Measured once, in a second or two, and kept in the cache folder by model, dtype, method and machine.

Shapes: R rows.
"""

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dcoco.detokenizer import Detokenizer
from dcoco.fetch import cache_folder
from verifier.cache import RaggedCache
from verifier.packing import Packing
from verifier.sampling import SamplingBatch, SamplingParams

if TYPE_CHECKING:
    from dcoco.decoder import DCOCODecoder, Method

ROWS = (1, 4, 8, 16, 32, 64)
TOKENS = (1, 2, 4, 8, 16)  # of a row
ALONE = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24)  # of a row that is alone, where a kernel's steps show
FIRST_RAGGED = 1.25  # tokens of a row: the fewest of a ragged pass, which costs more from the first one on
CONTEXT = (448, 64)  # positions that the first and the last of the measured rows hold
LONGEST = 24  # of one row
GOLDEN = 0.618  # its multiples spread evenly between whole numbers
MOST = 256  # tokens of a measured pass
TURNS = 3  # of all sizes
LONG = 0.2  # seconds from which a call isn't repeated: a slow machine should not be slow to start too
PASSES, DRAFTS = ("rows", "tokens", "even", "ragged"), ("slots", "draft")  # fields of `Costs`


@dataclass(frozen=True)
class Costs:
    """Measured seconds; between the measured points they are interpolated, behind the last one extrapolated."""

    rows: list[int]
    tokens: list[list[int]]  # [rows]: tokens a row
    even: list[list[float]]  # [rows][tokens]: one pass, to the most probable token of every query
    ragged: list[list[float]]  # for 1 and FIRST_RAGGED tokens and, beyond that, as many as `tokens` on average
    slots: list[int]
    draft: list[list[float]]  # [rows][slots]: drafting and correcting

    def of_even(self, rows: int, tokens: np.ndarray) -> np.ndarray:
        """Seconds of a pass of so many tokens altogether in `rows` rows of equal length."""
        return self._between(rows, np.asarray(tokens) / rows, self.tokens, self.even)

    def of_ragged(self, rows: int, tokens: np.ndarray) -> np.ndarray:
        """Seconds of a pass of so many tokens altogether in `rows` rows of different lengths."""
        points = [[1, FIRST_RAGGED, *more] for _, *more in self.tokens]
        return self._between(rows, np.asarray(tokens) / rows, points, self.ragged)

    def of_draft(self, rows: int, slots: int) -> float:
        """Seconds of drafting blocks of `slots` tokens for `rows` rows."""
        return float(self._between(rows, np.asarray(slots), [self.slots] * len(self.rows), self.draft))

    def _between(self, rows: int, x: np.ndarray, points: list[Any], curves: list[list[float]]) -> np.ndarray:
        values = [_interpolate(x, *curve) for curve in zip(points, curves, strict=True)]
        if len(values) == 1:
            return values[0]
        upper = min(max(1, int(np.searchsorted(self.rows, rows))), len(self.rows) - 1)
        share = (rows - self.rows[upper - 1]) / (self.rows[upper] - self.rows[upper - 1])
        return values[upper - 1] * (1.0 - share) + values[upper] * share


def _interpolate(x: np.ndarray, points: list[Any], curve: list[float]) -> np.ndarray:
    inside = np.interp(x, points, curve)
    if len(points) == 1:
        return inside
    slope = max(0.0, (curve[-1] - curve[-2]) / (points[-1] - points[-2]))
    return inside + slope * np.maximum(0.0, x - points[-1])


def find_costs(decoder: "DCOCODecoder", method: "Method", max_rows: int) -> Costs:
    """The costs of a decoder's rounds on this machine, measured where they are not in the cache folder.

    Those of the target's passes are the same for all its drafters and methods.
    """
    target, drafter = decoder.target, decoder.drafter
    assert drafter is not None
    shared = {
        "target": [target.config.to_json_string(), str(target.dtype), str(target.device)],
        "machine": [cpu_model(), torch.get_num_threads(), torch.__version__],
        "rows": max_rows,
    }
    own = {
        "drafter": [repr(drafter), drafter.block_size, len(drafter.taps)],  # its modules and their sizes
        "method": [method, type(decoder.corrector).__name__, decoder.tree_size, decoder.recall],
    }
    passes = _cached(shared, PASSES, lambda: measure_passes(decoder, max_rows))
    return Costs(**passes, **_cached(shared | own, DRAFTS, lambda: measure_drafts(decoder, method, max_rows)))


def _cached(facts: dict[str, Any], fields: tuple[str, ...], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the cache folder holds under these facts, else what is measured now."""
    file = cache_folder().parent / "costs" / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.json"
    try:
        held = json.loads(file.read_text())["costs"]
        return {name: held[name] for name in fields}
    except (OSError, ValueError, KeyError, TypeError):
        costs = measure()
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"costs": costs, "facts": facts}, indent=1))
        part.replace(file)
        return costs


@torch.inference_mode()
def measure_passes(decoder: "DCOCODecoder", max_rows: int) -> dict[str, Any]:
    """Time passes of the target over up to `max_rows` rows: `rows`, `tokens`, `even` and `ragged` of `Costs`."""
    target = decoder.target
    counts, longest = _sizes(max_rows), _longest(decoder)
    tokens, even, ragged = [], [], []
    for rows in tqdm(counts, desc="measuring what a pass costs", unit="size", leave=False):
        cache = RaggedCache(rows, longest + LONGEST + 1, target.device)
        cache.lengths = contexts(rows, longest)
        ids_R1 = torch.zeros(rows, 1, dtype=torch.int64, device=target.device)

        def run(counts_R: list[int], cache: RaggedCache = cache, ids_R1: Tensor = ids_R1) -> None:
            packing = Packing(counts_R, target.device, cache.lengths)
            result = target.forward(ids_R1.expand(-1, max(counts_R)), cache, packing=packing)
            target.logits(result.hidden).max(-1)

        within = [count for count in TOKENS if rows * count <= MOST or count <= 2] if rows > 1 else list(ALONE)
        uneven = [spread(rows, count) for count in (FIRST_RAGGED, *within[1:])] if rows > 1 else []
        run([1] * rows)  # the first call allocates the cache
        seconds = _fastest(run, [*([count] * rows for count in within), *uneven], target.device)
        regular, more = seconds[: len(within)], seconds[len(within) :]
        if rows == 1:  # one row is never ragged
            more = [float(np.interp(FIRST_RAGGED, within, regular)), *regular[1:]]
        tokens.append(within)
        even.append(_rising(regular))
        ragged.append(_rising([regular[0], *more]))
    return {"rows": counts, "tokens": tokens, "even": even, "ragged": ragged}


@torch.inference_mode()
def measure_drafts(decoder: "DCOCODecoder", method: "Method", max_rows: int) -> dict[str, Any]:
    """Time drafts for up to `max_rows` rows: `slots` and `draft` of `Costs`."""
    from dcoco.engine import Batch, Request  # the engine needs this module

    target, drafter = decoder.target, decoder.drafter
    assert drafter is not None
    longest = _longest(decoder)
    slots = sorted({max(1, drafter.block_size >> halved) for halved in range(3)})
    taps = [torch.zeros(1, longest, target.hidden_size, dtype=target.dtype, device=target.device)] * len(drafter.taps)
    found = []
    for rows in tqdm(_sizes(max_rows), desc="measuring what a draft costs", unit="size", leave=False):
        cache = RaggedCache(rows, longest + drafter.block_size + 1, target.device)
        batch = Batch(method, cache, drafter.start(rows, cache.max_length))
        params = SamplingParams()
        batch.requests = [Request([0], params, 1, Detokenizer(decoder.tokenizer))] * rows
        batch.sampling = SamplingBatch.stack([params] * rows, [0] * rows, target.device)
        batch.anchors = torch.zeros(rows, dtype=torch.int64, device=target.device)
        target.forward(batch.anchors[:, None], cache)  # allocates the cache
        cache.lengths = contexts(rows, longest)
        assert batch.draft_state is not None
        for row, length in enumerate(cache.lengths):  # a drafter may keep a cache of its own
            drafter.observe(batch.draft_state, row, taps, torch.tensor([length], device=target.device))

        def draft(count: int, batch: Batch = batch) -> None:
            decoder.propose(batch, [count] * len(batch.requests))

        found.append(_rising(_fastest(draft, slots, target.device)))
    return {"slots": slots, "draft": found}


def _sizes(max_rows: int) -> list[int]:
    return sorted({*(rows for rows in ROWS if rows < max_rows), max_rows})


def _longest(decoder: "DCOCODecoder") -> int:
    return min(CONTEXT[0], decoder.target.max_positions - LONGEST - 1)


def contexts(rows: int, longest: int) -> list[int]:
    """Lengths of rows as an engine has them, sorted, from `longest` down to a seventh of it."""
    shortest = longest * CONTEXT[1] // CONTEXT[0]
    return [longest - (longest - shortest) * row // max(1, rows - 1) for row in range(rows)]


def spread(rows: int, mean: float) -> list[int]:
    """Tokens of each row where rows x mean are verified: one and, as drafts are good or bad, few or many more."""
    shares = [-math.log(1.0 - (0.5 + row * GOLDEN) % 1.0) for row in range(rows)]  # exponential, in no order
    wanted, total = round(rows * mean), sum(shares)
    extra = wanted - rows
    counts = [1 + min(LONGEST - 1, int(extra * share / total)) for share in shares]
    for row in sorted(range(rows), key=lambda row: counts[row])[: wanted - sum(counts)]:
        counts[row] += 1
    return counts


def _fastest(call: Callable[[Any], None], sizes: list[Any], device: torch.device) -> list[float]:
    """Seconds of a call with each size. They take turns: what else the machine does slows down several of one turn,
    and of all turns the fastest call counts."""
    best = [math.inf] * len(sizes)
    for _ in range(TURNS):
        for index, size in enumerate(sizes):
            if LONG < best[index] < math.inf:
                continue
            begun = time.perf_counter()
            call(size)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best[index] = min(best[index], time.perf_counter() - begun)
    return best


def _rising(seconds: list[float]) -> list[float]:
    """What did less and took longer was disturbed."""
    return np.minimum.accumulate(seconds[::-1])[::-1].tolist()


def cpu_model() -> str:
    """The name of this machine's processor, as far as the system tells."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
