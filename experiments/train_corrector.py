"""Train the contextual corrector of a drafter on the target's own answers; the drafter is frozen.

    python -m experiments.train_corrector drafter=runs/smollm2_135m_drafter/checkpoint

The answers should be ones that the drafter was not trained on: on its own training answers it is surer than it will be
in use. The lattices of many random blocks are computed once and kept in memory, as the drafter costs far more than the
corrector.
Each slot is scored after its true predecessor (teacher forcing); the loss is the cross-entropy over the K candidates,
wherever the truth is among the candidates of this slot and of all before it, weighted exp(-(t - 1) / gamma). Three
lengths are logged: `selected` (the corrected walk), `top1` (the plain drafter) and `oracle` (the best path there is).

Shapes: N blocks, n slots, K candidates, H hidden size.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from tqdm import tqdm

from dcoco.corrector import Corrector, CorrectorConfig, Scores, save_corrector
from dcoco.targets import load_target
from dcoco.walk import walk
from drafters.base import Lattice
from drafters.registry import load_drafter
from experiments.environment import CONF, describe
from experiments.features import FeatureStore, build, read_answers
from experiments.train_drafter import blocks
from verifier.errors import ConfigError
from verifier.sampling import SamplingBatch, SamplingParams
from verifier.target import Target


@dataclass
class Blocks:
    """Lattices of N blocks and the tokens [N, n] that really followed (-1 behind the end of an answer)."""

    lattice: Lattice
    labels: Tensor

    def select(self, index: Tensor) -> "Blocks":
        """Some of the blocks, in float32."""
        parts = self.lattice
        chosen = (parts.anchors[index], parts.anchor_hidden[index].float(), parts.ids[index].long())
        return Blocks(Lattice(*chosen, parts.log_probs[index], parts.hidden[index].float()), self.labels[index])


@hydra.main(version_base=None, config_path=CONF, config_name="train_corrector")
def main(config: DictConfig) -> None:
    torch.set_num_threads(config.threads or torch.get_num_threads())
    model, tokenizer, _ = load_target(config.target, dtype="bfloat16", device=config.device)
    target = Target(model, pack=False)
    folder, run = Path(config.drafter), Path(config.run)
    run.mkdir(parents=True, exist_ok=True)
    drafter = load_drafter(folder, target, tokenizer)
    layers = getattr(drafter.config, "target_layers", ())  # DFlash keeps keys and values of its own
    answers = read_answers(Path(config.answers), config.limit, config.skip)
    build(Path(config.features), target, answers, drafter.taps, layers)
    store = FeatureStore(Path(config.features), drafter.taps, layers, target.device)
    training, held_out = collect(drafter, store, config)

    embedding = target.embedding_weight()
    torch.manual_seed(config.seed)
    corrector = Corrector(CorrectorConfig(target.hidden_size, config.width, config.pair_width)).to(target.device)
    optimizer = torch.optim.AdamW(corrector.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True)
    step, state_file = 0, run / "state.pt"
    drafter_digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        if state["drafter"] != drafter_digest:
            raise ConfigError(f"{run} holds the corrector of another drafter than {folder}: name another run")
        corrector.load_state_dict(state["weights"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    with tqdm(total=config.steps, initial=step, desc="train", unit="step") as bar:
        while step < config.steps:
            random = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
            index = torch.randint(len(training.labels), (config.blocks_per_step,), generator=random)
            for group in optimizer.param_groups:
                group["lr"] = config.lr * min(1.0, (step + 1) / 50, (config.steps - step) / (0.5 * config.steps))
            with torch.autocast(target.device.type, torch.bfloat16):
                loss = teacher_forced_loss(corrector, training.select(index), embedding, config.gamma)
            loss.backward()
            nn.utils.clip_grad_norm_(corrector.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            bar.update()
            bar.set_postfix(loss=f"{loss.item():.3f}")
            if step % config.save_every == 0 or step == config.steps:
                figures = lengths(corrector, held_out, embedding)
                tqdm.write(json.dumps({"step": step, "loss": round(loss.item(), 4), **figures}))
                with (run / "log.jsonl").open("a") as file:
                    file.write(json.dumps({"step": step, "loss": loss.item(), **figures}) + "\n")
                state = {"weights": corrector.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                state["drafter"] = drafter_digest
                torch.save(state, state_file.with_suffix(".tmp"))
                state_file.with_suffix(".tmp").replace(state_file)
    checkpoint = run / "checkpoint"
    shutil.copytree(folder, checkpoint, dirs_exist_ok=True)
    recipe = {"config": OmegaConf.to_container(config), "figures": lengths(corrector, held_out, embedding)}
    save_corrector(checkpoint, corrector, recipe | describe())


@torch.inference_mode()
def collect(drafter: Any, store: FeatureStore, config: DictConfig) -> tuple[Blocks, Blocks]:
    """Lattices of random blocks: `config.blocks` of the training answers, and those of the held-out answers."""
    count = len(store.sequences)
    parts: dict[bool, list[Blocks]] = {False: [], True: []}
    done, random = 0, torch.Generator().manual_seed(config.seed)
    order = torch.randperm(count - config.held_out, generator=random).tolist()
    groups = [sorted(order[i : i + 8]) for i in range(0, len(order) - 7, 8)]
    evaluation = [list(range(i, min(i + 8, count))) for i in range(count - config.held_out, count, 8)]
    with tqdm(total=config.blocks, desc="lattices", unit="block") as bar:
        for held_out, chosen in [(True, group) for group in evaluation] + [(False, g) for g in groups * config.passes]:
            if done >= config.blocks:
                break
            batch, labels_RAn = blocks(store, chosen, 32, drafter.block_size, random)
            lattice, labels = drafter.lattice_of_blocks(batch), labels_RAn.flatten(0, 1)
            keep = labels[:, 0] >= 0
            fields = (lattice.anchors, lattice.anchor_hidden, lattice.ids.int(), lattice.log_probs, lattice.hidden)
            parts[held_out].append(Blocks(Lattice(*(value[keep] for value in fields)), labels[keep]))
            if not held_out:
                done += int(keep.sum())
                bar.update(int(keep.sum()))
    return _join(parts[False]), _join(parts[True])


def _join(parts: list[Blocks]) -> Blocks:
    names = ("anchors", "anchor_hidden", "ids", "log_probs", "hidden")
    lattice = Lattice(*(torch.cat([getattr(part.lattice, name) for part in parts]) for name in names))
    return Blocks(lattice, torch.cat([part.labels for part in parts]))


def teacher_forced_loss(corrector: Corrector, blocks: Blocks, embedding: Tensor, gamma: float) -> Tensor:
    """Weighted cross-entropy of the true candidate after its true predecessor; `embedding` [V, H] is the target's."""
    lattice, labels_Nn = blocks.lattice, blocks.labels
    is_truth = lattice.ids == labels_Nn[..., None]
    reachable = is_truth.any(-1).long().cumprod(-1).bool()  # the truth is on the lattice, here and at all slots before
    truth_Nn = is_truth.long().argmax(-1)
    used, column = torch.unique(torch.cat([lattice.anchors, lattice.ids.flatten()]), return_inverse=True)
    table, count = corrector.token_table(embedding[used].float()), len(lattice.anchors)  # each token projected once
    anchor_column, column = column[:count, None], column[count:].view(lattice.ids.shape)
    anchor_ND, others_NnKD, states_NnM = corrector.represent(
        lattice, lambda ids: F.embedding(anchor_column if ids.ndim == 2 else column, table)
    )
    index = truth_Nn[:, :-1, None, None].expand(-1, -1, 1, others_NnKD.shape[-1])
    before_NnD = torch.cat([anchor_ND[:, None], others_NnKD[:, :-1].gather(2, index).squeeze(2)], dim=1)
    # From here on only the slots that count: S of them.
    before_SM = corrector.pair_before(before_NnD[reachable])
    after_SKM = corrector.pair_after(others_NnKD[reachable]) + states_NnM[reachable][:, None]
    scores_SK = lattice.log_probs[reachable] + corrector.pair(before_SM[:, None] + after_SKM)
    losses = F.cross_entropy(scores_SK, truth_Nn[reachable], reduction="none")
    fading = torch.exp(-torch.arange(labels_Nn.shape[1], device=labels_Nn.device) / gamma)
    weights = fading.expand(labels_Nn.shape)[reachable]
    return (losses * weights).sum() / weights.sum().clamp(min=1e-6)


@torch.no_grad()
def lengths(corrector: Corrector, blocks: Blocks, embedding: Tensor) -> dict[str, float]:
    """Mean acceptance lengths over whole blocks: the corrected walk, the plain drafter, the lattice's best path."""
    found: dict[str, list[Tensor]] = {"selected": [], "top1": [], "oracle": []}
    device = blocks.labels.device
    with torch.autocast(device.type, torch.bfloat16):
        table = corrector.token_table(embedding.float())
    whole = (blocks.labels >= 0).all(-1).nonzero().squeeze(1)
    for index in whole.split(256):
        part = blocks.select(index)
        lattice, labels = part.lattice, part.labels
        greedy = SamplingBatch.stack([SamplingParams()] * len(index), [0] * len(index), device)
        with torch.autocast(device.type, torch.bfloat16):
            scores: Scores = corrector(lattice, table)
        hits = {
            "selected": walk(lattice, scores, greedy, lattice.ids[..., 0]).tokens == labels,
            "top1": lattice.ids[..., 0] == labels,
            "oracle": (lattice.ids == labels[..., None]).any(-1),
        }
        for name, hit in hits.items():
            found[name].append(1 + hit.long().cumprod(-1).sum(-1).float())
    return {name: round(torch.cat(values).mean().item(), 4) for name, values in found.items()}


if __name__ == "__main__":
    main()
