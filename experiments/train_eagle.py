"""Train an EAGLE drafter on a target's own answers.

    python -m experiments.train_eagle target=smollm2_135m answers=answers.jsonl
    python -m experiments.train_eagle run=runs/eagle steps=1000          # goes on where the run stopped

Every step draws sequences and drafts a few tokens behind every token of their answers, on the layer's own outputs
(the training-time test of EAGLE-3, arXiv 2503.01840, section 3.2), so that the text goes through the layer once for
all of them. The loss is the cross-entropy over the draft vocabulary with the answer's tokens, weighted
exp(-(t - 1) / gamma) for slot t. Schedule, state and figures are those of `train_drafter`.

Shapes: R sequences, A anchors a sequence, n slots, W draft vocabulary.
"""

from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from torch import Tensor

from dcoco.targets import load_target
from drafters.base import TrainingBatch
from drafters.eagle import EagleConfig, EagleDrafter
from experiments.environment import CONF
from experiments.features import FeatureStore, build, read_answers
from experiments.settings import check_numbers
from experiments.train_drafter import Trainer, draft_vocabulary, load_weights, size_of, train, whole_answers
from verifier.target import Target


@hydra.main(version_base=None, config_path=CONF, config_name="train_eagle")
def main(config: DictConfig) -> None:
    check_numbers(config)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    model, tokenizer, _ = load_target(config.target, device=config.device)
    target = Target(model, pack=False)
    answers = read_answers(Path(config.answers), config.limit, config.skip)
    build(Path(config.features), target, answers, config.taps, ())
    store = FeatureStore(Path(config.features), config.taps, (), target.device)
    shape = EagleConfig(tuple(config.taps), config.block_size)
    drafter = EagleDrafter(target, shape, draft_vocabulary(answers, config.draft_vocab_size))
    drafter.initialise(size_of(store.taps[-1], store))
    if config.init:
        load_weights(drafter, Path(config.init))
    train(EagleTrainer(drafter.prepare_training(), store, config), target, tokenizer)


class EagleTrainer(Trainer):
    """A chain of `unrolled` tokens behind every token of the answers."""

    def examples(self, random: torch.Generator) -> tuple[TrainingBatch, Tensor]:
        return whole_answers(self.store, self._sequences_of_step(), self.config.unrolled)

    def hits(self, logits: Tensor, labels_RAn: Tensor) -> dict[str, Tensor]:
        return {"top1": self.drafter.draft_ids[logits.argmax(-1)] == labels_RAn}


if __name__ == "__main__":
    main()
