"""EAGLE: a layer that goes token by token, on the target's features and the token one step ahead of them.

The architecture of Li et al. 2024 (EAGLE, arXiv 2401.15077), with the fused features of several layers and the training
on the layer's own outputs of Li et al. 2025 (EAGLE-3, arXiv 2503.01840); a rival to `block_diffusion`. The feature of
the token before p and the embedding of token p sit together at position p; one causal decoder layer of the target's
class reads these pairs and says which token follows. In the text the feature is the target's: its taps, fused. In a
draft, whose tokens the target hasn't run, it is what the layer itself put out at the position before. The first token
of a text has no feature before it: zero.

Keys and values of the layer stay in a ragged cache of the drafter's own, with the target's features for every committed
token: what a draft has written behind them is overwritten. Embedding and head are the target's; the head may be trimmed
to a draft vocabulary.

Shapes: R rows, Q tokens a row, T real tokens of a packed pass, n slots, A anchors, P positions of a sequence, G
key/value heads, D head size, H hidden size, W draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters import block_attention
from drafters.base import Context, Draft, Pick, TrainingBatch, finish
from drafters.block_attention import ChainContext
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
class EagleConfig:
    """Shape of an EAGLE drafter.

    Attributes:
        taps: decoder layers of the target whose outputs make up its feature.
        block_size: tokens that are drafted at most.
    """

    taps: tuple[int, ...]
    block_size: int = 5

    def check(self, layers: int) -> None:
        """Raise DrafterError where the shape doesn't fit a target of `layers` decoder layers."""
        if not self.taps or not all(0 <= index < layers for index in self.taps):
            raise DrafterError(f"taps={list(self.taps)} must name layers 0..{layers - 1} of the target")
        if self.block_size < 1:
            raise DrafterError(f"block_size={self.block_size} must be at least 1")


@dataclass
class EagleState:
    """Keys and values of the committed pairs; `cache.lengths` counts the tokens observed."""

    cache: RaggedCache
    pending: Tensor  # [S, H]: the feature of each row's last observed token, whose pair waits for the next token
    bytes_per_token: int

    @property
    def memory_bytes(self) -> int:
        return self.cache.rows * self.cache.max_length * self.bytes_per_token + self.pending.nbytes

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        self.cache.move(source, target)
        self.pending[target] = self.pending[source]

    @torch.inference_mode()
    def reset(self, row: int) -> None:
        self.cache.lengths[row] = 0
        self.pending[row] = 0

    @torch.inference_mode()
    def clean(self) -> None:
        self.cache.clean()


class EagleDrafter(ShallowDrafter):
    """Drafts token by token with one layer, started from the target's last one.

    Args:
        target: the model whose layer, features, embedding and head are used.
        config: which features, and how many tokens are drafted.
        draft_ids: int64 [W], ascending: the tokens that may be drafted; None for the whole vocabulary.

    Raises:
        DrafterError: the shape or a draft id doesn't fit the target.
    """

    def __init__(self, target: Target, config: EagleConfig, draft_ids: Tensor | None = None):
        config.check(len(target.layers))
        self.layer_index = len(target.layers) - 1
        super().__init__(target, config, [self.layer_index], draft_ids)
        self.taps = (-1, *config.taps)  # the embedding says which tokens have been committed
        hidden = target.hidden_size
        self.fuse = nn.Linear(len(config.taps) * hidden, hidden, bias=False)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)

    @torch.no_grad()
    def initialise(self, scale: float) -> None:
        """Start training from the target's last layer, which at first sees the last tap and nothing of the token."""
        super().initialise(scale)
        one = torch.eye(len(self.fc.weight))
        self.fuse.weight.zero_()
        self.fuse.weight[:, -len(one) :].copy_(one)
        self.fc.weight.copy_(torch.cat([torch.zeros_like(one), one], dim=1))

    def save(self, folder: Path, identity: dict[str, Any], training: dict[str, Any]) -> None:
        """Write a checkpoint in bfloat16: whose drafter it is (`target_identity`), and how it was trained."""
        config = {
            "drafter": "eagle",
            "format": FORMAT,
            **asdict(self.config),
            "draft_vocab_size": len(self.draft_ids),
            "target": identity,
            "training": training,
        }
        write_checkpoint(self, folder, config)

    @classmethod
    def load(cls, folder: Path, target: Target) -> "EagleDrafter":
        """The drafter in `folder`, ready to draft for `target`; DrafterError where anything doesn't fit."""
        config, file = read_config(folder), folder / "config.json"
        known = {"drafter", "format", "taps", "block_size", "draft_vocab_size", "target", "training"}
        check_keys(config, known, file)
        if config["format"] != FORMAT:
            raise DrafterError(f"{file}: format={config['format']!r}; this version reads format={FORMAT}")
        shape = EagleConfig(whole_numbers(config, "taps", file), whole_number(config, "block_size", file))
        state = read_tensors(folder / "model.safetensors")
        drafter = cls(target, shape, state.get("draft_ids"))
        load_strictly(drafter, state, folder)
        check_draft_ids(config, drafter.draft_ids, file)
        return drafter.prepare()

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """The target's features [..., H] from its taps, [..., H] each (EAGLE-3, section 3.1)."""
        return self.fuse(torch.cat([unit(tap) for tap in taps], dim=-1))

    def pairs(self, embedded: Tensor, features: Tensor) -> Tensor:
        """The layer's inputs [..., H] from tokens' embeddings and the features before them, [..., H] each."""
        return self.scale * self.fc(torch.cat([unit(embedded), unit(features)], dim=-1))

    def forward_blocks(self, batch: TrainingBatch, slots: int) -> Tensor:
        """Hidden states [R, A, n, H] from which each slot behind each anchor of a training batch is drafted.

        Slot t follows the text's own tokens up to anchor + t - 1, on the layer's own outputs: what drafting computes as
        long as its tokens are accepted (the training-time test of EAGLE-3, section 3.2). A chain sees the text's pairs
        up to its anchor, and itself.
        """
        rows, positions = batch.ids.shape
        embedded_RPH = self._target[0].embedding(batch.ids)
        taps = [tap.to(self.scale.dtype) for tap in batch.taps]
        before_RPH = F.pad(self.features(taps), (0, 0, 1, 0))[:, :-1]
        positions_RP = torch.arange(positions, device=batch.ids.device).expand(rows, -1)
        text, layer = _Kept(), self.layer_index
        hidden_RPH = self.body(
            inputs_embeds=self.pairs(embedded_RPH, before_RPH),
            attention_mask=self.masks.causal(positions_RP, positions),
            position_ids=positions_RP,
            cache=text,
            use_cache=True,
        ).last_hidden_state
        found = [_gather(hidden_RPH, batch.anchors)]
        windows = {layer: next(iter(self.masks.windows.values()))}
        behind = (batch.anchors + 1, slots - 1)  # an anchor's own pair is the text's
        chains = ChainContext.before(*behind, {layer: text.keys}, {layer: text.values}, windows)
        self.body_config._attn_implementation = block_attention.NAME
        for step in range(1, slots):
            tokens_RAH = _gather(embedded_RPH, (batch.anchors + step).clamp(max=positions - 1))
            hidden_RAH = self.body(
                inputs_embeds=self.pairs(tokens_RAH, found[-1]),
                position_ids=batch.anchors + step,
                cache=chains,
                use_cache=True,
                context=chains,
            ).last_hidden_state
            found.append(hidden_RAH)
        self.body_config._attn_implementation = attention.NAME
        return torch.stack(found, dim=2)

    def start(self, rows: int, max_length: int) -> EagleState:
        target = self._target[0]
        cache = RaggedCache(rows, max_length + self.block_size, target.device)
        pending = torch.zeros(rows, target.hidden_size, dtype=target.dtype, device=target.device)
        return EagleState(cache, pending, target.cache_bytes_per_token // len(target.layers))

    @torch.inference_mode()
    def observe(self, state: EagleState, first: int, taps: list[Tensor], counts_R: Tensor) -> None:
        counts, cache = counts_R.tolist(), state.cache
        longest, rows = max(counts), slice(first, first + len(counts))
        if longest == 0:
            return
        packing = Packing(counts, cache.device, cache.lengths[rows], slack=1.0)
        embedded_TH, *taps_TH = (packing.pack(tap[:, :longest]) for tap in taps)
        features_RQH = packing.unpack(self.features(taps_TH))
        pending_RH = state.pending[rows]
        before_RQH = torch.cat([pending_RH[:, None], features_RQH[:, :-1]], dim=1)
        self._run(self.pairs(embedded_TH, packing.pack(before_RQH)), cache, first, packing)
        last_RH = features_RQH[torch.arange(len(counts), device=cache.device), (counts_R - 1).clamp(min=0)]
        pending_RH.copy_(torch.where((counts_R > 0)[:, None], last_RH, pending_RH))
        cache.lengths[rows] = [length + count for length, count in zip(cache.lengths[rows], counts, strict=True)]

    @torch.inference_mode()
    def draft(self, state: EagleState, anchors_R: Tensor, cache: RaggedCache, slots: int, context: Context) -> Draft:
        rows, lengths = len(anchors_R), state.cache.lengths
        observed = lengths[:rows]
        if observed != cache.lengths[:rows]:
            raise DrafterError(
                f"the drafter observed {observed} tokens, the target holds {cache.lengths[:rows]}: "
                "observe() must receive the taps of every committed token"
            )
        tokens_R, features_RH = anchors_R, state.pending[:rows]
        picks: list[Pick] = []
        for slot in range(slots):
            packing = Packing([1] * rows, cache.device, lengths[:rows])
            inputs_RH = self.pairs(self._target[0].embedding(tokens_R), features_RH)
            features_RH = self._run(inputs_RH, state.cache, 0, packing)
            picks.append(context.pick(self.logits(features_RH), slot, self.draft_ids))
            tokens_R = self.draft_ids[picks[-1].column]
            lengths[:rows] = [length + 1 for length in lengths[:rows]]
        lengths[:rows] = observed
        return finish(picks, self.draft_ids)

    def _run(self, inputs_TH: Tensor, cache: RaggedCache, first: int, packing: Packing) -> Tensor:
        """The layer's outputs [T, H] for pairs behind rows `first ..` of its cache."""
        positions_RQ, extent = cache.begin(first, packing.rows, packing.queries, packing)
        mask = self.masks.causal(positions_RQ, extent)
        shape = (packing.rows, packing.queries) if packing.trivial else (1, len(inputs_TH))
        # Beside a longer row, one at the limit is given pairs behind it; none of their tokens is submitted.
        positions_T = packing.pack(positions_RQ.clamp(max=self.max_positions - 1))
        hidden = self.body(
            inputs_embeds=inputs_TH.view(*shape, -1),
            attention_mask=mask,
            position_ids=positions_T.view(shape),
            cache=cache,
            use_cache=True,
            layout=None if packing.trivial else Layout([packing], [mask]),
        ).last_hidden_state
        return hidden.flatten(0, 1)


class _Kept:
    """A cache for one training pass of one layer: what it computes of the text is kept, with gradients."""

    keys: Tensor  # [R, G, P, D]
    values: Tensor

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **kwargs: object) -> tuple[Tensor, Tensor]:
        self.keys, self.values = keys, values
        return keys, values


def _gather(x_RPH: Tensor, positions_RA: Tensor) -> Tensor:
    """What stands at some positions of each row: [R, A, H]."""
    return x_RPH.gather(1, positions_RA[..., None].expand(-1, -1, x_RPH.shape[-1]))
