"""A corrector whose drafter learns along with it, to set beside one whose drafter is frozen (`experiments/ablate.py`).

Lattices change with every step then and can't be kept: each step drafts its blocks anew, in the same answers. The loss
is the corrector's plus the drafter's own, and the corrector's reaches the drafter through the candidates'
log-probabilities and the hidden states.

Shapes: R sequences, A anchors a sequence, N blocks (R x A), n slots, K candidates, W draft vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from dcoco.corrector import Corrector, CorrectorConfig
from drafters.block_diffusion import BlockDiffusionDrafter
from experiments.features import FeatureStore
from experiments.heads import lengths, teacher_forced_loss
from experiments.lattices import GROUP, Blocks, Examples, whole_lattices
from experiments.precision import autocast
from experiments.train_corrector import Trainer, digest_of
from experiments.train_drafter import blocks, columns_of, faded_loss, load_weights
from verifier.target import Target


class Pair(nn.Module):
    """A drafter and its corrector, as one thing that learns."""

    def __init__(self, drafter: BlockDiffusionDrafter, corrector: Corrector):
        super().__init__()
        self.drafter = drafter
        self.corrector = corrector


class CoTrainer(Trainer):
    """Trains a fresh corrector and the drafter of a checkpoint together.

    Args:
        folder: of the drafter's checkpoint.
        store: the target's features of the answers; the last `config.held_out` of them are for evaluation.
        config: `drafter_rate` is the drafter's learning rate as a share of the corrector's: it has learnt already.
    """

    def __init__(self, target: Target, folder: Path, store: FeatureStore, config: DictConfig):
        loaded = BlockDiffusionDrafter.load(folder, target)
        drafter = BlockDiffusionDrafter(target, loaded.config, loaded.draft_ids)
        load_weights(drafter, folder)
        torch.manual_seed(config.seed)
        corrector = Corrector(CorrectorConfig(target.hidden_size, config.width, config.pair_width)).to(target.device)
        corrector.recalls = False  # type: ignore[misc]
        pair = Pair(drafter.prepare_training(), corrector)
        super().__init__(pair, None, target.embedding_weight(), config, digest_of(folder))
        trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        groups: list[dict[str, Any]] = [{"params": list(corrector.parameters())}]
        groups.append({"params": trained, "share": config.drafter_rate})
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, weight_decay=config.weight_decay, fused=True)
        self.store = store
        self.columns = columns_of(drafter)

    def loss(self, random: torch.Generator) -> Tensor:
        """The corrector's loss plus the drafter's own, of random blocks of some answers."""
        config, drafter = self.config, self.head.drafter
        training = len(self.store.sequences) - config.held_out
        chosen = torch.randperm(training, generator=random)[:GROUP].tolist()
        of_each = max(1, config.blocks_per_step // len(chosen))
        batch, labels_RAn = blocks(self.store, chosen, of_each, drafter.block_size, random)
        inputs_RAnH, hidden_RAnH = drafter.run_blocks(batch, drafter.block_size)
        own, _ = faded_loss(drafter.logits(hidden_RAnH), labels_RAn, self.columns, config.gamma)
        anchors_N = batch.ids.gather(1, batch.anchors).flatten()
        inputs_NH, hidden_NnH = (states.flatten(0, 1).float() for states in (inputs_RAnH[:, :, 0], hidden_RAnH))
        examples = Examples(drafter.lattice(anchors_N, inputs_NH, hidden_NnH), None, labels_RAn.flatten(0, 1))
        return own + teacher_forced_loss(self.head.corrector, examples, self.embedding, config.gamma)

    def lengths(self, answers: list[Blocks]) -> dict[str, float]:
        """Mean acceptance lengths on the held-out answers, whose lattices are drafted by what the drafter is now."""
        with autocast(self.embedding.device, self.embedding.dtype):
            answers = whole_lattices(self.head.drafter, self.store, self.config.held_out)
        return lengths(self.head.corrector, answers, self.embedding)
