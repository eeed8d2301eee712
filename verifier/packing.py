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

SLACK = 1.15  # where padding adds less than this, it costs less than packing
EXTRA = 16  # what a row in the second part costs, in queries: its keys and values are copied


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Queries `first .. first + queries - 1` of some rows, padded."""

    rows: Tensor | None  # int64 [r]; None: all of them
    first: int
    queries: int
    tokens: Tensor  # int64 [r * queries]: which packed token stands at each place; any where there is none
    places: Tensor  # int64: the places that have one

    def take(self, x: Tensor) -> Tensor:
        """These rows of x [R, ...]."""
        return x if self.rows is None else x.index_select(0, self.rows)

    def take_keys(self, x: Tensor) -> Tensor:
        """These rows of keys or values [R, G, L, D]. As they lie in the cache, token by token, they copy faster."""
        return x if self.rows is None else x.transpose(1, 2).index_select(0, self.rows).transpose(1, 2)

    def unpack(self, packed: Tensor) -> Tensor:
        """Packed [T, ...] laid out as [r, queries, ...]."""
        return packed.index_select(0, self.tokens).unflatten(0, (-1, self.queries))

    def pack(self, padded: Tensor) -> Tensor:
        """The real tokens of padded [r, queries, ...]."""
        return padded.flatten(0, 1).index_select(0, self.places)


class Packing:
    """Which of R x Q padded places hold real tokens: the first counts[r] of row r.

    Attributes:
        index: int64 [T], r * Q + q of each real token, in packed order.
        whole: so few places are free that they are run as well: T = R * Q, and nothing is packed.
        parts: how attention lays the queries out; their tokens follow one another.
    """

    def __init__(self, counts: Sequence[int], device: torch.device | str = "cpu"):
        self.rows, self.queries = len(counts), max(counts)
        self.whole = self.fits(sum(counts), self.rows, self.queries)
        self.parts: list[Part] = []
        self.index = torch.arange(self.rows * self.queries, device=device)
        self._tokens = self.index  # of each place; any where there is none
        self._masks: dict[int, list[Tensor]] = {}
        if self.whole:
            return
        lengths = torch.tensor(counts)
        width = min(set(counts), key=lambda width: self._cost(counts, width))
        everyone, long = torch.arange(self.rows), (lengths > width).nonzero().flatten()
        layouts = []
        for rows, first, last in ((everyone, 0, width), (long, width, self.queries)):
            queries = torch.arange(first, last)
            layouts.append((rows, first, (rows[:, None] * self.queries + queries), queries < lengths[rows, None]))
        index = torch.cat([places[real] for _, _, places, real in layouts])
        tokens = torch.zeros(self.rows * self.queries, dtype=torch.int64).scatter_(0, index, torch.arange(len(index)))
        for rows, first, places, real in layouts:
            if len(rows):
                of = None if rows is everyone else rows.to(device)
                kept = real.flatten().nonzero().flatten().to(device)
                self.parts.append(Part(of, first, places.shape[1], tokens[places.flatten()].to(device), kept))
        self.index, self._tokens = index.to(device), tokens.to(device)

    @staticmethod
    def fits(tokens: int, rows: int, queries: int) -> bool:
        """Whether so many tokens leave few enough places free for a padded pass."""
        return rows * queries <= SLACK * tokens

    def pack(self, padded: Tensor) -> Tensor:
        """The real tokens [T, ...] of padded [R, Q, ...]."""
        return padded.flatten(0, 1) if self.whole else padded.flatten(0, 1).index_select(0, self.index)

    def unpack(self, packed: Tensor) -> Tensor:
        """Packed [T, ...] laid out as [R, Q, ...]; anything where there is no token."""
        padded = packed if self.whole else packed.index_select(0, self._tokens)
        return padded.unflatten(0, (self.rows, self.queries))

    def find(self, queries: Tensor) -> Tensor:
        """Where queries int64 [R, n] of each row stand among the packed tokens; anywhere for one without a token."""
        return self._tokens[queries + torch.arange(self.rows, device=queries.device)[:, None] * self.queries]

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
