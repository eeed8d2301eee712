"""Ragged key/value cache: one preallocated tensor a layer, one length a row.

Rows of a batch accept different numbers of draft tokens, so each row writes at its own position and rolling back is
lowering its length. Nothing is concatenated and no row is copied for a round.

Shapes: S rows allocated, R rows of a pass, Q new tokens a row, L allocated positions, G key/value heads, D head size.
"""

import torch
from torch import Tensor

from verifier.errors import ParameterError
from verifier.packing import Packing


class RaggedCache:
    """Keys and values of up to `rows` sequences of up to `max_length` tokens, called by transformers' layers.

    A forward pass is announced with `begin`; then every attention layer calls `update`, which writes the new keys and
    values of row r at positions `lengths[r] ..` and returns a view of everything up to the longest row of the pass.
    Raising `lengths[r]` makes tokens count; what lies beyond a length is overwritten by the next pass. That is how a
    verified block is rolled back, and how a drafter parks the keys of its block behind the context that it shares.

    Args:
        rows: sequences that may be held at once (S).
        max_length: positions of each row (L), the space for a block behind the context included.
    """

    def __init__(self, rows: int, max_length: int, device: torch.device | str = "cpu"):
        if rows < 1 or max_length < 2:
            raise ParameterError(
                f"a cache needs rows >= 1 and max_length >= 2, got rows={rows}, max_length={max_length}"
            )
        self.rows = rows
        self.max_length = max_length
        self.device = torch.device(device)
        self.lengths = [0] * rows  # on the host: the engine reads each round's verdict once and then knows them
        self._keys: dict[int, Tensor] = {}  # layer -> [S, L, G, D]
        self._values: dict[int, Tensor] = {}
        self._rows = slice(0, 0)
        self._extent = 0
        self._touched = [0] * rows  # positions of each row that a pass may have written to
        self._slots = torch.empty(0, dtype=torch.int64)  # flat positions (row * L + position) that the pass writes

    def begin(
        self, first: int, rows: int, queries: int, packing: Packing | None = None, more: bool = False
    ) -> tuple[Tensor, int]:
        """Announce a pass of `queries` new tokens (or the packed ones) for each of `rows` rows, from `first` on.

        With `more` they take part in the pass that was announced before, whose rows are the ones before `first`.

        Returns:
            positions [R, Q] int64 where the tokens are written, and the extent: how many cache positions the pass looks
            at.

        Raises:
            ParameterError: a row has no room for the new tokens.
        """
        lengths = self.lengths[first : first + rows]
        counts = [queries] * rows if packing is None else packing.written
        ends = [length + count for length, count in zip(lengths, counts, strict=True)]
        if max(ends) > self.max_length:
            raise ParameterError(
                f"the cache holds {self.max_length} positions a row; {max(lengths)} are taken and {max(ends)} would "
                "be: shorten the block or allocate a longer cache"
            )
        for row, end in enumerate(ends, start=first):
            self._touched[row] = max(self._touched[row], end)
        extent = min(max(lengths) + queries, self.max_length)
        starts_R1 = torch.tensor(lengths, device=self.device)[:, None]
        positions_RQ = starts_R1 + torch.arange(queries, device=self.device)
        rows_R1 = torch.arange(first, first + rows, device=self.device)[:, None]
        slots = (rows_R1 * self.max_length + positions_RQ).view(-1)
        if packing is not None and not packing.whole:
            slots = slots[packing.index]
        self._rows = slice(self._rows.start if more else first, first + rows)
        self._extent = max(self._extent, extent) if more else extent
        self._slots = torch.cat([self._slots, slots]) if more else slots
        return positions_RQ, extent

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [R, G, Q, D] (packed: [1, G, T, D]) of a layer; return all [R, G, extent, D] as views.

        The name and the arguments are those of `transformers.Cache.update`, which attention layers call.
        """
        if layer_idx not in self._values:  # the second one that is allocated, if memory lasts
            self._keys[layer_idx] = self._allocate(keys)
            self._values[layer_idx] = self._allocate(values)
        return self._write(self._keys[layer_idx], keys), self._write(self._values[layer_idx], values)

    def move(self, source: int, target: int) -> None:
        """Make row `target` a copy of row `source`: rows in use stay a prefix when one in the middle ends."""
        if source == target:
            return
        length = self.lengths[source]
        for store in (*self._keys.values(), *self._values.values()):
            store[target, :length] = store[source, :length]
        self.lengths[target] = length
        self._touched[target] = max(self._touched[target], length)

    def clean(self) -> None:
        """Zero what doesn't count: a pass that failed may have left NaN, and 0 * NaN reaches through any mask."""
        for row, (length, touched) in enumerate(zip(self.lengths, self._touched, strict=True)):
            for store in (*self._keys.values(), *self._values.values()):
                store[row, length:touched] = 0
        self._touched = list(self.lengths)

    def keep(self, moves: list[tuple[int, int, int]]) -> None:
        """Close the gaps behind an accepted branch: each (row, source, target) moves a token of the last pass, both
        counted from the row's length. The tokens that count are then the leading ones."""
        if not moves:
            return
        starts = [row * self.max_length + self.lengths[row] for row, _, _ in moves]
        flat = [
            [start + source for start, (_, source, _) in zip(starts, moves, strict=True)],
            [start + target for start, (_, _, target) in zip(starts, moves, strict=True)],
        ]
        sources, targets = torch.tensor(flat, device=self.device)
        for store in (*self._keys.values(), *self._values.values()):
            tokens = store.view(-1, *store.shape[2:])
            tokens.index_copy_(0, targets, tokens.index_select(0, sources))

    def bytes_per_token(self) -> int:
        """Bytes that one token of one row takes, once a pass has run."""
        stores = [*self._keys.values(), *self._values.values()]
        return sum(store[0, 0].numel() * store.element_size() for store in stores)

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Views of the keys and values [R, G, extent, D] of one layer, as the last pass saw them."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        return tuple(store[self._rows, : self._extent].transpose(1, 2) for store in (keys, values))  # type: ignore[return-value]

    def _allocate(self, like: Tensor) -> Tensor:
        # zeros, not empty: masked positions are multiplied by 0, and 0 * NaN is NaN. Untouched pages cost nothing.
        _, heads, _, size = like.shape
        return torch.zeros(self.rows, self.max_length, heads, size, dtype=like.dtype, device=like.device)

    def _write(self, store: Tensor, new: Tensor) -> Tensor:
        rows, heads, queries, size = new.shape
        flat = store.view(self.rows * self.max_length, heads, size)
        flat.index_copy_(0, self._slots, new.transpose(1, 2).reshape(rows * queries, heads, size))
        return store[self._rows, : self._extent].transpose(1, 2)
