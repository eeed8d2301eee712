"""Rows of different lengths in one pass, without padding: only real tokens go through the layers.

All of a layer but its attention treats tokens one by one, so the real tokens of all rows run as one sequence. Attention
needs the rows apart: there the queries are laid out padded, in one part that every row has and another that only long
rows have, so that one long row doesn't pad all others.

Shapes: R rows, Q queries of the longest row, T real tokens, L keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EXTRA = 16  # what a row in the second part costs, in queries: its keys and values are copied


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Queries `first .. first + queries - 1` of some rows, padded."""

    rows: Tensor | None  # int64 [r]; None: all of them
    count: int  # r
    first: int
    queries: int
    tokens: slice  # of the packed sequence
    places: Tensor  # int64: where they stand among the r x queries places

    def take(self, x: Tensor) -> Tensor:
        """These rows of x [R, ...]."""
        return x if self.rows is None else x.index_select(0, self.rows)

    def unpack(self, packed: Tensor) -> Tensor:
        """Packed [T, ...] laid out as [r, queries, ...], zero where there is no token."""
        padded = packed.new_zeros(self.count * self.queries, *packed.shape[1:])
        return padded.index_copy_(0, self.places, packed[self.tokens]).unflatten(0, (self.count, self.queries))

    def pack(self, padded: Tensor) -> Tensor:
        """The real tokens of padded [r, queries, ...]."""
        return padded.flatten(0, 1).index_select(0, self.places)


class Packing:
    """Which of R x Q padded places hold real tokens: the first counts[r] of row r.

    Attributes:
        index: int64 [T], r * Q + q of each real token, in packed order.
        whole: all places are taken, and a pass needs no packing.
        parts: how attention lays the queries out; their tokens follow one another.
    """

    def __init__(self, counts: Sequence[int], device: torch.device | str = "cpu"):
        self.rows, self.queries = len(counts), max(counts)
        self.whole = sum(counts) == self.rows * self.queries
        self.parts: list[Part] = []
        self._masks: dict[int, list[Tensor]] = {}
        self.index: Tensor
        if self.whole:
            self.index = torch.arange(self.rows * self.queries, device=device)
            return
        lengths = torch.tensor(counts)
        width = min(set(counts), key=lambda width: self._cost(counts, width))
        long = (lengths > width).nonzero().flatten()
        found: list[Tensor] = []
        for rows, first, last in ((torch.arange(self.rows), 0, width), (long, width, self.queries)):
            queries = torch.arange(first, last)
            real = queries < lengths[rows, None]
            begun = sum(len(part) for part in found)
            found.append((rows[:, None] * self.queries + queries)[real])
            tokens, places = slice(begun, begun + len(found[-1])), real.flatten().nonzero().flatten().to(device)
            of = None if rows is not long else long.to(device)
            if len(rows):
                self.parts.append(Part(of, len(rows), first, last - first, tokens, places))
        self.index = torch.cat(found).to(device)

    def pack(self, padded: Tensor) -> Tensor:
        """The real tokens [T, ...] of padded [R, Q, ...]."""
        return padded.flatten(0, 1) if self.whole else padded.flatten(0, 1).index_select(0, self.index)

    def unpack(self, packed: Tensor) -> Tensor:
        """Packed [T, ...] laid out as [R, Q, ...], zero where there is no token."""
        if not self.whole:
            padded = packed.new_zeros(self.rows * self.queries, *packed.shape[1:])
            packed = padded.index_copy_(0, self.index, packed)
        return packed.unflatten(0, (self.rows, self.queries))

    def find(self, queries: Tensor) -> Tensor:
        """Where queries int64 [R, n] of each row stand among the packed tokens; 0 for one without a token."""
        places = queries + torch.arange(self.rows, device=queries.device)[:, None] * self.queries
        if self.whole:
            return places
        where = torch.zeros(self.rows * self.queries, dtype=torch.int64, device=queries.device)
        where[self.index] = torch.arange(len(self.index), device=queries.device)
        return where[places]

    def masks(self, mask: Tensor) -> list[Tensor]:
        """The parts of a folded mask [R, 1, f * Q, L]; all layers of a kind ask for the same."""
        if id(mask) not in self._masks:
            unfolded = mask.view(self.rows, -1, self.queries, mask.shape[-1])
            self._masks[id(mask)] = [
                part.take(unfolded)[:, :, part.first : part.first + part.queries].flatten(1, 2)[:, None]
                for part in self.parts
            ]
        return self._masks[id(mask)]

    def _cost(self, counts: Sequence[int], width: int) -> int:
        long = sum(count > width for count in counts)
        return len(counts) * width + long * (self.queries - width + EXTRA)
