"""Rows of different lengths in one pass, without padding: only real tokens go through the layers.

All of a layer but its attention treats tokens one by one, so the real tokens of all rows run as one sequence. Attention
needs the rows apart. There neighbouring rows of similar length form a segment, which looks no further than its longest
row's context; its queries are laid out padded, except that what only a few rows have is laid out in a part of its own.

Shapes: R rows, Q queries of the longest row, T real tokens, L keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Masks = Tensor | dict[str, Tensor | None] | None  # of a pass; by kind of layer where there are several

SLACK = 1.15  # where padding adds less than this, it costs less than packing
EXTRA = 16  # what a row in the last part costs, in queries: its keys and values are copied
SEGMENT = 400  # what a segment more costs attention, in keys


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Queries `first .. first + queries - 1` of some rows, padded, and the keys that they look at."""

    rows: slice | Tensor  # int64 [r] where they are no neighbours
    first: int
    queries: int
    extent: int  # keys
    tokens: (
        slice | Tensor
    )  # the packed token at each of r * queries places, any where there is none; a slice: no padding
    places: Tensor | None  # int64: the places that have a token; None: all

    def keys(self, x: Tensor) -> Tensor:
        """These rows of keys or values [R, G, L, D]: [r, G, extent, D]."""
        if isinstance(self.rows, slice):
            return x[self.rows, :, : self.extent]
        return x[:, :, : self.extent].transpose(1, 2).index_select(0, self.rows).transpose(1, 2)  # as they lie: faster

    def mask(self, packing: "Packing", folded: Tensor) -> Tensor:
        """The part's folded mask [r, 1, f * queries, extent] of a folded mask [R, 1, f * Q, L]."""
        unfolded = folded.view(packing.rows, -1, packing.queries, folded.shape[-1])
        queries = slice(self.first, self.first + self.queries)
        return unfolded[self.rows][:, :, queries, : self.extent].flatten(1, 2)[:, None]

    def unpack(self, packed: Tensor) -> Tensor:
        """Packed [T, ...] laid out as [r, queries, ...]."""
        found = packed[self.tokens] if isinstance(self.tokens, slice) else packed.index_select(0, self.tokens)
        return found.unflatten(0, (-1, self.queries))

    def pack(self, padded: Tensor) -> Tensor:
        """The real tokens of padded [r, queries, ...]."""
        return padded.flatten(0, 1) if self.places is None else padded.flatten(0, 1).index_select(0, self.places)


class Packing:
    """Which of R x Q padded places hold real tokens: the first counts[r] of row r.

    Args:
        contexts: tokens of each row before these; by default the rows are taken for equally long.
        slack: at what padding, over the real tokens, the free places are run as well. Rows must have room for them.

    Attributes:
        index: int64 [T], r * Q + q of each real token, in packed order.
        whole: so few places are free that they are run as well: T = R * Q.
        parts: how attention lays the queries out; their tokens follow one another.
    """

    def __init__(
        self,
        counts: Sequence[int],
        device: torch.device | str = "cpu",
        contexts: Sequence[int] | None = None,
        slack: float = SLACK,
    ):
        self.rows, self.queries = len(counts), max(counts)
        self.whole = self.fits(sum(counts), self.rows, self.queries, slack)
        self.written = [self.queries] * self.rows if self.whole else list(counts)  # places of each row that are run
        extents = [context + self.queries for context in contexts or [0] * self.rows]
        self.parts: list[Part] = []
        self.index = torch.arange(self.rows * self.queries, device=device)
        self._tokens = self.index  # of each place; any where there is none
        if self.whole:
            for span, extent in segments(extents):
                tokens = slice(span.start * self.queries, span.stop * self.queries)
                self.parts.append(Part(span, 0, self.queries, extent, tokens, None))
            return
        lengths, width = torch.tensor(counts), self._width(counts)
        long = (lengths > width).nonzero().flatten()
        layouts: list[tuple[slice | Tensor, int, int, int]] = [
            (rows, 0, width, extent) for rows, extent in segments(extents)
        ]
        if len(long):
            layouts.append((long, width, self.queries, max(extents[row] for row in long.tolist())))
        places_of = [
            (torch.arange(self.rows)[rows, None] * self.queries + torch.arange(first, last))
            for rows, first, last, _ in layouts
        ]
        real_of = [places % self.queries < lengths[places // self.queries] for places in places_of]
        index = torch.cat([places[real] for places, real in zip(places_of, real_of, strict=True)])
        tokens_of = torch.zeros(self.rows * self.queries, dtype=torch.int64)
        tokens_of[index] = torch.arange(len(index))
        for (rows, first, last, extent), places, real in zip(layouts, places_of, real_of, strict=True):
            rows = rows if isinstance(rows, slice) else rows.to(device)
            kept = real.flatten().nonzero().flatten().to(device)
            self.parts.append(Part(rows, first, last - first, extent, tokens_of[places.flatten()].to(device), kept))
        self.index, self._tokens = index.to(device), tokens_of.to(device)

    @staticmethod
    def fits(tokens: int, rows: int, queries: int, slack: float = SLACK) -> bool:
        """Whether so many tokens leave few enough places free for a padded pass."""
        return rows * queries <= slack * tokens

    @property
    def trivial(self) -> bool:
        """One part with all places: the pass may run as [R, Q]."""
        return self.whole and len(self.parts) == 1

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

    def _width(self, counts: Sequence[int]) -> int:
        """Queries of each row up to which the segments go."""

        def cost(width: int) -> int:
            long = sum(count > width for count in counts)
            return len(counts) * width + long * (self.queries - width + EXTRA)

        return min(set(counts), key=cost)


class Layout:
    """Packed blocks in one pass: the tokens of each behind those of the one before, and so are its rows.

    Args:
        packings: of the blocks.
        masks: of each block, folded, by kind of layer; what a layer of the first block is given names the kind.
    """

    def __init__(self, packings: Sequence[Packing], masks: Sequence[Masks]):
        self.packings = packings
        self.counts = [len(packing.index) for packing in packings]
        by_kind = zip(*(each.values() if isinstance(each, dict) else [each] for each in masks), strict=True)
        self._masks = {id(of_kind[0]): of_kind for of_kind in by_kind}
        self._parts: dict[int, list[tuple[slice, slice, Part, Tensor]]] = {}

    def pack(self, padded: Sequence[Tensor]) -> list[Tensor]:
        """The real tokens of all blocks, [1, T, ...] in a list, of padded [R, Q, ...] each."""
        found = [packing.pack(block) for packing, block in zip(self.packings, padded, strict=True)]
        return [torch.cat(found)[None] if len(found) > 1 else found[0][None]]

    def split(self, packed: Tensor) -> Sequence[Tensor]:
        """The tokens of each block, [1, T', ...], of packed [1, T, ...]."""
        return packed.split(self.counts, dim=1)

    def parts(self, mask: Tensor) -> list[tuple[slice, slice, Part, Tensor]]:
        """What attention runs one after the other: tokens and rows of a block, one of its parts, and the part's mask.

        All layers of a kind ask for the same.
        """
        if id(mask) not in self._parts:
            found, token, row = [], 0, 0
            for packing, count, of_block in zip(self.packings, self.counts, self._masks[id(mask)], strict=True):
                tokens, rows = slice(token, token + count), slice(row, row + packing.rows)
                found += [(tokens, rows, part, part.mask(packing, of_block)) for part in packing.parts]
                token, row = tokens.stop, rows.stop
            self._parts[id(mask)] = found
        return self._parts[id(mask)]


def segments(extents: Sequence[int]) -> list[tuple[slice, int]]:
    """Neighbouring rows that attention runs together, and the largest extent of each group.

    As few keys as possible are looked at, where each group costs as many as SEGMENT more.
    """
    best, begins = [0], [0]  # what the first rows cost, and where their last segment begins
    for stop in range(1, len(extents) + 1):
        high, costs = 0, []
        for start in range(stop - 1, -1, -1):
            high = max(high, extents[start])
            costs.append(best[start] + high * (stop - start) + SEGMENT)
        best.append(min(costs))
        begins.append(stop - 1 - costs.index(best[-1]))
    found, stop = [], len(extents)
    while stop:
        start = begins[stop]
        found.append((slice(start, stop), max(extents[start:stop])))
        stop = start
    return found[::-1]


def attention_work(extents: Sequence[int]) -> int:
    """Roughly what attention costs rows in this order, in keys."""
    found = segments(extents)
    return sum((rows.stop - rows.start) * extent for rows, extent in found) + SEGMENT * len(found)
