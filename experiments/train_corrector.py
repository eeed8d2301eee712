"""Train a corrector, ours or a rival, on the target's own answers; the drafter is frozen.

    python -m experiments.train_corrector drafter=runs/smollm2_135m_drafter/checkpoint
    python -m experiments.train_corrector kind=selector drafter=drafters/checkpoints/smollm2_135m run=runs/selector

The answers should be ones that the drafter was not trained on: on its own training answers it is surer than it will be
in use. All kinds learn from the same lattices (`experiments/lattices.py`) in the same order, so only the correction
differs; what each learns is in `experiments/heads.py`. The checkpoint is that of the evaluation with the longest
corrected walk. A run can be interrupted and goes on where it was saved.

Lengths are logged of rounds walked through held-out answers: `selected` (the corrected walk), `tree` (the corrected
tree), `top1` (the plain drafter) and `oracle` (the best path there is).
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from tqdm import tqdm

from dcoco.corrector import Corrector
from dcoco.registry import save_corrector
from dcoco.targets import load_target
from drafters.block import BlockDrafter
from drafters.checkpoint import target_identity
from drafters.dspark import DSparkDrafter
from drafters.registry import load_drafter
from experiments.environment import CONF, describe
from experiments.features import FeatureStore, build, read_answers
from experiments.heads import KINDS, lengths, markov_loss, new_head, teacher_forced_loss
from experiments.lattices import GROUP, Blocks, collect
from experiments.precision import autocast
from experiments.settings import check_numbers, check_same_run, shaping
from verifier.errors import ConfigError
from verifier.target import Target


@hydra.main(version_base=None, config_path=CONF, config_name="train_corrector")
def main(config: DictConfig) -> None:
    torch.set_num_threads(config.threads or torch.get_num_threads())
    check_numbers(config)
    if config.kind not in KINDS:
        raise ConfigError(f"kind={config.kind!r}: must be one of {', '.join(KINDS)}")
    model, tokenizer, _ = load_target(config.target, device=config.device)
    target = Target(model, pack=False)
    folder, run = Path(config.drafter), Path(config.run)
    run.mkdir(parents=True, exist_ok=True)
    drafter, store = load_frozen(config, target, tokenizer)
    training, held_out = collect(drafter, store, config)

    torch.manual_seed(config.seed)
    head, embedding = new_head(config, target, drafter), target.embedding_weight()
    trainer = Trainer(head, training, embedding, config, digest_of(folder))
    trainer.restore(run / "state.pt")
    identity = target_identity(target, tokenizer)

    def keep(figures: dict[str, Any]) -> None:
        recipe = {"config": OmegaConf.to_container(config), "parameters": trainer.parameters}
        recipe |= {"figures": figures, **describe()}
        save(trainer.head, Path(config.checkpoint), folder, identity, recipe)

    train(trainer, held_out, run, keep)


def train(trainer: "Trainer", held_out: list[Blocks], run: Path, keep: Callable[[dict[str, Any]], None]) -> None:
    """Take the remaining steps. What `keep` gets the figures of is the best that there has been in the run's folder."""
    config = trainer.config
    with tqdm(total=config.steps, initial=trainer.step, desc="train", unit="step") as bar:
        while trainer.step < config.steps:
            loss = trainer.train_step()
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}")
            if trainer.step % config.save_every == 0 or trainer.step == config.steps:
                line = {"step": trainer.step, "seconds": round(trainer.seconds), "loss": round(loss, 4)}
                line |= trainer.lengths(held_out)
                tqdm.write(json.dumps(line))
                with (run / "log.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
                if line["selected"] > trainer.best:  # few answers are soon learnt by heart
                    trainer.best = line["selected"]
                    keep(line)
                trainer.save(run / "state.pt")


def digest_of(folder: Path) -> str:
    """What tells the drafter of a checkpoint apart."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def load_frozen(config: DictConfig, target: Target, tokenizer: Any) -> tuple[Any, FeatureStore]:
    """The drafter, and the target's features of the answers that its correctors learn from.

    Raises ConfigError for a drafter without lattices, and where answers are too few.
    """
    drafter = load_drafter(Path(config.drafter), target, tokenizer)
    if not isinstance(drafter, BlockDrafter) or not (Path(config.drafter) / "model.safetensors").is_file():
        raise ConfigError(
            f"drafter={config.drafter}: correctors learn from the lattices of a block drafter; name the folder that "
            "holds the weights of one (block_diffusion or dflash)"
        )
    layers = getattr(drafter.config, "target_layers", ())  # DFlash keeps keys and values of its own
    answers = read_answers(Path(config.answers), config.limit, config.skip)
    if len(answers) < config.held_out + GROUP:
        raise ConfigError(
            f"{len(answers)} answers (limit={config.limit}, skip={config.skip}): keep held_out={config.held_out} for "
            f"evaluation and at least {GROUP} to learn from"
        )
    build(Path(config.features), target, answers, drafter.taps, layers)
    return drafter, FeatureStore(Path(config.features), drafter.taps, layers, target.device)


def save(head: Any, checkpoint: Path, folder: Path, identity: dict[str, Any], recipe: dict[str, Any]) -> None:
    """Write what was trained: ours beside a copy of the drafter, a rival with the way from there to the drafter."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    base = os.path.relpath(folder, checkpoint)
    if isinstance(head, DSparkDrafter):
        head.save(checkpoint, base, identity, recipe)
        return
    if isinstance(head, Corrector):
        shutil.copytree(folder, checkpoint, dirs_exist_ok=True)
    else:
        (checkpoint / "config.json").write_text(json.dumps({"base": base}) + "\n")
    save_corrector(checkpoint, head, recipe)


class Trainer:
    """A corrector of any kind, its optimizer, and how far it has come.

    Args:
        head: a corrector, or DSpark's heads on the drafter.
        training: what it learns from; None where `loss` finds that by itself.
        embedding: [V, H], the target's.
        drafter_digest: of the drafter whose lattices these are; a run of another one is not gone on with.
        candidates: fewer a slot than the lattices have.
        unary: whether the drafter's log-probabilities are part of a corrector's scores.
    """

    def __init__(
        self,
        head: Any,
        training: Blocks | None,
        embedding: Tensor,
        config: DictConfig,
        drafter_digest: str = "",
        candidates: int | None = None,
        unary: bool = True,
    ):
        self.head = head
        self.training = training
        self.embedding = embedding
        self.config = config
        self.drafter_digest = drafter_digest
        self.candidates = candidates
        self.unary = unary
        self.step = 0
        self.seconds = 0.0
        self.best = 0.0  # the longest corrected walk that an evaluation found
        trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
        self.parameters = sum(parameter.numel() for parameter in trained)
        self.optimizer = torch.optim.AdamW(trained, lr=config.lr, weight_decay=config.weight_decay, fused=True)

    def train_step(self) -> float:
        """One optimizer step on blocks that depend on (seed, step) alone; returns the loss."""
        begun, config = time.perf_counter(), self.config
        random = torch.Generator().manual_seed(config.seed * 1_000_003 + self.step)
        rate = config.lr * min(1.0, (self.step + 1) / 50, (config.steps - self.step) / (0.5 * config.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("share", 1.0)
        with autocast(self.embedding.device, self.embedding.dtype):
            loss = self.loss(random)
        loss.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.seconds += time.perf_counter() - begun
        return loss.item()

    def loss(self, random: torch.Generator) -> Tensor:
        """The loss of random blocks."""
        head, gamma = self.head, self.config.gamma
        assert self.training is not None
        index = torch.randint(len(self.training), (self.config.blocks_per_step,), generator=random)
        if isinstance(head, DSparkDrafter):
            return markov_loss(head, self.training.select(index, recalls=False), gamma)
        examples = self.training.select(index, head.recalls, self.candidates)
        return teacher_forced_loss(head, examples, self.embedding, gamma, self.unary)

    def lengths(self, answers: list[Blocks]) -> dict[str, float]:
        """Mean acceptance lengths on held-out answers."""
        return lengths(self.head, answers, self.embedding, self.candidates, self.unary)

    def save(self, file: Path) -> None:
        """Write everything that an exact resume needs."""
        state = {"kind": type(self.head).__name__, "weights": self.head.state_dict(), "step": self.step}
        state |= {"optimizer": self.optimizer.state_dict(), "seconds": self.seconds, "best": self.best}
        state |= {"drafter": self.drafter_digest, "settings": shaping(self.config)}
        torch.save(state, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)

    def restore(self, file: Path) -> None:
        """Go on from a state, where there is one; ConfigError where it is of another drafter, kind or setting."""
        if not file.exists():
            return
        state = torch.load(file, weights_only=True, map_location=self.embedding.device)
        if state["drafter"] != self.drafter_digest or state["kind"] != type(self.head).__name__:
            raise ConfigError(
                f"{file} is of a {state['kind']} for the drafter {state['drafter'][:8]}, not of a "
                f"{type(self.head).__name__} for {self.drafter_digest[:8]}: name another run"
            )
        check_same_run(state, self.config, file)
        self.head.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.best = state["step"], state["seconds"], state["best"]


if __name__ == "__main__":
    main()
