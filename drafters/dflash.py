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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from drafters.base import Lattice, TrainingBatch
from drafters.checkpoint import load_strictly, read_config, read_tensors
from verifier import attention
from verifier.cache import RaggedCache
from verifier.errors import DrafterError
from verifier.linear import PackedLinear, pack_linears
from verifier.target import MaskMaker, Target

# Qwen3Config has a default for each of these, which would be silently wrong.
REQUIRED = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
REQUIRED |= {"head_dim", "vocab_size", "max_position_embeddings"}
# Of older transformers, or of no effect on the computation; Qwen3Config turns the first two into `rope_parameters`.
OLDER = {"rope_theta", "rope_scaling", "torch_dtype", "auto_map", "pretraining_tp", "_name_or_path"}
OURS = {"block_size", "num_target_layers", "dflash_config", "drafter", "target", "training"}
INNER = {"mask_token_id", "target_layer_ids", "block_size", "num_target_layers", "predicts", "candidates"}


@dataclass(frozen=True)
class DFlashConfig:
    """Shape and conventions of a DFlash drafter: what its `config.json` says.

    Attributes:
        backbone: sizes, rotary embedding and norms of the draft layers.
        taps: decoder layers of the target whose outputs are the features (`target_layer_ids`; -1: the embedding).
        block_size: inputs of a full block, B.
        predicts: "same" (published: B - 1 tokens drafted) or "next" (ours: B tokens).
        mask_token_id: the token whose embedding fills the slots behind the anchor; None for a learned vector.
        num_target_layers: layers of the target it was trained for; None where the checkpoint doesn't say.
        candidates: tokens kept a slot, K.
    """

    backbone: Qwen3Config = field(repr=False)
    taps: tuple[int, ...]
    block_size: int
    predicts: Literal["next", "same"]
    mask_token_id: int | None = None
    num_target_layers: int | None = None
    candidates: int = 16

    @property
    def slots(self) -> int:
        """Tokens that a full block drafts."""
        return self.block_size if self.predicts == "next" else self.block_size - 1

    @classmethod
    def for_target(
        cls, target: Target, layers: int, taps: Sequence[int], block_size: int = 8, mask_token_id: int | None = None
    ) -> "DFlashConfig":
        """A drafter to be trained for `target`, with `layers` draft layers of the same sizes; predicts "next"."""
        theirs = target.config
        rope = deepcopy(theirs.rope_parameters)
        backbone = Qwen3Config(
            hidden_size=theirs.hidden_size,
            intermediate_size=theirs.intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=theirs.num_attention_heads,
            num_key_value_heads=theirs.num_key_value_heads,
            head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
            vocab_size=target.vocab_size,
            max_position_embeddings=target.max_positions,
            rms_norm_eps=theirs.rms_norm_eps,
            rope_parameters=rope.get("full_attention", rope),  # Gemma 3 has one rotary embedding a layer type
        )
        return cls(backbone, tuple(taps), block_size, "next", mask_token_id, len(target.layers))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "DFlashConfig":
        """Read a `config.json`.

        Raises:
            DrafterError: a key is missing, contradicts another, or is unknown and set: it may change the computation.
        """
        inner = raw.get("dflash_config")
        if not isinstance(inner, dict):
            raise DrafterError("config.json has no dflash_config: this is not a DFlash drafter")
        backbone_keys = set(Qwen3Config().to_dict()) | OLDER
        _refuse_unknown(raw, backbone_keys | OURS, "config.json")
        _refuse_unknown(inner, INNER, "dflash_config")
        both = {**raw, **inner}
        missing = sorted((REQUIRED | {"target_layer_ids", "block_size"}) - both.keys())
        if "rope_theta" not in raw and "rope_parameters" not in raw:
            missing.append("rope_theta")
        if missing:
            raise DrafterError(f"config.json of the drafter lacks {', '.join(missing)}; add what it was trained with")
        for key in OURS & INNER & raw.keys():
            if raw[key] != both[key]:
                raise DrafterError(f"config.json sets {key}={raw[key]}, but dflash_config {key}={both[key]}")
        try:
            return cls(
                Qwen3Config.from_dict({key: raw[key] for key in backbone_keys & raw.keys()}),
                tuple(int(index) for index in inner["target_layer_ids"]),
                int(both["block_size"]),
                inner.get("predicts", "same"),
                None if inner.get("mask_token_id") is None else int(inner["mask_token_id"]),
                both.get("num_target_layers"),
                int(inner.get("candidates", 16)),
            )
        except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
            raise DrafterError(f"config.json of the drafter holds a value that can't be used: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` that `from_dict` reads."""
        inner = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.taps),
            "predicts": self.predicts,
            "candidates": self.candidates,
        }
        return {
            **self.backbone.to_dict(),
            "architectures": ["DFlashDraftModel"],
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": inner,
        }

    def check(self, target: Target) -> None:
        """Raise DrafterError where the drafter doesn't fit the target or asks for what isn't built here."""
        ours, layers, rows = self.backbone, len(target.layers), len(_table(target))
        for name, value, fits in (
            ("hidden_size", ours.hidden_size, target.hidden_size),
            ("vocab_size", ours.vocab_size, target.vocab_size),
            ("num_target_layers", self.num_target_layers, layers),
        ):
            if value not in (None, fits):
                raise DrafterError(f"the drafter has {name}={value}, the target {fits}: it is another target's drafter")
        if not self.taps or not all(-1 <= index < layers for index in self.taps):
            raise DrafterError(f"target_layer_ids={list(self.taps)} must name layers -1..{layers - 1} of the target")
        if self.predicts not in ("next", "same"):
            raise DrafterError(f'predicts={self.predicts!r} must be "next", or "same" as in published checkpoints')
        if self.slots < 1 or self.candidates < 1:
            raise DrafterError(
                f"block_size={self.block_size} with predicts={self.predicts!r} drafts {self.slots} tokens of "
                f"candidates={self.candidates}: both must be at least 1"
            )
        if set(ours.layer_types or ()) != {"full_attention"}:
            raise DrafterError(f"layer_types={ours.layer_types}: only draft layers with full_attention are built here")
        if self.mask_token_id is not None:
            ends = target.config.eos_token_id
            if not 0 <= self.mask_token_id < rows:
                raise DrafterError(f"mask_token_id={self.mask_token_id} must be 0..{rows - 1}, a row of the embedding")
            if self.mask_token_id in (ends if isinstance(ends, list) else [ends]):
                raise DrafterError(f"mask_token_id={self.mask_token_id} ends texts of the target; it can't be the mask")


@dataclass
class DFlashState:
    """Keys and values of the context for every draft layer; `cache.lengths` counts the tokens observed."""

    cache: RaggedCache

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        self.cache.move(source, target)


class DFlashDrafter(nn.Module):
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
        ids = torch.arange(target.vocab_size) if draft_ids is None else draft_ids.long()
        if len(ids) == 0 or ids[0] < 0 or ids[-1] >= target.vocab_size or bool((ids.diff() <= 0).any()):
            raise DrafterError(f"draft_ids must be ascending token ids below the vocabulary's {target.vocab_size}")
        self.register_buffer("draft_ids", ids.to(target.device))
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
            nn.init.normal_(self.mask_embedding, std=_table(target).float().std().item())
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
        """Make ready for training: float32 weights, and the frozen head in bfloat16 (run it under autocast)."""
        self._set_head(torch.bfloat16)
        return self.train()

    def prepare(self) -> "DFlashDrafter":
        """Make ready for drafting: the target's dtype, packed weights, the head trimmed to the draft vocabulary."""
        target = self._target[0]
        self.eval().requires_grad_(False).to(device=target.device, dtype=target.dtype)
        self.rotary_emb = Qwen3RotaryEmbedding(self.config.backbone).to(target.device)  # its table stays in float32
        if len(self.draft_ids) == target.vocab_size:
            self.head = target.head  # a published drafter's target is large: no copy
        else:
            self._set_head(target.dtype)
        pack_linears(self)
        return self

    def _set_head(self, dtype: torch.dtype) -> None:
        self.head = nn.Linear(self.hidden_size, len(self.draft_ids), bias=False, device="meta")
        weight = self._target[0].head_weight(self.draft_ids).to(dtype)
        self.head.weight = nn.Parameter(weight, requires_grad=False)

    def block_inputs(self, anchors: Tensor, slots: int) -> Tensor:
        """Embeddings [..., m, H] of `[anchor, MASK, ...]`; m is n where `predicts` is "next", else n + 1."""
        table = _table(self._target[0])
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

    def forward_blocks(self, batch: TrainingBatch, slots: int) -> Tensor:
        """Hidden states [R, A, n, H] of every slot of every block of a training batch (before the head)."""
        return self._run_blocks(batch, slots)[1]

    def _run_blocks(self, batch: TrainingBatch, slots: int) -> tuple[Tensor, Tensor]:
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
        return DFlashState(RaggedCache(rows, max_length + self.config.block_size, self._target[0].device))

    @torch.inference_mode()
    def observe(self, state: DFlashState, first: int, taps: list[Tensor], counts_R: Tensor) -> None:
        counts = counts_R.tolist()
        longest = max(counts)
        if longest == 0:
            return
        positions_RQ, _ = state.cache.begin(first, len(counts), longest)
        self.context([tap[:, :longest] for tap in taps], positions_RQ, state.cache)
        for row, count in enumerate(counts, first):
            state.cache.lengths[row] += count  # what was written past it belongs to rejected tokens

    @torch.inference_mode()
    def draft(self, state: DFlashState, anchors_R: Tensor, cache: RaggedCache, slots: int) -> Lattice:
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
        hidden_RnH = self.block(inputs_RmH, positions_Rm, mask, state.cache)[:, -slots:]
        return self._lattice(anchors_R, inputs_RmH[:, 0], hidden_RnH)

    def lattice_of_blocks(self, batch: TrainingBatch) -> Lattice:
        """The lattices of full blocks of a training batch, its rows R times anchors A as rows."""
        inputs_RAmH, hidden_RAnH = self._run_blocks(batch, self.block_size)
        anchors = batch.ids.gather(1, batch.anchors).flatten()
        return self._lattice(anchors, inputs_RAmH[:, :, 0].flatten(0, 1), hidden_RAnH.flatten(0, 1))

    def _lattice(self, anchors_R: Tensor, anchor_hidden_RH: Tensor, hidden_RnH: Tensor) -> Lattice:
        logits = self.logits(hidden_RnH).float()
        top = logits.topk(min(self.config.candidates, logits.shape[-1]))
        log_probs = top.values - logits.logsumexp(-1, keepdim=True)
        return Lattice(anchors_R, anchor_hidden_RH, self.draft_ids[top.indices], log_probs, hidden_RnH)

    def save(
        self, folder: str | Path, identity: dict[str, Any] | None = None, training: dict[str, Any] | None = None
    ) -> None:
        """Write `config.json` and `model.safetensors` in the parameters' dtype; before `prepare`, which packs them.

        `identity` says whose drafter it is (`target_identity`), `training` how it was trained.
        """
        if any(isinstance(module, PackedLinear) for module in self.modules()):
            raise DrafterError("the drafter's weights are packed for inference; save() it before prepare()")
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


def _table(target: Target) -> Tensor:
    """The target's embedding table [V, H], unscaled."""
    return target.embedding.get_parameter("weight")


def _refuse_unknown(settings: dict[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(key for key, value in settings.items() if key not in known and value not in (None, False))
    if unknown:
        raise DrafterError(
            f"{where} sets {', '.join(unknown)}, unknown here: it may change what the drafter computes, so it isn't "
            "ignored; remove it if it doesn't"
        )
