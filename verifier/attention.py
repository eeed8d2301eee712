"""The attention function that every transformers layer here calls: grouped queries folded, masks given.

transformers 5 repeats keys and values for each query group when a mask is present, and turns a missing mask into a
causal one. Folding the groups into the query axis needs no copy, and a missing mask means here what it says: every
query sees every key.

Shapes: R rows, N query heads, G key/value heads, Q queries a row, L keys, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from verifier.errors import TargetError
from verifier.packing import Layout

NAME = "dcoco"


def folded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend with query [R, N, Q, D] to key and value [R, G, L, D]; returns [R, Q, N, D].

    A packed query is [1, N, T, D], and so is what it returns: [1, T, N, D].

    `attention_mask` is None or additive [R or 1, 1, (N/G) * Q or 1, L], already folded by `fold_mask`. Raises
    TargetError for a family whose attention needs more than this (soft caps, sinks, biases).
    """
    if unknown := [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]:
        raise TargetError(f"the target's attention uses {unknown[0]}, which is not served here: choose another target")
    if layout is None:
        return _attend(query, key, value, attention_mask, scaling), None
    assert attention_mask is not None
    packed_TND = query[0].transpose(0, 1)
    outs = []
    for tokens, rows, part, mask in layout.parts(attention_mask):
        part_RNQD = part.unpack(packed_TND[tokens]).transpose(1, 2)
        outs.append(part.pack(_attend(part_RNQD, part.keys(key[rows]), part.keys(value[rows]), mask, scaling)))
    return torch.cat(outs)[None], None


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    rows, heads, queries, size = query.shape
    groups = key.shape[1]
    if heads != groups:
        query = query.reshape(rows, groups, heads // groups * queries, size)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(rows, heads, queries, -1).transpose(1, 2)


def fold_mask(allowed: Tensor, repeats: int, dtype: torch.dtype) -> Tensor:
    """Turn allowed [R, Q, L] (bool) into the additive mask that `folded_attention` takes: [R, 1, repeats * Q, L]."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    mask.masked_fill_(~allowed, torch.finfo(dtype).min)
    return mask[:, None].repeat(1, 1, repeats if allowed.shape[1] > 1 else 1, 1)


AttentionInterface.register(NAME, folded_attention)
