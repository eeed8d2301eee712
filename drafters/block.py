"""What block-diffusion drafters of both backbones share: hidden states of a block become a lattice.

Shapes: R rows, A anchors a row, n slots, m block inputs, K candidates, H hidden size, W draft vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drafters.base import Context, Lattice, TrainingBatch
from verifier.cache import RaggedCache
from verifier.errors import DrafterError
from verifier.sampling import Stream, exponential_noise, probabilities

FIELD = 256  # the most probable tokens of a slot, which race for its candidates


class BlockDrafter(nn.Module):
    """Base of drafters that fill a block in one pass; a subclass says how a block is run."""

    config: Any  # with `candidates`, the tokens kept a slot
    block_size: int
    taps: Sequence[int]
    draft_ids: Tensor  # [W] int64: the tokens that may be drafted

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., W] over the draft vocabulary."""
        raise NotImplementedError

    def run(self, state: Any, anchors_R: Tensor, cache: RaggedCache, slots: int) -> tuple[Tensor, Tensor]:
        """Inputs [R, m, H] and hidden states [R, n, H] of the blocks behind the anchors."""
        raise NotImplementedError

    @torch.inference_mode()
    def draft(
        self, state: Any, anchors_R: Tensor, cache: RaggedCache, slots: int, context: Context | None = None
    ) -> Lattice:
        """The candidates of every slot of the blocks behind the anchors."""
        inputs_RmH, hidden_RnH = self.run(state, anchors_R, cache, slots)
        return self.lattice(anchors_R, inputs_RmH[:, 0], hidden_RnH, context)

    def run_blocks(self, batch: TrainingBatch, slots: int) -> tuple[Tensor, Tensor]:
        """Inputs [R, A, m, H] and hidden states [R, A, n, H] of the blocks of a training batch."""
        raise NotImplementedError

    def forward_blocks(self, batch: TrainingBatch, slots: int) -> Tensor:
        """Hidden states [R, A, n, H] of every slot of every block of a training batch (before the head)."""
        return self.run_blocks(batch, slots)[1]

    def lattice_of_blocks(self, batch: TrainingBatch) -> Lattice:
        """The lattices of full blocks of a training batch, its rows R times anchors A as rows."""
        inputs_RAmH, hidden_RAnH = self.run_blocks(batch, self.block_size)
        anchors = batch.ids.gather(1, batch.anchors).flatten()
        return self.lattice(anchors, inputs_RAmH[:, :, 0].flatten(0, 1), hidden_RAnH.flatten(0, 1))

    def lattice(
        self, anchors_R: Tensor, anchor_hidden_RH: Tensor, hidden_RnH: Tensor, context: Context | None = None
    ) -> Lattice:
        """The K best candidates of each slot, from the hidden states [R, n, H] of a block."""
        logits = self.logits(hidden_RnH).float()
        values, columns = best_candidates(logits, self.draft_ids, self.config.candidates, context)
        log_probs = values - logits.logsumexp(-1, keepdim=True)
        return Lattice(anchors_R, anchor_hidden_RH, self.draft_ids[columns], log_probs, hidden_RnH)


def best_candidates(
    logits: Tensor, draft_ids: Tensor, count: int, context: Context | None = None
) -> tuple[Tensor, Tensor]:
    """Logits and columns [R, n, K] of each slot's candidates among logits [R, n, W]: the most probable first.

    They are the K most probable tokens. Above temperature 0 the target's noise is known beforehand unless the rule is
    the sampled walk (`dcoco/walk.py`): then they are those that lead the race, and a token that only luck can make
    win is one of them where it has that luck.
    """
    count = min(count, logits.shape[-1])
    if context is None or context.sampled or context.sampling.all_greedy:
        return logits.topk(count)
    batch, (values, columns) = context.sampling, logits.topk(min(FIELD, logits.shape[-1]))
    noise = exponential_noise(batch.seed, context.positions, Stream.TARGET, draft_ids[columns])
    raced = probabilities(values, batch).log() - noise.log_()
    # What the request's filters leave out comes last.
    raced = torch.where(raced.isneginf(), -1e6 - torch.arange(len(raced[0, 0]), device=raced.device), raced)
    raced = torch.where((batch.temperature == 0)[:, None, None], values, raced)
    leading = raced.topk(count).indices.sort(-1).values
    return values.gather(-1, leading), columns.gather(-1, leading)


def draft_vocabulary(ids: Tensor | None, vocabulary: int) -> Tensor:
    """The tokens that may be drafted, int64 [W]: `ids`, or by default all below `vocabulary`.

    Raises DrafterError for others, and for repeated ones: verification relies on a slot's candidates being distinct.
    """
    if ids is None:
        return torch.arange(vocabulary)
    whole = ids.dim() == 1 and len(ids) > 0 and not ids.is_floating_point()
    if not whole or ids[0] < 0 or ids[-1] >= vocabulary or bool((ids.long().diff() <= 0).any()):
        raise DrafterError(
            f"draft_ids must be ascending token ids below the vocabulary's {vocabulary}: get the checkpoint again"
        )
    return ids.long()
