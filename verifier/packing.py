"""Rows of different lengths in one pass, without padding: only real tokens go through the layers.

All of a layer but its attention treats tokens one by one, so the real tokens of all rows run as one sequence. Attention
needs the rows apart: there the queries are laid out padded, and packed again behind it.

Shapes: R rows, Q queries of the longest row, T real tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class Packing:
    """Which of R x Q padded places hold real tokens: the first counts[r] of row r, row by row.

    Attributes:
        index: int64 [T], r * Q + q of each real token.
        whole: all places are taken, and a pass needs no packing.
    """

    def __init__(self, counts: Sequence[int], device: torch.device | str = "cpu"):
        self.rows, self.queries = len(counts), max(counts)
        self.total = sum(counts)
        self.whole = self.total == self.rows * self.queries
        places = torch.arange(self.rows * self.queries, device=device)
        self._counts = torch.tensor(counts, device=device)
        if not self.whole:
            places = places[places % self.queries < self._counts.repeat_interleave(self.queries)]
        self.index: Tensor = places

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
        """Where queries int64 [R, n] of each row stand among the packed tokens; a query without a token: anywhere."""
        starts = self._counts.cumsum(0) - self._counts
        return (starts[:, None] + queries).clamp(max=self.total - 1)
