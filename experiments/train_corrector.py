"""Train the contextual corrector of a drafter on the target's own answers; the drafter is frozen.

    python -m experiments.train_corrector drafter=runs/smollm2_135m_drafter/checkpoint

The answers should be ones that the drafter was not trained on: on its own training answers it is surer than it will be
in use. The lattices of many random blocks, with what the text recalls, are computed once and kept in memory, as the
drafter costs far more than the corrector.
Each slot is scored after its true predecessor (teacher forcing); the loss is the cross-entropy over the K candidates,
wherever the truth is among the candidates of this slot and of all before it, weighted exp(-(t - 1) / gamma). Four
lengths are logged, of rounds walked through held-out answers: `selected` (the corrected walk), `tree` (the corrected
tree), `top1` (the plain drafter) and `oracle` (the best path there is).

Shapes: N blocks, n slots, K candidates, H hidden size.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from tqdm import tqdm

from dcoco.corrector import Corrector, CorrectorConfig, Scores, with_anchor
from dcoco.decoder import TREE_SIZE
from dcoco.recall import Recalled, recall
from dcoco.registry import save_corrector
from dcoco.targets import load_target
from dcoco.tree import grow
from dcoco.walk import walk
from drafters.base import Lattice, TrainingBatch
from drafters.registry import load_drafter
from experiments.environment import CONF, describe
from experiments.features import FeatureStore, build, read_answers
from experiments.train_drafter import blocks, blocks_at, walk_rounds
from verifier.errors import ConfigError
from verifier.rejection import verify_tree
from verifier.sampling import SamplingBatch, SamplingParams
from verifier.target import Target


@dataclass
class Blocks:
    """Lattices of N blocks and the tokens [N, n] that really followed (-1 behind the end of an answer)."""

    lattice: Lattice
    recalled: Recalled
    labels: Tensor

    def select(self, index: Tensor) -> "Blocks":
        """Some of the blocks, in float32."""
        parts = self.lattice
        chosen = (parts.anchors[index], parts.anchor_hidden[index].float(), parts.ids[index].long())
        lattice = Lattice(*chosen, parts.log_probs[index], parts.hidden[index].float())
        recalled = Recalled(*(value[index] for value in vars(self.recalled).values()))
        return Blocks(lattice, recalled, self.labels[index])


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
def collect(drafter: Any, store: FeatureStore, config: DictConfig) -> tuple[Blocks, list[Blocks]]:
    """Lattices of `config.blocks` random blocks of the training answers, and of each held-out answer those of all its
    anchors in order."""
    count = len(store.sequences)
    training: list[Blocks] = []
    held_out: list[Blocks] = []
    for index in tqdm(range(count - config.held_out, count), desc="held out", unit="answer"):
        sequence = store.sequences[index]
        every = torch.arange(sequence.prompt, sequence.length - 1)[None]
        held_out.append(lattices(drafter, *blocks_at(store, [index], every, drafter.block_size)))
    done, random = 0, torch.Generator().manual_seed(config.seed)
    order = torch.randperm(count - config.held_out, generator=random).tolist()
    groups = [sorted(order[i : i + 8]) for i in range(0, len(order) - 7, 8)]
    with tqdm(total=config.blocks, desc="lattices", unit="block") as bar:
        for chosen in groups * config.passes:
            if done >= config.blocks:
                break
            found = lattices(drafter, *blocks(store, chosen, 32, drafter.block_size, random))
            training.append(found)
            done += len(found.labels)
            bar.update(len(found.labels))
    return _join(training), held_out


def lattices(drafter: Any, batch: TrainingBatch, labels_RAn: Tensor) -> Blocks:
    """The lattices of a batch of blocks, with what each block's text recalls; blocks without a label are left out."""
    lattice, labels = drafter.lattice_of_blocks(batch), labels_RAn.flatten(0, 1)
    keep = (labels[:, 0] >= 0).nonzero().squeeze(1)
    fields = (lattice.anchors, lattice.anchor_hidden, lattice.ids, lattice.log_probs, lattice.hidden)
    texts = batch.ids[keep // batch.anchors.shape[1]]
    lattice, recalled = recall(Lattice(*(value[keep] for value in fields)), texts, batch.anchors.flatten()[keep])
    return Blocks(replace(lattice, ids=lattice.ids.int()), recalled, labels[keep])


def _join(parts: list[Blocks]) -> Blocks:
    names = ("anchors", "anchor_hidden", "ids", "log_probs", "hidden")
    lattice = Lattice(*(torch.cat([getattr(part.lattice, name) for part in parts]) for name in names))
    recalled = Recalled(
        *(torch.cat([getattr(part.recalled, name) for part in parts]) for name in ("column", "matched", "beyond"))
    )
    return Blocks(lattice, recalled, torch.cat([part.labels for part in parts]))


def teacher_forced_loss(corrector: Corrector, blocks: Blocks, embedding: Tensor, gamma: float) -> Tensor:
    """Weighted cross-entropy of the true candidate after its true predecessor; `embedding` [V, H] is the target's."""
    lattice, labels_Nn = blocks.lattice, blocks.labels
    is_truth = lattice.ids == labels_Nn[..., None]
    reachable = is_truth.any(-1).long().cumprod(-1).bool()  # the truth is on the lattice, here and at all slots before
    truth_Nn = is_truth.long().argmax(-1)
    used, column_NmK = torch.unique(with_anchor(lattice), return_inverse=True)  # each token projected once
    tokens_NmKD = F.embedding(column_NmK, corrector.token_table(embedding[used].float()))
    candidates_NmKD, states_NnM = corrector.represent(lattice, tokens_NmKD)
    index = F.pad(truth_Nn[:, :-1], (1, 0))[:, :, None, None].expand(-1, -1, 1, candidates_NmKD.shape[-1])
    before_NnD = candidates_NmKD[:, :-1].gather(2, index).squeeze(2)
    # From here on only the slots that count: S of them.
    before_SM, _ = corrector.pair_both(before_NnD[reachable]).chunk(2, dim=-1)
    _, after_SKM = corrector.pair_both(candidates_NmKD[:, 1:][reachable]).chunk(2, dim=-1)
    after_SKM = after_SKM + states_NnM[reachable][:, None]
    # The recalled candidate, where the truth has followed what was recalled so far.
    column_Nn, followed_Nn = blocks.recalled.column, torch.ones_like(reachable)
    followed_Nn[:, 1:] = truth_Nn[:, :-1] == column_Nn[:, :-1]
    matched_S = (blocks.recalled.matched * followed_Nn)[reachable]
    candidate_K = torch.arange(lattice.ids.shape[2], device=matched_S.device)
    is_it_SK1 = (candidate_K == column_Nn[reachable][:, None])[..., None]
    after_SKM = after_SKM + is_it_SK1 * corrector.pair_recalled(matched_S)[:, None]
    scores_SK = lattice.log_probs[reachable] + corrector.pair(before_SM[:, None] + after_SKM)
    losses = F.cross_entropy(scores_SK, truth_Nn[reachable], reduction="none")
    fading = torch.exp(-torch.arange(labels_Nn.shape[1], device=labels_Nn.device) / gamma)
    weights = fading.expand(labels_Nn.shape)[reachable]
    return (losses * weights).sum() / weights.sum().clamp(min=1e-6)


@torch.no_grad()
def lengths(corrector: Corrector, answers: list[Blocks], embedding: Tensor) -> dict[str, float]:
    """Mean acceptance lengths of rounds walked through answers: the corrected walk, the corrected tree, the plain
    drafter, the lattice's best path."""
    rounds, tokens = dict.fromkeys(("selected", "tree", "top1", "oracle"), 0), 0
    device = embedding.device
    with torch.autocast(device.type, torch.bfloat16):
        table = corrector.token_table(embedding.float())
    for answer in answers:
        part = answer.select(torch.arange(len(answer.labels)))
        lattice, labels = part.lattice, part.labels
        greedy = SamplingBatch.stack([SamplingParams()] * len(labels), [0] * len(labels), device)
        with torch.autocast(device.type, torch.bfloat16):
            scores: Scores = corrector(lattice, table, part.recalled)
        unlimited = torch.full_like(lattice.anchors, labels.shape[1])
        draft = grow(lattice, scores, greedy, labels, unlimited, TREE_SIZE)
        assert draft.tree is not None
        truth = F.pad(labels, (0, 1), value=-1).gather(1, draft.tree.depths)
        accepted = {"tree": verify_tree(truth, draft.tokens, draft.tree, labels.shape[1]).accepted}
        hits = {
            "selected": walk(lattice, scores, greedy, labels).tokens == labels,
            "top1": lattice.ids[..., 0] == labels,
            "oracle": (lattice.ids == labels[..., None]).any(-1),
        }
        accepted |= {name: hit.long().cumprod(-1).sum(-1) for name, hit in hits.items()}
        for name, counts in accepted.items():
            rounds[name] += walk_rounds(counts.tolist())
        tokens += len(labels)
    return {name: round(tokens / max(1, count), 4) for name, count in rounds.items()}


if __name__ == "__main__":
    main()
