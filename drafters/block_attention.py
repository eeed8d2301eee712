"""Attention for training on many blocks that share a context: each sees what stands before its anchor, and itself.

Context and block keys are scored apart and share one softmax, so no work goes into the blocks that a query may not see.

Shapes: R sequences, A blocks a sequence, n slots a block that look, m that are seen, N query heads, G key/value heads,
P context positions, D head size, g = N / G.
"""

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "dcoco_blocks"


@dataclass
class BlockContext:
    """The target's keys and values by layer ([R, G, P, D]), and which context positions each slot sees.

    Stands in for the cache: what the layers write is used for their own blocks only.
    """

    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    biases: dict[int, Tensor]  # by layer [R, 1, 1, A, 1 or n, P]: 0 where visible, else very negative

    @classmethod
    def before(
        cls,
        anchors: Tensor,
        slots: int,
        keys: dict[int, Tensor],
        values: dict[int, Tensor],
        windows: dict[int, int | None],
    ) -> Self:
        """Blocks that see what stands before their anchors (int64 [R, A]), as far as each layer's window goes."""
        positions_P = torch.arange(next(iter(keys.values())).shape[2], device=anchors.device)
        steps_n1 = torch.arange(slots, device=anchors.device)[:, None]
        made: dict[int | None, Tensor] = {}
        for window in set(windows.values()):
            hidden = positions_P >= anchors[..., None, None]  # [R, A, 1, P]
            if window is not None:
                hidden = hidden | (positions_P <= anchors[..., None, None] + steps_n1 - window)
            bias = torch.zeros(hidden.shape, device=anchors.device)
            made[window] = bias.masked_fill_(hidden, torch.finfo(torch.float32).min)[:, None, None]
        return cls(keys, values, {layer: made[window] for layer, window in windows.items()})

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """As `transformers.Cache.update`: nothing is kept."""
        return keys, values

    def bias(self, layer: int) -> Tensor:
        """Which context positions the slots of a pass see, [R, 1, 1, A, 1 or n, P]."""
        return self.biases[layer]


@dataclass
class ChainContext(BlockContext):
    """Blocks that grow by one slot a pass of a single layer: each slot sees the context, those before it and itself."""

    slots: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # keys and values of each, [R, G, A, D]

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """The keys and values of all slots so far, [R, G, A * m, D]."""
        self.slots.append((keys, values))
        all_keys, all_values = zip(*self.slots, strict=True)
        return torch.stack(all_keys, dim=3).flatten(2, 3), torch.stack(all_values, dim=3).flatten(2, 3)

    def bias(self, layer: int) -> Tensor:
        """Which context positions the last slot sees."""
        bias = self.biases[layer]
        return bias if bias.shape[4] == 1 else bias[..., len(self.slots) - 1, None, :]


def block_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    context: BlockContext,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend with query [R, N, A * n, D] to the context and to the own block in key and value [R, G, A * m, D]."""
    rows, heads, queries, size = query.shape
    bias = context.bias(module.layer_idx)  # type: ignore[arg-type]
    groups, blocks = key.shape[1], bias.shape[3]
    context_keys = context.keys[module.layer_idx].to(key.dtype)  # type: ignore[index]
    context_values = context.values[module.layer_idx].to(value.dtype)  # type: ignore[index]
    positions = context_keys.shape[2]
    shape = (rows, groups, heads // groups, blocks, queries // blocks)
    folded = (rows, groups, heads // groups * queries)

    outer = (query.reshape(*folded, size) @ context_keys.transpose(2, 3)).view(*shape, positions)
    own_query = query.view(*shape, size)
    own_key, own_value = (x.view(rows, groups, 1, blocks, -1, size) for x in (key, value))
    inner = own_query @ own_key.transpose(-1, -2)
    scores = torch.cat([outer.float() * scaling + bias, inner.float() * scaling], dim=-1)
    weights = scores.softmax(-1).to(query.dtype)
    out = (weights[..., :positions].reshape(*folded, positions) @ context_values).view(*shape, size)
    out = out + weights[..., positions:] @ own_value
    return out.reshape(rows, heads, queries, size).transpose(1, 2), None


AttentionInterface.register(NAME, block_attention)
