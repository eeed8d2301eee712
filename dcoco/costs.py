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
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
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
FIRST_RAGGED = 1.25  # tokens of a row: the fewest of a ragged pass, which costs more from the first one on
CONTEXT = (448, 64)  # positions that the first and the last of the measured rows hold
LONGEST = 24  # of one row
GOLDEN = 0.618  # its multiples spread evenly between whole numbers
MOST = 256  # tokens of a measured pass
REPEATS = 2  # the faster one counts: what else the machine does only slows it down
LONG = 0.2  # seconds from which a call isn't repeated: a slow machine should not be slow to start too


@dataclass(frozen=True)
class Costs:
    """Measured seconds; between the measured points they are interpolated, behind the last one extrapolated."""

    rows: list[int]
    tokens: list[int]  # a row
    even: list[list[float]]  # [rows][tokens]: one pass, to the most probable token of every query
    ragged: list[list[float]]  # for 1 and FIRST_RAGGED tokens and as many as `tokens` beyond that on average
    slots: list[int]
    draft: list[list[float]]  # [rows][slots]: drafting and correcting

    def of_even(self, rows: int, tokens: np.ndarray) -> np.ndarray:
        """Seconds of a pass of so many tokens altogether in `rows` rows of equal length."""
        return self._between(rows, np.asarray(tokens) / rows, self.tokens, self.even)

    def of_ragged(self, rows: int, tokens: np.ndarray) -> np.ndarray:
        """Seconds of a pass of so many tokens altogether in `rows` rows of different lengths."""
        points = [1, FIRST_RAGGED, *self.tokens[1:]]
        return self._between(rows, np.asarray(tokens) / rows, points, self.ragged)

    def of_draft(self, rows: int, slots: int) -> float:
        """Seconds of drafting blocks of `slots` tokens for `rows` rows."""
        return float(self._between(rows, np.asarray(slots), self.slots, self.draft))

    def _between(self, rows: int, x: np.ndarray, points: list[Any], curves: list[list[float]]) -> np.ndarray:
        values = [_interpolate(x, points[: len(curve)], curve) for curve in curves]
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
    """The costs of a decoder's rounds on this machine, measured if they are not in the cache folder."""
    target, drafter = decoder.target, decoder.drafter
    assert drafter is not None
    facts = {
        "target": [target.config.to_json_string(), str(target.dtype), str(target.device)],
        "drafter": [repr(drafter), drafter.block_size, len(drafter.taps)],  # its modules and their sizes
        "method": [method, type(decoder.corrector).__name__, decoder.tree_size, decoder.recall],
        "machine": [cpu_model(), torch.get_num_threads(), torch.__version__],
        "rows": max_rows,
    }
    file = cache_folder().parent / "costs" / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.json"
    try:
        return Costs(**json.loads(file.read_text())["costs"])
    except (OSError, ValueError, KeyError, TypeError):
        costs = measure(decoder, method, max_rows)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"costs": asdict(costs), "facts": facts}, indent=1))
        part.replace(file)
        return costs


@torch.inference_mode()
def measure(decoder: "DCOCODecoder", method: "Method", max_rows: int) -> Costs:
    """Time passes and drafts of up to `max_rows` rows."""
    from dcoco.engine import Batch, Request  # the engine needs this module

    target, drafter = decoder.target, decoder.drafter
    assert drafter is not None
    counts = sorted({*(rows for rows in ROWS if rows < max_rows), max_rows})
    slots = sorted({max(1, drafter.block_size >> halved) for halved in range(3)})
    longest = min(CONTEXT[0], target.max_positions - LONGEST - 1)
    costs = Costs(counts, list(TOKENS), [], [], slots, [])
    for rows in tqdm(counts, desc="measuring what a round costs", unit="size", leave=False):
        cache = RaggedCache(rows, longest + max(LONGEST, drafter.block_size) + 1, target.device)
        state = drafter.start(rows, cache.max_length)
        batch = Batch(method, cache, state)
        params = SamplingParams()
        batch.requests = [Request([0], params, 1, Detokenizer(decoder.tokenizer))] * rows
        batch.sampling = SamplingBatch.stack([params] * rows, [0] * rows, target.device)
        batch.anchors = torch.zeros(rows, dtype=torch.int64, device=target.device)
        cache.lengths = contexts(rows, longest)
        taps = [torch.zeros(1, longest, target.hidden_size, dtype=target.dtype, device=target.device)] * len(
            drafter.taps
        )
        for row, length in enumerate(cache.lengths):  # a drafter may keep a cache of its own
            drafter.observe(state, row, taps, torch.tensor([length], device=target.device))

        def run(tokens: list[int], batch: Batch = batch) -> None:
            ids = batch.anchors[:, None].expand(-1, max(tokens))
            packing = Packing(tokens, target.device, batch.cache.lengths)
            result = target.forward(ids, batch.cache, drafter.taps, packing=packing)
            target.logits(result.hidden).max(-1)

        def draft(slots: int, batch: Batch = batch) -> None:
            decoder.propose(batch, [slots] * len(batch.requests))

        within = [count for count in TOKENS if rows * count <= MOST or count <= 2]
        run([1] * rows)  # the first call allocates the cache
        costs.even.append([_seconds(run, [count] * rows, target.device) for count in within])
        one, *more = costs.even[-1]
        if rows > 1:
            more = [_seconds(run, spread(rows, count), target.device) for count in (FIRST_RAGGED, *within[1:])]
        else:  # one row is never ragged
            more = [float(np.interp(FIRST_RAGGED, within, costs.even[-1])), *more]
        costs.ragged.append([one, *more])
        costs.draft.append([_seconds(draft, count, target.device) for count in slots])
    for curve in (*costs.even, *costs.ragged, *costs.draft):  # what did less and took longer was disturbed
        curve[:] = np.minimum.accumulate(curve[::-1])[::-1].tolist()
    return costs


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


def _seconds(call: Callable[[Any], None], size: Any, device: torch.device) -> float:
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        call(size)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
        if times[-1] > LONG:
            break
    return min(times)


def cpu_model() -> str:
    """The name of this machine's processor, as far as the system tells."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
