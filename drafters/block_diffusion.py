"""The default drafter: a few of the target's own layers, reading its key/value cache, fill a block at once.

The block is `[anchor, MASK x (n - 1)]`; every slot sees the context and, in both directions, the whole block, and
slot t predicts the token t places after the anchor. The layers are copies of decoder layers of the target and attend to
the keys and values that the target already holds for those layers. So the drafter has no cache, no prefill and nothing
to roll back.

Block input of slot t: a learned vector, plus projections of the target's features at the token before the anchor, plus
(slot 1 only) a projection of the anchor's embedding. Embedding and head are the target's; the head may be trimmed to a
draft vocabulary, so a token outside it is never drafted.

Shapes: R rows, n slots, K candidates, H hidden size, T taps, W draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafters import block_attention
from drafters.base import TrainingBatch
from drafters.block import BlockDrafter
from drafters.block_attention import BlockContext
from drafters.checkpoint import (
    check_draft_ids,
    check_keys,
    load_strictly,
    read_config,
    read_tensors,
    whole_number,
    whole_numbers,
    write_checkpoint,
)
from drafters.shallow import ShallowDrafter, unit
from verifier import attention
from verifier.cache import RaggedCache
from verifier.errors import DrafterError
from verifier.packing import Layout, Packing
from verifier.target import Target

FORMAT = 1  # of the checkpoint


@dataclass(frozen=True)
class BlockDiffusionConfig:
    """Shape of a block-diffusion drafter.

    Attributes:
        target_layers: decoder layers of the target that are copied; each reads the target's cache of its own layer.
        taps: decoder layers whose outputs at the token before the anchor enter the block (-1: the embedding).
        block_size: slots of a full block, B; shorter blocks may be drafted.
        candidates: tokens kept a slot, K.
    """

    target_layers: tuple[int, ...]
    taps: tuple[int, ...]
    block_size: int = 8
    candidates: int = 16

    def check(self, layers: int) -> None:
        """Raise DrafterError where the shape doesn't fit a target of `layers` decoder layers."""
        if not self.target_layers or not all(0 <= index < layers for index in self.target_layers):
            raise DrafterError(
                f"target_layers={list(self.target_layers)} must name layers 0..{layers - 1} of the target"
            )
        if list(self.target_layers) != sorted(set(self.target_layers)):
            raise DrafterError(f"target_layers={list(self.target_layers)} must ascend: each layer's cache is read once")
        if not self.taps or not all(-1 <= index < layers for index in self.taps):
            raise DrafterError(f"taps={list(self.taps)} must name layers -1..{layers - 1} of the target")
        if self.block_size < 1 or self.candidates < 1:
            raise DrafterError(f"block_size={self.block_size} and candidates={self.candidates} must be at least 1")


@dataclass
class LastFeatures:
    """The features of the last committed token that the target has run, a row: [S, T, H]."""

    features: Tensor

    @property
    def memory_bytes(self) -> int:
        return self.features.nbytes

    def move(self, source: int, target: int) -> None:
        self.features[target] = self.features[source]

    def reset(self, row: int) -> None:
        self.features[row] = 0

    def clean(self) -> None:
        pass  # rows are computed apart from each other, and a reset one is zero


class BlockDiffusionDrafter(ShallowDrafter, BlockDrafter):
    """Drafts a block in one pass over copies of the target's layers.

    Args:
        target: the model whose layers, embedding, head and cache are used.
        config: which layers and taps, and the block size.
        draft_ids: int64 [W], ascending: the tokens that may be drafted; None for the whole vocabulary.

    Raises:
        DrafterError: the shape or a draft id doesn't fit the target.
    """

    def __init__(self, target: Target, config: BlockDiffusionConfig, draft_ids: Tensor | None = None):
        config.check(len(target.layers))
        super().__init__(target, config, config.target_layers, draft_ids)
        self.taps = config.taps
        self.hidden_size = target.hidden_size
        kinds = getattr(self.body_config, "layer_types", None) or [next(iter(self.masks.windows))] * len(
            config.target_layers
        )
        self.windows = {
            layer: self.masks.windows[kind] for layer, kind in zip(config.target_layers, kinds, strict=True)
        }
        hidden = target.hidden_size
        self.slots = nn.Parameter(torch.zeros(config.block_size, hidden))
        self.feature_projections = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in config.taps)
        self.anchor_projection = nn.Linear(hidden, hidden, bias=False)

    @torch.no_grad()
    def initialise(self, scale: float) -> None:
        """Start training from the target: the copied layers as they are, the block from the last token's features."""
        super().initialise(scale)
        for index, weight in enumerate(self.feature_projections.parameters()):
            nn.init.eye_(weight) if index == 0 else nn.init.zeros_(weight)
        nn.init.zeros_(self.anchor_projection.weight)

    def save(self, folder: Path, identity: dict[str, Any], training: dict[str, Any]) -> None:
        """Write a checkpoint in bfloat16: whose drafter it is (`target_identity`), and how it was trained."""
        config = {
            "drafter": "block_diffusion",
            "format": FORMAT,
            "predicts": "next",  # input slot i predicts the token after it: a block of B inputs drafts B tokens
            **asdict(self.config),
            "draft_vocab_size": len(self.draft_ids),
            "target": identity,
            "training": training,
        }
        write_checkpoint(self, folder, config)

    @classmethod
    def load(cls, folder: Path, target: Target) -> "BlockDiffusionDrafter":
        """The drafter in `folder`, ready to draft for `target`; DrafterError where anything doesn't fit."""
        config, file = read_config(folder), folder / "config.json"
        names = {field.name for field in fields(BlockDiffusionConfig)}
        check_keys(config, names | {"drafter", "format", "predicts", "draft_vocab_size", "target", "training"}, file)
        if config["format"] != FORMAT or config["predicts"] != "next":
            raise DrafterError(
                f"{file}: format={config['format']!r}, predicts={config['predicts']!r}; "
                f"this version reads format={FORMAT} with predicts='next'"
            )
        shape = BlockDiffusionConfig(
            whole_numbers(config, "target_layers", file),
            whole_numbers(config, "taps", file),
            whole_number(config, "block_size", file),
            whole_number(config, "candidates", file),
        )
        state = read_tensors(folder / "model.safetensors")
        drafter = cls(target, shape, state.get("draft_ids"))
        load_strictly(drafter, state, folder)
        check_draft_ids(config, drafter.draft_ids, file)
        return drafter.prepare()

    def block_inputs(self, features: Sequence[Tensor], anchor_embedding: Tensor, slots: int) -> Tensor:
        """Inputs [..., n, H] of a block from features (T tensors [..., H]) and the anchor's embedding [..., H]."""
        context = self.slots[:slots] + sum(
            projection(unit(feature)) for projection, feature in zip(self.feature_projections, features, strict=True)
        ).unsqueeze(-2)
        anchor = self.anchor_projection(unit(anchor_embedding)).unsqueeze(-2)
        return self.scale * torch.cat([context[..., :1, :] + anchor, context[..., 1:, :]], dim=-2)

    def run_blocks(self, batch: TrainingBatch, slots: int) -> tuple[Tensor, Tensor]:
        """Inputs and hidden states [R, A, n, H] of the blocks of a training batch."""
        rows, anchors = batch.anchors.shape
        index_RAH = (batch.anchors - 1)[..., None].expand(-1, -1, self.hidden_size)
        features = [tap.gather(1, index_RAH).to(self.slots.dtype) for tap in batch.taps]
        embedded = self._target[0].embedding(batch.ids.gather(1, batch.anchors)).to(self.slots.dtype)
        inputs = self.block_inputs(features, embedded, slots).view(rows, anchors * slots, self.hidden_size)
        positions_RAn = batch.anchors[..., None] + torch.arange(slots, device=batch.ids.device)

        context = BlockContext.before(batch.anchors, slots, batch.keys, batch.values, self.windows)
        self.body_config._attn_implementation = block_attention.NAME
        hidden = self.body(
            inputs_embeds=inputs,
            position_ids=positions_RAn.view(rows, -1),
            cache=context,
            use_cache=True,
            context=context,
        ).last_hidden_state
        self.body_config._attn_implementation = attention.NAME
        shape = (rows, anchors, slots, self.hidden_size)
        return inputs.view(shape), hidden.view(shape)

    def start(self, rows: int, max_length: int) -> LastFeatures:
        target = self._target[0]
        shape = (rows, len(self.taps), self.hidden_size)
        return LastFeatures(torch.zeros(shape, dtype=target.dtype, device=target.device))

    def observe(self, state: LastFeatures, first: int, taps: list[Tensor], counts_R: Tensor) -> None:
        rows = torch.arange(len(counts_R), device=counts_R.device)
        last = (counts_R - 1).clamp(min=0)
        new_RTH = torch.stack([tap_RQH[rows, last] for tap_RQH in taps], dim=1)
        old_RTH = state.features[first : first + len(rows)]
        old_RTH.copy_(torch.where((counts_R > 0)[:, None, None], new_RTH, old_RTH))

    def run(self, state: LastFeatures, anchors_R: Tensor, cache: RaggedCache, slots: int) -> tuple[Tensor, Tensor]:
        assert self.head is not None, "prepare() comes before drafting"
        rows = len(anchors_R)
        features = state.features[:rows].unbind(1)
        inputs_RnH = self.block_inputs(features, self._target[0].embedding(anchors_R), slots)
        packing = Packing([slots] * rows, cache.device, cache.lengths[:rows])
        positions_Rn, extent = cache.begin(0, rows, slots, packing)
        together = (1, rows * slots) if not packing.trivial else (rows, slots)  # rows of different contexts run as one
        mask = self.masks.block(positions_Rn, extent)
        hidden = self.body(
            inputs_embeds=inputs_RnH.view(*together, -1),
            attention_mask=mask,
            position_ids=positions_Rn.clamp(max=self.max_positions - 1).view(together),
            cache=cache,
            use_cache=True,
            layout=None if packing.trivial else Layout([packing], [mask]),
        ).last_hidden_state
        return inputs_RnH, hidden.view(rows, slots, -1)
