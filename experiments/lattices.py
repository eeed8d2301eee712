"""What correctors learn from, computed once: the lattices of many blocks of the target's own answers.

The drafter costs far more than any corrector, and it is frozen; so its lattices are kept in memory, about 11 kB a block
for SmolLM2, and every kind of corrector, with as many candidates as it wants, learns from the same ones.

Shapes: N blocks, n slots, K candidates, H hidden size.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from dcoco.recall import Recalled, recall
from drafters.base import Lattice, TrainingBatch
from drafters.prompt_lookup import Continuation, continuation
from experiments.features import FeatureStore
from experiments.train_drafter import blocks, blocks_at

GROUP = 8  # answers whose blocks are drafted together


@dataclass
class Examples:
    """Lattices as a corrector sees them, in float32, and the tokens [N, n] that really followed (-1: none)."""

    lattice: Lattice
    recalled: Recalled | None
    labels: Tensor


@dataclass
class Blocks:
    """Lattices of N blocks as they were drafted, and what their texts recall and say."""

    lattice: Lattice
    ahead: Tensor  # [N, n] int64: how the text went on the last time
    matched: Tensor  # [N] int64: the length of that match
    labels: Tensor  # [N, n] int64: the tokens that really followed, -1 behind the end of an answer

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, index: Tensor | slice, recalls: bool = True, candidates: int | None = None) -> Examples:
        """Some of the blocks, with what the text recalls or without, and with fewer candidates a slot."""
        parts = self.lattice
        chosen = (parts.anchors[index], parts.anchor_hidden[index].float(), parts.ids[index].long())
        lattice, recalled = Lattice(*chosen, parts.log_probs[index], parts.hidden[index].float()), None
        if candidates is not None:
            lattice = lattice.best(candidates)
        if recalls:
            lattice, recalled = recall(lattice, Continuation(self.ahead[index], self.matched[index]))
        return Examples(lattice, recalled, self.labels[index])

    @classmethod
    def join(cls, parts: list["Blocks"]) -> "Blocks":
        """All blocks of several."""
        lattices = [vars(part.lattice) for part in parts]
        joined = Lattice(**{name: torch.cat([lattice[name] for lattice in lattices]) for name in lattices[0]})
        return cls(
            joined, *(torch.cat([getattr(part, name) for part in parts]) for name in ("ahead", "matched", "labels"))
        )


@torch.inference_mode()
def collect(drafter: Any, store: FeatureStore, config: DictConfig) -> tuple[Blocks, list[Blocks]]:
    """Lattices of `config.blocks` random blocks of the training answers, and of each of the last `config.held_out`
    answers those of all its anchors in order."""
    count = len(store.sequences)
    training: list[Blocks] = []
    held_out = whole_lattices(drafter, store, config.held_out)
    done, random = 0, torch.Generator().manual_seed(config.seed)
    order = torch.randperm(count - config.held_out, generator=random).tolist()
    groups = [sorted(order[i : i + GROUP]) for i in range(0, len(order) - GROUP + 1, GROUP)]
    with tqdm(total=config.blocks, desc="lattices", unit="block") as bar:
        for chosen in groups * config.passes:
            if done >= config.blocks:
                break
            found = lattices(drafter, *blocks(store, chosen, 32, drafter.block_size, random))
            training.append(found)
            done += len(found)
            bar.update(len(found))
    return Blocks.join(training), held_out


@torch.inference_mode()
def whole_lattices(drafter: Any, store: FeatureStore, count: int) -> list[Blocks]:
    """Of each of the last `count` answers the lattices behind all its tokens, in order."""
    found, answers = [], len(store.sequences)
    for index in tqdm(range(answers - count, answers), desc="held out", unit="answer"):
        sequence = store.sequences[index]
        every = torch.arange(sequence.prompt, sequence.length - 1)[None]
        found.append(lattices(drafter, *blocks_at(store, [index], every, drafter.block_size)))
    return found


def lattices(drafter: Any, batch: TrainingBatch, labels_RAn: Tensor) -> Blocks:
    """The lattices of a batch of blocks, with what each block's text recalls; blocks without a label are left out."""
    lattice, labels = drafter.lattice_of_blocks(batch), labels_RAn.flatten(0, 1)
    keep = (labels[:, 0] >= 0).nonzero().squeeze(1)
    kept = Lattice(**{name: value[keep] for name, value in vars(lattice).items()})
    texts = batch.ids[keep // batch.anchors.shape[1]]
    found = continuation(texts, batch.anchors.flatten()[keep], labels.shape[1])
    return Blocks(replace(kept, ids=kept.ids.int()), found.tokens, found.matched, labels[keep])
