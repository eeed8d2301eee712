"""The published DFlash architecture (arXiv 2602.06036): loads its checkpoints, and is a rival to `block_diffusion`.

Features of a context token: the outputs of a few target layers, concatenated, through `fc` and `hidden_norm`. Every
draft layer is an ordinary Qwen3 layer. Its keys and values exist for the context, computed from those features without
`input_layernorm`, and for the block `[anchor, MASK, MASK, ...]`, which sees the context and, both ways, itself. The
context's keys and values stay in a ragged cache of the drafter's own: a round adds the tokens just committed, nothing
of the block. Embedding and head are the target's. As in the published code, the embedding is the plain table: a target
that scales its embeddings (Gemma) scales only its own.

Label conventions (`predicts`): "same" is the published one: input i predicts the token at its own position, anchor + i,
so input 0 predicts nothing and B inputs draft B - 1 tokens. "next" is ours: input i predicts the token anchor + i + 1.

Shapes: R rows, Q tokens a row, n slots, m block inputs, A anchors, K candidates, H hidden size, W draft vocabulary.
"""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from drafters.base import TrainingBatch
from drafters.block import BlockDrafter, draft_vocabulary
from drafters.checkpoint import load_strictly, read_config, read_tensors, refuse_packed
from drafters.dflash_config import DFlashConfig
from drafters.shallow import trimmed_head
from verifier import attention
from verifier.cache import RaggedCache
from verifier.errors import DrafterError
from verifier.linear import pack_linears
from verifier.packing import Packing
from verifier.target import MaskMaker, Target


@dataclass
class DFlashState:
    """Keys and values of the context for every draft layer; `cache.lengths` counts the tokens observed."""

    cache: RaggedCache
    bytes_per_token: int

    @property
    def memory_bytes(self) -> int:
        return self.cache.rows * self.cache.max_length * self.bytes_per_token

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        self.cache.move(source, target)

    def reset(self, row: int) -> None:
        self.cache.lengths[row] = 0

    @torch.inference_mode()
    def clean(self) -> None:
        self.cache.clean()


class DFlashDrafter(BlockDrafter):
    """Drafts a block in one pass over layers of its own, which attend to fused features of the target.

    The names of its modules are those of the published checkpoints. Weights are not set here: they come from `load` or,
    for training, from `initialise`.

    Args:
        target: the model whose features, embedding and head are used.
        config: shape and conventions.
        draft_ids: int64 [W], ascending: the tokens that may be drafted; None for the whole vocabulary.

    Raises:
        DrafterError: the drafter or a draft id doesn't fit the target.
    """

    draft_ids: Tensor

    def __init__(self, target: Target, config: DFlashConfig, draft_ids: Tensor | None = None):
        super().__init__()
        config.check(target)
        self.config = config
        self.block_size = config.slots
        self.taps = config.taps
        self.hidden_size = target.hidden_size
        self.vocab_size = target.vocab_size
        backbone = deepcopy(config.backbone)
        backbone._attn_implementation = attention.NAME
        # A block that drafts n tokens has n inputs, or n + 1: then it must stop one token earlier.
        self.max_positions: int = backbone.max_position_embeddings - (config.predicts == "same")
        self.masks = MaskMaker(backbone, target.dtype)
        hidden, eps = backbone.hidden_size, backbone.rms_norm_eps
        with torch.device("meta"):
            self.fc = nn.Linear(len(config.taps) * hidden, hidden, bias=False)
            self.hidden_norm = Qwen3RMSNorm(hidden, eps)
            self.layers = nn.ModuleList(Qwen3DecoderLayer(backbone, i) for i in range(backbone.num_hidden_layers))
            self.norm = Qwen3RMSNorm(hidden, eps)
            self.mask_embedding = nn.Parameter(torch.empty(hidden)) if config.mask_token_id is None else None
        self.to_empty(device=target.device)
        self.rotary_emb = Qwen3RotaryEmbedding(backbone).to(target.device)
        self.register_buffer("draft_ids", draft_vocabulary(draft_ids, target.vocab_size).to(target.device))
        self._target = [target]  # in a list: not a submodule, its weights are not the drafter's
        self.head: nn.Module | None = None

    @torch.no_grad()
    def initialise(self, target_layers: Sequence[int] = ()) -> None:
        """Start training at random or, one index a draft layer, from decoder layers of a Llama-style target.

        Raises:
            DrafterError: a layer of the target has not the projections and norms of a draft layer, or is packed.
        """
        target = self._target[0]
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.backbone.initializer_range)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, Qwen3RMSNorm):
                nn.init.ones_(module.weight)
        if self.mask_embedding is not None:
            nn.init.normal_(self.mask_embedding, std=target.embedding_weight().float().std().item())
        if not target_layers:
            return
        self.fc.weight.copy_(torch.eye(self.hidden_size).repeat(1, len(self.taps)) / len(self.taps))
        self.norm.load_state_dict(target.body.get_submodule("norm").state_dict())
        for layer, index in zip(self.layers, target_layers, strict=True):
            ours, theirs = layer.state_dict(), target.layers[index].state_dict()
            fits = {name: theirs[name] for name in ours if name in theirs and theirs[name].shape == ours[name].shape}
            left = [name for name in ours if name not in fits and "q_norm" not in name and "k_norm" not in name]
            if left:
                raise DrafterError(f"layer {index} of the target lacks {', '.join(left)}; load it with pack=False")
            layer.load_state_dict(fits, strict=False)

    def prepare_training(self) -> "DFlashDrafter":
        """Make ready for training: float32 weights, and the frozen head in the target's dtype (autocast there)."""
        self.head = trimmed_head(self._target[0], self.draft_ids, self._target[0].dtype)
        return self.train()

    def prepare(self) -> "DFlashDrafter":
        """Make ready for drafting: the target's dtype, packed weights, the head trimmed to the draft vocabulary."""
        target = self._target[0]
        self.eval().requires_grad_(False).to(device=target.device, dtype=target.dtype)
        self.rotary_emb = Qwen3RotaryEmbedding(self.config.backbone).to(target.device)  # its table stays in float32
        if len(self.draft_ids) == target.vocab_size:
            self.head = target.head  # a published drafter's target is large: no copy
        else:
            self.head = trimmed_head(target, self.draft_ids, target.dtype)
        pack_linears(self)
        return self

    def block_inputs(self, anchors: Tensor, slots: int) -> Tensor:
        """Embeddings [..., m, H] of `[anchor, MASK, ...]`; m is n where `predicts` is "next", else n + 1."""
        table = self._target[0].embedding_weight()
        masks = slots - 1 if self.config.predicts == "next" else slots
        mask = table[self.config.mask_token_id] if self.mask_embedding is None else self.mask_embedding
        anchor = F.embedding(anchors, table).to(self.norm.weight.dtype).unsqueeze(-2)
        return torch.cat([anchor, mask.to(anchor.dtype).expand(*anchors.shape, masks, -1)], dim=-2)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., W] over the draft vocabulary."""
        assert self.head is not None, "prepare() comes before drafting; a trainer sets the head itself"
        return self.head(hidden)

    def context(self, taps: Sequence[Tensor], positions_RQ: Tensor, cache: "RaggedCache | _TrainingContext") -> None:
        """Put keys and values of context tokens at these positions into the cache; taps are [R, Q, H] each."""
        fused_RQH = self.hidden_norm(self.fc(torch.cat(list(taps), dim=-1).to(self.norm.weight.dtype)))
        cos, sin = self.rotary_emb(fused_RQH, positions_RQ)
        for index, layer in enumerate(self.layers):
            attn: Any = layer.self_attn
            shape = (*positions_RQ.shape, -1, attn.head_dim)
            keys = attn.k_norm(attn.k_proj(fused_RQH).view(shape)).transpose(1, 2)
            values = attn.v_proj(fused_RQH).view(shape).transpose(1, 2)
            cache.update(apply_rotary_pos_emb(keys, keys, cos, sin)[1], values, index)

    def block(
        self, inputs: Tensor, positions_RQ: Tensor, mask: Tensor | None, cache: "RaggedCache | _TrainingContext"
    ) -> Tensor:
        """Hidden states [R, Q, H] of block inputs [R, Q, H], which attend to the cache and to each other."""
        hidden, rope = inputs, self.rotary_emb(inputs, positions_RQ)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rope, cache=cache)
        return self.norm(hidden)

    def run_blocks(self, batch: TrainingBatch, slots: int) -> tuple[Tensor, Tensor]:
        """Inputs [R, A, m, H] and hidden states [R, A, n, H] of the blocks of a training batch."""
        rows, positions = batch.ids.shape
        anchors, device = batch.anchors.shape[1], batch.ids.device
        cache = _TrainingContext()
        columns = torch.arange(positions, device=device)
        self.context(batch.taps, columns.expand(rows, -1), cache)

        inputs = self.block_inputs(batch.ids.gather(1, batch.anchors), slots)  # [R, A, m, H]
        width = inputs.shape[2]
        positions_RAm = batch.anchors[..., None] + torch.arange(width, device=device)
        sees_context = (columns < batch.anchors[..., None]).repeat_interleave(width, dim=1)
        block_of = torch.arange(anchors, device=device).repeat_interleave(width)
        own_block = (block_of[:, None] == block_of).expand(rows, -1, -1)
        mask = attention.fold_mask(torch.cat([sees_context, own_block], dim=2), self.masks.repeats, inputs.dtype)
        hidden = self.block(inputs.flatten(1, 2), positions_RAm.flatten(1, 2), mask, cache)
        return inputs, hidden.view(inputs.shape)[:, :, width - slots :]

    def start(self, rows: int, max_length: int) -> DFlashState:
        shape, element = self.config.backbone, self.norm.weight.element_size()
        bytes_per_token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * element
        return DFlashState(
            RaggedCache(rows, max_length + self.config.block_size, self._target[0].device), bytes_per_token
        )

    @torch.inference_mode()
    def observe(self, state: DFlashState, first: int, taps: list[Tensor], counts_R: Tensor) -> None:
        counts = counts_R.tolist()
        longest = max(counts)
        if longest == 0:
            return
        packing = Packing(counts, state.cache.device, slack=1.0)
        positions_RQ, _ = state.cache.begin(first, len(counts), longest, packing)
        packed = [packing.pack(tap[:, :longest])[None] for tap in taps]
        self.context(packed, packing.pack(positions_RQ)[None], state.cache)
        for row, count in enumerate(counts, first):
            state.cache.lengths[row] += count  # what was written past it belongs to rejected tokens

    def run(self, state: DFlashState, anchors_R: Tensor, cache: RaggedCache, slots: int) -> tuple[Tensor, Tensor]:
        rows = len(anchors_R)
        if state.cache.lengths[:rows] != cache.lengths[:rows]:
            raise DrafterError(
                f"the drafter observed {state.cache.lengths[:rows]} tokens, the target holds {cache.lengths[:rows]}: "
                "observe() must receive the taps of every committed token"
            )
        inputs_RmH = self.block_inputs(anchors_R, slots)
        positions_Rm, extent = state.cache.begin(0, rows, inputs_RmH.shape[1])
        mask = self.masks.block(positions_Rm, extent)
        assert not isinstance(mask, dict), "one kind of layer, one mask"
        return inputs_RmH, self.block(inputs_RmH, positions_Rm, mask, state.cache)[:, -slots:]

    def save(
        self, folder: str | Path, identity: dict[str, Any] | None = None, training: dict[str, Any] | None = None
    ) -> None:
        """Write `config.json` and `model.safetensors` in the parameters' dtype; before `prepare`, which packs them.

        `identity` says whose drafter it is (`target_identity`), `training` how it was trained.
        """
        refuse_packed(self)
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items() if name[:5] != "head."}
        if len(self.draft_ids) == self.config.backbone.vocab_size:
            del tensors["draft_ids"]
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        ours = {"drafter": "dflash", "target": identity, "training": training} if identity else {}
        (folder / "config.json").write_text(json.dumps({**self.config.to_dict(), **ours}, indent=1) + "\n")
        # The convention is stored with the weights too: a config that was edited or swapped is found out.
        save_file(tensors, folder / "model.safetensors", {"format": "pt", "predicts": self.config.predicts})

    @classmethod
    def load(cls, folder: str | Path, target: Target) -> "DFlashDrafter":
        """The drafter in `folder` (`config.json`, `model.safetensors`), ready to draft for `target`.

        Raises:
            DrafterError: a file is missing or broken, a tensor is missing, unexpected or of the wrong shape, a setting
                is unknown, the label convention of the weights isn't the config's, or the target is another.
        """
        folder = Path(folder)
        config = DFlashConfig.from_dict(read_config(folder))
        file = folder / "model.safetensors"
        tensors = read_tensors(file)
        with safe_open(file, "pt") as header:
            trained = (header.metadata() or {}).get("predicts", config.predicts)
        if trained != config.predicts:
            raise DrafterError(
                f"{folder} was trained with predicts={trained!r}, dflash_config says {config.predicts!r} "
                "('same' where it is absent): drafts would be one place off; correct dflash_config"
            )
        if config.mask_token_id is None and "mask_embedding" not in tensors:
            raise DrafterError(
                f"{folder} has neither dflash_config.mask_token_id nor the tensor mask_embedding: no mask"
            )
        drafter = cls(target, config, tensors.get("draft_ids"))
        load_strictly(drafter, {"draft_ids": drafter.draft_ids, **tensors}, folder)
        return drafter.prepare()


class _TrainingContext:
    """A cache for training, with gradients: the keys and values of the context, then those of all blocks."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **kwargs: object) -> tuple[Tensor, Tensor]:
        if layer_idx in self._layers:
            context_keys, context_values = self._layers[layer_idx]
            keys, values = torch.cat([context_keys, keys], dim=2), torch.cat([context_values, values], dim=2)
        self._layers[layer_idx] = keys, values
        return keys, values
