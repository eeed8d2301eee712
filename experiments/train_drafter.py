"""Train a block-diffusion drafter on a target's own answers.

    python -m experiments.train_drafter target=smollm2_135m answers=answers.jsonl
    python -m experiments.train_drafter run=runs/drafter steps=8000          # goes on where the run stopped

Every step draws sequences, a block length n and anchors from (seed, step) alone, so a resumed run sees what an unbroken
one would have seen. Blocks of random length teach the drafter to draft short blocks too, and spend more of the work on
the first slots, without which the later ones are never reached. The loss is the cross-entropy over the draft
vocabulary, weighted exp(-(t - 1) / gamma) for slot t. The learning rate is constant, then falls linearly to zero over
the last `decay` of the steps, so that a run can be prolonged from the checkpoint at which the fall began.

Shapes: R sequences, A anchors a sequence, n slots, W draft vocabulary, H hidden size.
"""

import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.nn.functional as F
from diffusers.training_utils import EMAModel
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from tqdm import tqdm

from dcoco.targets import load_target
from drafters.base import TrainingBatch
from drafters.block_diffusion import BlockDiffusionConfig, BlockDiffusionDrafter
from drafters.checkpoint import load_strictly, read_tensors, target_identity
from drafters.dflash import DFlashConfig, DFlashDrafter
from experiments.environment import CONF, describe
from experiments.features import FeatureStore, Sequence_, build, read_answers
from experiments.precision import autocast
from experiments.schedule import batches_of_epoch, learning_rate
from experiments.settings import check_numbers, check_same_run, shaping
from verifier.errors import ConfigError
from verifier.target import Target

IGNORED = -100  # by the loss


@hydra.main(version_base=None, config_path=CONF, config_name="train_drafter")
def main(config: DictConfig) -> None:
    check_numbers(config)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    model, tokenizer, _ = load_target(config.target, device=config.device)
    target = Target(model, pack=False)
    answers = read_answers(Path(config.answers), config.limit, config.skip)
    features = Path(config.features)
    layers = config.target_layers if config.backbone == "block_diffusion" else ()  # whose cache is read
    build(features, target, answers, config.store_taps or config.taps, config.store_layers or layers)
    store = FeatureStore(features, config.taps, layers, target.device)
    drafter = new_drafter(config, target, store, draft_vocabulary(answers, config.draft_vocab_size))
    if config.init:
        load_weights(drafter, Path(config.init))
    train(Trainer(drafter.prepare_training(), store, config), target, tokenizer)


def train(trainer: "Trainer", target: Target, tokenizer: Any) -> None:
    """Train to the end, from where the run stopped: state, log and checkpoint are kept in its folder."""
    config, drafter = trainer.config, trainer.drafter
    run = Path(config.run)
    run.mkdir(parents=True, exist_ok=True)
    trainer.restore(run / "state.pt")
    with tqdm(total=config.steps, initial=trainer.step, desc="train", unit="step") as bar:
        while trainer.step < config.steps:
            loss = trainer.train_step()
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", lr=f"{trainer.learning_rate():.1e}")
            last = trainer.step == config.steps
            if trainer.step == math.ceil(config.steps * (1 - config.decay)):
                trainer.save(run / "before_decay.pt")
            if last or trainer.step % config.save_every == 0:
                with trainer.averaged():
                    figures = trainer.evaluate()
                recipe = {"config": OmegaConf.to_container(config), "figures": figures, **describe()}
                recipe |= {"steps": trainer.step, "seconds": round(trainer.seconds)}
                with trainer.averaged():
                    drafter.save(run / "checkpoint", target_identity(target, tokenizer), recipe)
                trainer.save(run / "state.pt")  # after the checkpoint: a run that dies between them repeats the steps
                line = {"step": trainer.step, "seconds": round(trainer.seconds), **figures}
                tqdm.write(json.dumps(line))
                with (run / "log.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")


def new_drafter(config: DictConfig, target: Target, store: FeatureStore, draft_ids: Tensor | None) -> Any:
    """An untrained drafter of either backbone, started from layers of the target."""
    if config.backbone == "dflash":
        shape = DFlashConfig.for_target(target, len(config.target_layers), config.taps, config.block_size)
        published = DFlashDrafter(target, shape, draft_ids)
        published.initialise(config.target_layers)
        return published
    if config.backbone != "block_diffusion":
        raise ConfigError(f"backbone={config.backbone!r}: must be block_diffusion or dflash")
    layout = BlockDiffusionConfig(tuple(config.target_layers), tuple(config.taps), config.block_size, config.candidates)
    drafter = BlockDiffusionDrafter(target, layout, draft_ids)
    drafter.initialise(size_of(store.taps[0], store))
    return drafter


def size_of(tap: Tensor, store: FeatureStore) -> float:
    """The size (root mean square) of a tap's features in a store, by its first answers."""
    some = tap[: store.sequences[min(64, len(store.sequences) - 1)].start]
    return some.float().pow(2).mean(-1).sqrt().median().item()


def load_weights(drafter: Any, folder: Path) -> None:
    """Start from the weights of a checkpoint of the same shape; DrafterError where they don't fit."""
    state = read_tensors(folder / "model.safetensors")
    if "draft_ids" in state:  # they belong to the weights: other answers have other frequent tokens
        drafter.draft_ids = state["draft_ids"].long()
    load_strictly(drafter, state, folder)


def draft_vocabulary(answers: list[dict[str, list[int]]], size: int | None) -> Tensor | None:
    """The `size` most frequent ids of the answers, ascending (int64 [W]); None means the whole vocabulary."""
    if size is None:
        return None
    counts = Counter(token for answer in answers for token in answer["response_ids"])
    return torch.tensor(sorted(token for token, _ in counts.most_common(size)))


class Trainer:
    """Weights, optimizer and position in the data of one run."""

    def __init__(self, drafter: Any, store: FeatureStore, config: DictConfig):
        self.drafter = drafter
        self.store = store
        self.config = config
        count = len(store.sequences)
        if not 1 <= config.held_out <= count - config.sequences_per_step:
            raise ConfigError(
                f"held_out={config.held_out} of {count} answers: keep at least one for evaluation and "
                f"{config.sequences_per_step} (sequences_per_step) for training"
            )
        self.held_out = range(count - config.held_out, count)
        self.step = 0
        self.seconds = 0.0
        matrices = [module.weight for module in drafter.modules() if isinstance(module, nn.Linear)]
        decayed = {id(weight) for weight in matrices if weight.requires_grad}
        trained = [p for p in drafter.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if id(p) in decayed], "weight_decay": config.weight_decay},
            {"params": [p for p in trained if id(p) not in decayed], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)
        self.trained = trained
        self.average = EMAModel(trained, decay=config.ema, use_ema_warmup=True, power=0.75) if config.ema else None
        self.column_of = columns_of(drafter)
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def learning_rate(self) -> float:
        """The rate of this step."""
        return learning_rate(self.config, self.step)

    def train_step(self) -> float:
        """One optimizer step; returns the mean loss of slot 1."""
        begun = time.perf_counter()
        batch, labels_RAn = self.examples(torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.step))
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss, first = self.loss(batch, labels_RAn)
        loss.backward()
        nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average:
            self.average.step(self.trained)
        self.step += 1
        self.seconds += time.perf_counter() - begun
        return first

    def examples(self, random: torch.Generator) -> tuple[TrainingBatch, Tensor]:
        """Blocks of this step and their labels [R, A, n]."""
        config, chosen = self.config, self._sequences_of_step()
        lengths = config.block_lengths
        slots = lengths[int(torch.randint(len(lengths), (1,), generator=random))]
        return blocks(self.store, chosen, config.slots_per_step // (len(chosen) * slots), slots, random)

    def loss(self, batch: TrainingBatch, labels_RAn: Tensor) -> tuple[Tensor, float]:
        """Weighted cross-entropy, and that of slot 1 alone."""
        with autocast(self.store.device, self.drafter.head.weight.dtype):
            logits = self.drafter.logits(self.drafter.forward_blocks(batch, labels_RAn.shape[2]))
        return faded_loss(logits, labels_RAn, self.column_of, self.config.gamma)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Acceptance on held-out answers, by the first candidate of each slot (top1) and by the best path (oracle).

        `*_length` is what decoding would see: rounds are walked through each answer, every one beginning where the one
        before ended. `*_block_length` averages over all anchors instead, and flatters: text that repeats itself has few
        rounds and many anchors. `*_accuracy` is of each slot by itself.
        """
        slots = self.drafter.block_size
        hits: dict[str, list[Tensor]] = defaultdict(list)
        rounds: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for start in range(0, len(self.held_out), 4):
            chosen = list(self.held_out[start : start + 4])
            sequences = [self.store.sequences[index] for index in chosen]
            batch, labels_RAn = whole_answers(self.store, chosen, slots)
            with autocast(self.store.device, self.drafter.head.weight.dtype):
                logits = self.drafter.logits(self.drafter.forward_blocks(batch, slots))
            for name, hit_RAn in self.hits(logits, labels_RAn).items():
                for row, sequence in enumerate(sequences):
                    answer = hit_RAn[row, : sequence.length - sequence.prompt - 1]
                    walked = walk_rounds(answer.long().cumprod(-1).sum(-1).tolist())
                    rounds[name], tokens[name] = rounds[name] + walked, tokens[name] + len(answer)
                hits[name].append(hit_RAn[(labels_RAn >= 0).all(-1)].float())
        figures: dict[str, Any] = {}
        for name, parts in hits.items():
            joined = torch.cat(parts)
            figures[f"{name}_length"] = round(tokens[name] / max(1, rounds[name]), 4)
            figures[f"{name}_block_length"] = round(1 + joined.cumprod(-1).sum(-1).mean().item(), 4)
            figures[f"{name}_accuracy"] = [round(value, 4) for value in joined.mean(0).tolist()]
        return figures

    def hits(self, logits: Tensor, labels_RAn: Tensor) -> dict[str, Tensor]:
        """Which slots a draft gets right, [R, A, n]."""
        best = logits.topk(min(self.drafter.config.candidates, logits.shape[-1])).indices
        hit_RAnK = self.drafter.draft_ids[best] == labels_RAn[..., None]
        return {"top1": hit_RAnK[..., 0], "oracle": hit_RAnK.any(-1)}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, the drafter's weights are their exponential moving average, where one is kept."""
        if self.average:
            self.average.store(self.trained)
            self.average.copy_to(self.trained)
        yield
        if self.average:
            self.average.restore(self.trained)

    def save(self, file: Path) -> None:
        """Write everything that an exact resume needs."""
        weights = {name: p for name, p in self.drafter.state_dict().items() if not name.startswith("head.")}
        state = {
            "weights": weights,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "average": self.average.state_dict() if self.average else None,
            "settings": shaping(self.config),
        }
        torch.save(state, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)

    def restore(self, file: Path) -> None:
        """Go on from a state, where there is one; ConfigError where it is of a run with other settings."""
        if file.exists():
            state = torch.load(file, weights_only=True, map_location=self.store.device)
            check_same_run(state, self.config, file)
            self.drafter.load_state_dict(state["weights"], strict=False)
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.seconds = state["step"], state["seconds"]
            if self.average and state.get("average"):
                self.average.load_state_dict(state["average"])

    def _sequences_of_step(self) -> list[int]:
        size = self.config.sequences_per_step
        training = len(self.store.sequences) - self.config.held_out
        epoch, position = divmod(self.step, training // size)
        if self._epoch[0] != epoch:
            lengths = [sequence.length for sequence in self.store.sequences[:training]]
            self._epoch = (epoch, batches_of_epoch(lengths, size, self.config.seed, epoch))
        return self._epoch[1][position % len(self._epoch[1])]


def columns_of(drafter: Any) -> Tensor:
    """From a token to its column in the draft vocabulary: int64 [V], IGNORED for ids that can't be drafted."""
    ids = drafter.draft_ids
    columns = torch.full((drafter.vocab_size,), IGNORED, device=ids.device)
    columns[ids] = torch.arange(len(ids), device=ids.device)
    return columns


def faded_loss(logits: Tensor, labels_RAn: Tensor, column_of: Tensor, gamma: float) -> tuple[Tensor, float]:
    """Cross-entropy of logits [R, A, n, W], weighted exp(-(t - 1) / gamma), and that of slot 1 alone."""
    slots = labels_RAn.shape[2]
    columns = torch.where(labels_RAn >= 0, column_of[labels_RAn.clamp(min=0)], IGNORED)
    losses = F.cross_entropy(logits.float().flatten(0, 2), columns.flatten(), ignore_index=IGNORED, reduction="none")
    losses = losses.view(-1, slots)
    fading = torch.exp(-torch.arange(slots, device=losses.device) / gamma)
    weights = fading * (columns.view(-1, slots) >= 0)
    return (losses * weights).sum() / weights.sum().clamp(min=1e-6), losses[:, 0].mean().item()


def blocks(
    store: FeatureStore, chosen: list[int], anchors: int, slots: int, random: torch.Generator
) -> tuple[TrainingBatch, Tensor]:
    """Random blocks in the answers of some sequences, and their labels [R, A, n] (-1 behind the end)."""
    anchors_RA = torch.stack([random_anchors(store.sequences[index], anchors, random) for index in chosen])
    return blocks_at(store, chosen, anchors_RA, slots)


def blocks_at(store: FeatureStore, chosen: list[int], anchors_RA: Tensor, slots: int) -> tuple[TrainingBatch, Tensor]:
    """The blocks of some sequences at given anchors (int64 [R, A]), and their labels [R, A, n] (-1 behind the end)."""
    sequences = [store.sequences[index] for index in chosen]
    batch = store.batch(chosen, anchors_RA)
    ahead_RAn = batch.anchors[..., None] + torch.arange(1, slots + 1, device=store.device)
    ends = torch.tensor([sequence.length for sequence in sequences], device=store.device)
    tokens = batch.ids.gather(1, ahead_RAn.clamp(max=batch.ids.shape[1] - 1).flatten(1)).view(ahead_RAn.shape)
    return batch, torch.where(ahead_RAn < ends[:, None, None], tokens, -1)


def whole_answers(store: FeatureStore, chosen: list[int], slots: int) -> tuple[TrainingBatch, Tensor]:
    """A block behind every token of the answers of some sequences, and their labels [R, A, n] (-1 behind the end)."""
    sequences = [store.sequences[index] for index in chosen]
    longest = max(sequence.length - sequence.prompt for sequence in sequences)
    every = [torch.arange(s.prompt, s.prompt + longest).clamp(max=s.length - 1) for s in sequences]
    return blocks_at(store, chosen, torch.stack(every), slots)


def walk_rounds(accepted: list[int]) -> int:
    """Rounds that decoding takes through an answer: `accepted[i]` draft tokens would be accepted with anchor i, and a
    round commits one token more."""
    rounds = position = 0
    while position < len(accepted):
        position += accepted[position] + 1
        rounds += 1
    return rounds


def random_anchors(sequence: Sequence_, count: int, random: torch.Generator) -> Tensor:
    """`count` anchors (int64) in an answer: from its first token to the last that has one behind it."""
    return torch.randint(sequence.prompt, max(sequence.prompt + 1, sequence.length - 1), (count,), generator=random)


if __name__ == "__main__":
    main()
