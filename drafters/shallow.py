"""What drafters made of the target's own layers share: a shallow copy of its body, its head, features of one size."""

from collections.abc import Sequence
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifier import attention
from verifier.linear import pack_linears
from verifier.target import Target, decoder_layers


def unit(features: Tensor) -> Tensor:
    """Features at root mean square 1, in their dtype; the reduction runs in float32."""
    return F.rms_norm(features.float(), features.shape[-1:]).to(features.dtype)


def shallow_body(target: Target, layer_ids: Sequence[int]) -> nn.Module:
    """A model of the target's own class with some of its layers, each bound to its layer of the target's cache.

    The weights are not set: they come from a checkpoint or, for training, from `copy_weights`.
    """
    config = deepcopy(target.config)
    config.num_hidden_layers = len(layer_ids)
    if getattr(config, "layer_types", None):
        config.layer_types = [target.config.layer_types[index] for index in layer_ids]
    config._attn_implementation = attention.NAME
    with torch.device("meta"):
        body = type(target.body)(config)
    body.set_input_embeddings(nn.Identity())  # type: ignore[operator]
    for name, child in body.named_children():
        if next(child.parameters(), None) is None and not isinstance(child, nn.Identity):
            setattr(body, name, deepcopy(getattr(target.body, name)))  # rotary tables: computed, not loaded
        else:
            child.to_empty(device=target.device).to(torch.float32)
    for layer, index in zip(decoder_layers(body, config), layer_ids, strict=True):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index  # type: ignore[assignment]
    return body


@torch.no_grad()
def copy_weights(body: nn.Module, target: Target, layer_ids: Sequence[int]) -> None:
    """Set a shallow body's layers and final norm to the target's, where training starts."""
    copies = decoder_layers(body, body.config)
    for copy, index in zip(copies, layer_ids, strict=True):
        copy.load_state_dict(target.layers[index].state_dict())
    for name, child in body.named_children():
        if child is not copies and next(child.parameters(), None) is not None:  # the final norm
            child.load_state_dict(getattr(target.body, name).state_dict())


def trimmed_head(target: Target, draft_ids: Tensor, dtype: torch.dtype) -> nn.Linear:
    """The target's head for the tokens draft_ids (int64 [W]) only, frozen."""
    head = nn.Linear(target.hidden_size, len(draft_ids), bias=False, device="meta")
    head.weight = nn.Parameter(target.head_weight(draft_ids).to(dtype), requires_grad=False)
    return head


def make_ready(drafter: nn.Module, target: Target) -> None:
    """Put a drafter on the target's device, in its dtype, frozen, its weights packed."""
    drafter.eval().requires_grad_(False).to(target.device)
    for parameter in drafter.parameters():  # and no buffer: rotary frequencies stay in float32
        parameter.data = parameter.data.to(target.dtype)
    pack_linears(drafter)
