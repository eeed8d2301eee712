"""What drafters made of the target's own layers share: a shallow copy of its body, its head, features of one size."""

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.block import draft_vocabulary
from verifier import attention
from verifier.layer import fuse_layers
from verifier.linear import pack_linears
from verifier.target import MaskMaker, Target, decoder_layers


class ShallowDrafter(nn.Module):
    """Base of drafters that run copies of some of the target's layers, between the target's embedding and its head.

    `config` is the drafter's shape, with its `block_size`; `draft_ids` (int64 [W], ascending) are the tokens that may
    be drafted, None for the whole vocabulary. Raises DrafterError where a draft id doesn't fit the target.
    """

    def __init__(self, target: Target, config: Any, layer_ids: Sequence[int], draft_ids: Tensor | None):
        super().__init__()
        self.config = config
        self.block_size: int = config.block_size
        self.layer_ids = layer_ids
        self.max_positions = target.max_positions
        self.vocab_size = target.vocab_size
        self.body = shallow_body(target, layer_ids)
        self.body_config: Any = self.body.config
        self.masks = MaskMaker(self.body_config, target.dtype)
        self.register_buffer("scale", torch.ones(()))
        self.scale: Tensor
        self.draft_ids: Tensor
        self.register_buffer("draft_ids", draft_vocabulary(draft_ids, target.vocab_size))
        self._target = [target]  # in a list: not a submodule, its weights are not the drafter's
        self.head: nn.Module | None = None

    @torch.no_grad()
    def initialise(self, scale: float) -> None:
        """Start training from the target: the copied layers as they are.

        `scale` is the size (root mean square) of the hidden states that the first of them is used to.
        """
        copy_weights(self.body, self._target[0], self.layer_ids)
        self.scale.fill_(2.0 ** round(math.log2(scale)))  # a power of two is the same number in bfloat16

    def prepare_training(self) -> Self:
        """Make ready for training: float32 weights, and the frozen head in the target's dtype."""
        target = self._target[0]
        self.to(target.device)
        self.head = trimmed_head(target, self.draft_ids, target.dtype)
        return self.train()

    @torch.no_grad()
    def prepare(self) -> Self:
        """Make ready for drafting: the target's device and dtype, frozen, layers fused and packed, the head trimmed."""
        target = self._target[0]
        self.head = trimmed_head(target, self.draft_ids, target.dtype)
        self.eval().requires_grad_(False).to(target.device)
        for parameter in self.parameters():  # and no buffer: rotary frequencies stay in float32
            parameter.data = parameter.data.to(target.dtype)
        fuse_layers(decoder_layers(self.body, self.body_config))
        pack_linears(self)
        return self

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., W] over the draft vocabulary."""
        assert self.head is not None, "prepare() or prepare_training() sets the head"
        return self.head(hidden)


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
