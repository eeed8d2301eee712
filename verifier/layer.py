"""Decoder layers of the Llama family as one short function over few, large operations.

Around the matrices, a pass over a few tokens is Python and small operations: in the families' own layers they take
longer than a 135M target's matrices do. Here queries, keys and values come from one matrix, gate and up from another,
norms are one call, and rotary embeddings three. The arithmetic is the families' own. Layers of other families stay as
they are, and so do those whose matrices aren't packed: there the matrices may be quantised, trained or on a GPU.

Shapes: R rows, Q queries a row (packed: 1 and T), H hidden size, N query heads, G key/value heads, D head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verifier.linear import packed_kind

# Those whose layers compute what `FusedLayer` computes. Others differ in where norms stand or in what they scale.
FAMILIES = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


class FusedLayer(nn.Module):
    """A decoder layer for inference: takes what its family's layer takes and returns what it returns."""

    def __init__(self, layer: Any):
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.config = attention.config  # names the attention function
        self.layer_idx: int = attention.layer_idx  # of the cache
        self.scaling: float = attention.scaling
        self.head_size: int = attention.head_dim
        self.keys: int = attention.k_proj.out_features // self.head_size
        self.queries: int = attention.q_proj.out_features // self.head_size
        self.attention_norm, self.mlp_norm = RMSNorm(layer.input_layernorm), RMSNorm(layer.post_attention_layernorm)
        self.query_norm = RMSNorm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = RMSNorm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.query_key_value = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = attention.o_proj
        self.gate_up, self.down, self.activation = joined(mlp.gate_proj, mlp.up_proj), mlp.down_proj, mlp.act_fn

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Hidden states [R, Q, H] after this layer; its keys and values enter the cache, `kwargs` go to attention."""
        heads = self.query_key_value(self.attention_norm(hidden_states))
        heads_RQND = heads.view(*heads.shape[:2], self.queries + 2 * self.keys, self.head_size)
        turning, values = heads_RQND[:, :, : -self.keys], heads_RQND[:, :, -self.keys :]
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = turning[:, :, : self.queries], turning[:, :, self.queries :]
            turning = torch.cat([self.query_norm(queries), self.key_norm(keys)], dim=2)
        turned = rotate(turning, *position_embeddings)
        queries, keys = turned[:, :, : self.queries], turned[:, :, self.queries :]
        all_keys, all_values = cache.update(keys.transpose(1, 2), values.transpose(1, 2), self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        seen_RQND, _ = attend(
            self, queries.transpose(1, 2), all_keys, all_values, attention_mask, scaling=self.scaling, **kwargs
        )
        hidden_states = hidden_states + self.output(seen_RQND.flatten(2))
        gate, up = self.gate_up(self.mlp_norm(hidden_states)).chunk(2, dim=-1)
        return hidden_states + self.down(self.activation(gate) * up)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in x's dtype."""

    def __init__(self, norm: Any):
        super().__init__()
        self.weight: nn.Parameter = norm.weight
        self.eps: float = norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads [R, Q, N, D] by cos and sin [R, Q, D], whose halves are equal."""
    half = heads.shape[-1] // 2
    sin_half = sin[..., None, :half]
    out = heads * cos[..., None, :]
    out[..., :half].addcmul_(heads[..., half:], sin_half, value=-1)
    out[..., half:].addcmul_(heads[..., :half], sin_half)
    return out


def joined(*linears: nn.Linear) -> nn.Linear:
    """One linear layer that gives the outputs of several, one after the other."""
    has_bias, width = linears[0].bias is not None, sum(linear.out_features for linear in linears)
    whole = nn.Linear(linears[0].in_features, width, bias=has_bias, device="meta")
    whole.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if has_bias:
        whole.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    return whole


def fuse_layers(layers: nn.ModuleList) -> None:
    """Replace, in place, the layers of a family that `FusedLayer` knows whose every matrix will be packed."""
    for index, layer in enumerate(layers):
        if type(layer).__name__ in FAMILIES and all(packed_kind(linear) for linear in matrices(layer)):
            layers[index] = FusedLayer(layer)


def matrices(layer: Any) -> list[nn.Module]:
    """The seven matrices of a layer of these families."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
