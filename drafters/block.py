"""What block-diffusion drafters of both backbones share: hidden states of a block become a lattice.

Shapes: R rows, A anchors a row, n slots, m block inputs, K candidates, H hidden size, W draft vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from drafters.base import Context, Lattice, TrainingBatch
from verifier.cache import RaggedCache
from verifier.errors import DrafterError


class BlockDrafter(nn.Module):
    """Base of drafters that fill a block in one pass; a subclass says how a block is run."""

    config: Any  # with `candidates`, the tokens kept a slot
    block_size: int
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
        """The candidates of every slot of the blocks behind the anchors; the context has no say."""
        inputs_RmH, hidden_RnH = self.run(state, anchors_R, cache, slots)
        return self.lattice(anchors_R, inputs_RmH[:, 0], hidden_RnH)

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

    def lattice(self, anchors_R: Tensor, anchor_hidden_RH: Tensor, hidden_RnH: Tensor) -> Lattice:
        """The K best candidates of each slot, from the hidden states [R, n, H] of a block."""
        logits = self.logits(hidden_RnH).float()
        top = logits.topk(min(self.config.candidates, logits.shape[-1]))
        log_probs = top.values - logits.logsumexp(-1, keepdim=True)
        return Lattice(anchors_R, anchor_hidden_RH, self.draft_ids[top.indices], log_probs, hidden_RnH)


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
