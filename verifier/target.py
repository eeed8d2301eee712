"""The target: a transformers causal LM run block-wise over a ragged cache, with the hidden states that drafters read.

Any decoder-only model that `AutoModelForCausalLM` loads works through its own `forward`: masks and positions are given
in the form that it accepts, so no family needs code here. Layers of the most common shape are run by a faster equal.

Shapes: R rows, Q query tokens a row, L cache positions, H hidden size, V vocabulary, T taps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from verifier import attention
from verifier.cache import RaggedCache
from verifier.errors import TargetError
from verifier.layer import fuse_layers
from verifier.linear import PackedLinear, pack_linears
from verifier.packing import Layout, Masks, Packing
from verifier.tree import Tree


@dataclass
class Pass:
    """What one forward pass left: hidden (after the final norm) and taps, [R, Q, H] each, or [1, T, H] if packed."""

    hidden: Tensor
    taps: list[Tensor]


@dataclass
class Block:
    """New tokens of neighbouring rows: what they are, and how they stand to one another.

    ids [R, Q] int64 go behind the rows `first .. first + R - 1` of the cache, causally or as a tree; of a packed block
    only the real ones are run.
    """

    ids_RQ: Tensor
    first: int = 0
    tree: Tree | None = None
    packing: Packing | None = None


class Target:
    """A causal LM whose cache can be rolled back.

    Args:
        model: from `AutoModelForCausalLM`; its weights are packed and its layers fused in place where the CPU profits.
        pack: leave False to keep the family's own layers and plain weights, for training a drafter from them.

    Raises:
        TargetError: recurrent or hybrid state that cannot be rolled back, logits that are not the head's output, or a
            model that belongs to a target already.
    """

    def __init__(self, model: PreTrainedModel, pack: bool = True):
        if model.config._attn_implementation == attention.NAME:
            raise TargetError(f"{type(model).__name__}: this model belongs to a target already; use that one")
        self.model = model.eval().requires_grad_(False)
        self.config = model.config.get_text_config()
        self.body: nn.Module = model.base_model
        self.layers = decoder_layers(self.body, self.config)
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.max_positions: int = getattr(self.config, "max_position_embeddings", None) or 1 << 30
        self.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.embedding: nn.Module = model.get_input_embeddings()
        self.masks = MaskMaker(self.config, self.dtype)
        self.tapped: dict[int, Tensor] = {}  # outputs of the layers that the current pass was asked for
        self._wanted: set[int] = set()
        theirs = self._own_logits()
        model.set_attn_implementation(attention.NAME)
        if pack:
            fuse_layers(self.layers)
            pack_linears(model)
        self.head: nn.Module = model.get_output_embeddings()
        for index, layer in enumerate(self.layers):
            layer.register_forward_hook(self._remember(index))
        self._softcap = getattr(self.config, "final_logit_softcapping", None)
        self._scale = getattr(self.config, "logit_scale", None) or 1.0 / getattr(self.config, "logits_scaling", 1.0)
        self._check_logits(theirs)

    @torch.inference_mode()
    def forward(
        self,
        ids_RQ: Tensor,
        cache: RaggedCache,
        taps: Sequence[int] = (),
        first: int = 0,
        tree: Tree | None = None,
        packing: Packing | None = None,
    ) -> Pass:
        """Run one block, as `forward_blocks` does; without a packing, or where it leaves no place free, as [R, Q]."""
        return self.forward_blocks([Block(ids_RQ, first, tree, packing)], cache, taps)[0]

    @torch.inference_mode()
    def forward_blocks(self, blocks: Sequence[Block], cache: RaggedCache, taps: Sequence[int] = ()) -> list[Pass]:
        """Run blocks in one pass, the rows of each behind those of the one before; several must be packed.

        `taps` names decoder layers whose outputs (before the final norm) are returned; -1 is the embedding's output.
        The tokens enter the cache but count only once the caller raises `cache.lengths`. Of packed tokens there is
        [1, T] in each block's result.
        """
        alone, ids, positions, masks = len(blocks) == 1, [], [], []
        for index, block in enumerate(blocks):
            rows, queries = block.ids_RQ.shape
            at_RQ, extent = cache.begin(block.first, rows, queries, block.packing, more=index > 0)
            if block.tree is None:
                masks.append(self.masks.causal(at_RQ, extent, may_spare=alone))
            else:
                masks.append(self.masks.tree(at_RQ, extent, block.tree))
                at_RQ = at_RQ[:, :1] + block.tree.depths
            positions.append(at_RQ)
            ids.append(block.ids_RQ)
        layout = None
        packings = [block.packing for block in blocks if block.packing is not None]
        if packings and not (alone and packings[0].trivial):
            layout = Layout(packings, masks)
            ids, positions = layout.pack(ids), layout.pack(positions)
        embedded = self.embedding(ids[0])
        self._wanted = {tap for tap in taps if tap >= 0}
        try:
            out = self.body(
                inputs_embeds=embedded,
                attention_mask=masks[0],
                # Beside a longer row, one at the limit is given tokens behind it; they never count.
                position_ids=positions[0].clamp(max=self.max_positions - 1),
                cache=cache,
                use_cache=True,
                layout=layout,
            )
            outputs = [out.last_hidden_state, *(embedded if tap < 0 else self.tapped[tap] for tap in taps)]
            each = [[whole] if layout is None else layout.split(whole) for whole in outputs]
            return [Pass(hidden, list(tapped)) for hidden, *tapped in zip(*each, strict=True)]
        finally:
            self.tapped.clear()

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., H] that have passed the final norm."""
        logits = self.head(hidden)
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def embedding_weight(self) -> Tensor:
        """The table of token embeddings [V, H]."""
        return self.embedding.get_parameter("weight")

    def head_weight(self, ids: Tensor) -> Tensor:
        """The head's weight rows [len(ids), H] of some tokens, unpacked."""
        if isinstance(self.head, PackedLinear):
            return self.head.unpack()[ids]
        return self.head.get_parameter("weight")[ids]

    def _remember(self, index: int):
        def hook(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            if index in self._wanted:
                self.tapped[index] = output if isinstance(output, Tensor) else output[0]

        return hook

    @torch.inference_mode()
    def _own_logits(self) -> Tensor:
        """What the model itself, untouched, says of two tokens: [1, 2, V]."""
        return self.model(input_ids=self._probe(), use_cache=False).logits.float()

    def _probe(self) -> Tensor:
        """Two tokens [1, 2] from amid the vocabulary; the first ones are special and, in bf16, mostly rounding."""
        return torch.tensor([[self.vocab_size // 3, self.vocab_size // 2]], device=self.device)

    @torch.inference_mode()
    def _check_logits(self, theirs: Tensor) -> None:
        """A model that does more than this wrapper knows would be decoded wrongly: find out on two tokens."""
        cache = RaggedCache(1, 4, self.device)
        ours = self.logits(self.forward(self._probe(), cache).hidden).float()
        self.cache_bytes_per_token = cache.bytes_per_token()
        gap = ((ours - theirs).norm() / theirs.norm()).item()
        if not gap <= 0.05:
            raise TargetError(
                f"{type(self.model).__name__}: logits through the ragged cache differ from its own by {gap:.1%}; "
                "its attention or its head does something that this wrapper does not know, so it can't be a target"
            )


class MaskMaker:
    """Attention masks over a ragged cache, in the form that a family's `forward` takes.

    A model with one kind of layer takes one mask, a model with several (Gemma 3, ...) a dictionary by layer type. None
    means that every query may see every key, which spares batch 1 its masks.
    """

    def __init__(self, config: object, dtype: torch.dtype):
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads  # type: ignore[attr-defined]
        self.repeats: int = config.num_attention_heads // kv_heads  # type: ignore[attr-defined]
        self.dtype = dtype
        types = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        if types is None:
            self.windows = {"": window}
        else:
            self.windows = {kind: window if "sliding" in kind else None for kind in dict.fromkeys(types)}

    def causal(self, positions_RQ: Tensor, extent: int, may_spare: bool = True) -> Masks:
        """Each query sees its own position and those before it."""
        return self._by_type(positions_RQ, positions_RQ, extent, may_spare)

    def block(self, positions_RQ: Tensor, extent: int) -> Masks:
        """Each query sees the context and the whole block, in both directions (diffusion drafting)."""
        return self._by_type(positions_RQ, positions_RQ[:, -1:].expand_as(positions_RQ), extent)

    def tree(self, slots_RQ: Tensor, extent: int, tree: Tree) -> Masks:
        """Each query sees the context, its ancestors and itself; query i is written at slots_RQ[:, i]."""
        columns_L = torch.arange(extent, device=slots_RQ.device)
        starts_R1 = slots_RQ[:, :1]
        queries = slots_RQ.shape[1]
        index_RQQ = slots_RQ[:, None, :].expand(-1, queries, -1)
        seen_RQL = (columns_L < starts_R1[:, :, None]).repeat(1, queries, 1).scatter_(2, index_RQQ, tree.sees)
        masks: dict[str, Tensor | None] = {}
        for kind, window in self.windows.items():
            allowed_RQL = seen_RQL
            if window is not None:
                stands_RL = columns_L.repeat(len(slots_RQ), 1).scatter_(1, slots_RQ, starts_R1 + tree.depths)
                allowed_RQL = seen_RQL & (stands_RL[:, None, :] > (starts_R1 + tree.depths)[:, :, None] - window)
            masks[kind] = attention.fold_mask(allowed_RQL, self.repeats, self.dtype)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _by_type(self, positions_RQ: Tensor, last_RQ: Tensor, extent: int, may_spare: bool = True) -> Masks:
        rows, queries = positions_RQ.shape
        all_visible = may_spare and rows == 1 and (queries == 1 or last_RQ is not positions_RQ)
        columns_L = torch.arange(extent, device=positions_RQ.device)
        masks: dict[str, Tensor | None] = {}
        for kind, window in self.windows.items():
            if all_visible and (window is None or extent <= window):
                masks[kind] = None
                continue
            allowed_RQL = columns_L <= last_RQ[:, :, None]
            if window is not None:
                allowed_RQL &= columns_L > positions_RQ[:, :, None] - window
            masks[kind] = attention.fold_mask(allowed_RQL, self.repeats, self.dtype)
        return masks if len(masks) > 1 else next(iter(masks.values()))


def decoder_layers(body: nn.Module, config: object) -> nn.ModuleList:
    """The decoder layers of a model; refuses models with state that rolling back a length can't undo."""
    types = set(getattr(config, "layer_types", None) or ())
    recurrent = {kind for kind in types if "attention" not in kind or "linear" in kind}
    if recurrent or any(hasattr(config, key) for key in ("state_size", "ssm_cfg", "mamba_d_state", "conv_kernel")):
        raise TargetError(
            f"{type(body).__name__} keeps recurrent state ({', '.join(sorted(recurrent)) or 'state-space layers'}), "
            "which can't be rolled back after a rejected draft; choose a target with attention layers only"
        )
    if odd := types - {"full_attention", "sliding_attention"} - recurrent:
        raise TargetError(
            f"{type(body).__name__} has layers of type {', '.join(sorted(odd))}, which are not served here"
        )
    count = config.num_hidden_layers  # type: ignore[attr-defined]
    for child in body.children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise TargetError(f"{type(body).__name__} has no list of its {count} decoder layers; it can't be a target")
