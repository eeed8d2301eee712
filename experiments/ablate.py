"""What each part of the contextual corrector is worth: train it without, and count.

    python -m experiments.ablate drafter=drafters/checkpoints/smollm2_135m

All variants learn from the same lattices, collected once, in the same order and for as many steps
(`experiments/train_corrector.py`), without recall unless they say so; what counts is the best that an evaluation saw. A
part is left out by weights that are zero and stay so. The figures are acceptance lengths of rounds walked through
held-out answers; `results.json` and `results.md` in the run's folder hold three tables, and a stopped run goes on:

- variants: candidates a slot, the unary score, the pair state, all but the tokens, recall.
- paths: how the full corrector's scores are searched: prefix by prefix (the walk), with a beam, or for the most
  probable whole path (Viterbi). Only the walk can be sampled from.
- sampling: the full corrector above temperature 0 by each rule, decoding the held-out answers' prompts.

With `cotrained=true` one more variant learns together with the drafter (`experiments/cotraining.py`), which takes
longer than all others; its `top1` says what the drafter itself has learnt from that.

Shapes: N blocks, n slots, K candidates, P paths kept.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from tqdm import tqdm

from dcoco import DCOCODecoder, SamplingParams
from dcoco.corrector import Corrector, CorrectorConfig, Scores
from dcoco.decoder import Rule
from dcoco.targets import load_target
from drafters.base import Lattice
from experiments.cotraining import CoTrainer
from experiments.environment import CONF, describe
from experiments.lattices import Blocks, collect
from experiments.precision import autocast
from experiments.settings import check_numbers
from experiments.train_corrector import Trainer, digest_of, load_frozen, train
from experiments.train_drafter import walk_rounds
from verifier.linear import pack_linears
from verifier.target import Target

BEAM = 4  # paths kept a slot
CANDIDATES = (2, 4, 8, 16, 32)
FULL = "full"


@hydra.main(version_base=None, config_path=CONF, config_name="ablate")
def main(config: DictConfig) -> None:
    check_numbers(config)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    model, tokenizer, _ = load_target(config.target, device=config.device)
    target = Target(model, pack=False)
    run = Path(config.run)
    run.mkdir(parents=True, exist_ok=True)
    drafter, store = load_frozen(config, target, tokenizer)
    shape, usual = drafter.config, drafter.config.candidates
    drafter.config = replace(shape, candidates=max(CANDIDATES))  # lattices as wide as the widest variant wants them
    training, held_out = collect(drafter, store, config)
    drafter.config = shape

    digest = digest_of(Path(config.drafter))
    tables: dict[str, dict[str, dict[str, float]]] = {"variants": {}, "paths": {}, "sampling": {}}
    for name, options in variants(usual).items():
        trainer = new_trainer(config, target, training, digest, **options)
        tables["variants"][name] = learnt(name, trainer, held_out, run)
        if name == FULL:
            full = trainer.head
            tables["paths"] = paths(full, held_out, target.embedding_weight(), usual)
    if config.cotrained:
        trainer = CoTrainer(target, Path(config.drafter), store, config)
        tables["variants"]["co-trained"] = learnt("co-trained", trainer, held_out, run)
    full.eval().requires_grad_(False).to(target.dtype)
    pack_linears(full)
    prompts = [store.ids[s.start : s.start + s.prompt].tolist() for s in store.sequences[-config.prompts :]]
    tables["sampling"] = sampling(target, tokenizer, drafter, full, prompts, config.max_tokens)
    results = {"tables": tables, "config": OmegaConf.to_container(config), **describe()}
    (run / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (run / "results.md").write_text("\n".join(markdown(name, table) for name, table in tables.items()))
    print((run / "results.md").read_text())


def learnt(name: str, trainer: Trainer, held_out: list[Blocks], run: Path) -> dict[str, float]:
    """Train a variant, or go on where that stopped; it is left as it was at its best, and the figures are of then."""
    folder = run / name.replace(" ", "_")
    folder.mkdir(exist_ok=True)
    tqdm.write(name)

    def keep(figures: dict[str, Any]) -> None:
        torch.save({"weights": trainer.head.state_dict(), "figures": figures}, folder / "best.pt")

    trainer.restore(folder / "state.pt")
    train(trainer, held_out, folder, keep)
    best = torch.load(folder / "best.pt", weights_only=True)
    trainer.head.load_state_dict(best["weights"])
    return best["figures"]


def variants(usual: int) -> dict[str, dict[str, Any]]:
    """What to train, by name; each is the full corrector but for what it names."""
    made: dict[str, dict[str, Any]] = {FULL: {}}
    made |= {f"{count} candidates": {"candidates": count} for count in CANDIDATES if count != usual}
    made["pair scores only"] = {"unary": False}
    made["no pair state"] = {"without": ("pair_state",)}
    made["tokens only"] = {"without": ("slot", "scalars")}
    made["with recall"] = {"recalls": True}
    return {name: {"candidates": usual} | options for name, options in made.items()}


def new_trainer(
    config: DictConfig,
    target: Target,
    training: Blocks,
    drafter_digest: str = "",
    without: tuple[str, ...] = (),
    recalls: bool = False,
    **options: Any,
) -> Trainer:
    """A trainer of a corrector in which the named layers' weights are zero and stay so."""
    torch.manual_seed(config.seed)
    corrector = Corrector(CorrectorConfig(target.hidden_size, config.width, config.pair_width)).to(target.device)
    corrector.recalls = recalls  # type: ignore[misc]
    for name in without:
        nn.init.zeros_(corrector.get_submodule(name).weight.requires_grad_(False))  # type: ignore[arg-type]
    return Trainer(corrector, training, target.embedding_weight(), config, drafter_digest, **options)


@torch.no_grad()
def paths(
    corrector: Corrector, answers: list[Blocks], embedding: Tensor, candidates: int
) -> dict[str, dict[str, float]]:
    """Acceptance lengths of the best paths, by how they are searched for."""
    searches = {"walk": 1, f"beam of {BEAM}": BEAM, "viterbi": candidates}
    rounds, tokens = dict.fromkeys(searches, 0), 0
    with autocast(embedding.device, embedding.dtype):
        table = corrector.token_table(embedding.float())
    for answer in answers:
        part = answer.select(slice(None), corrector.recalls, candidates)
        with autocast(embedding.device, embedding.dtype):
            scores = corrector(part.lattice, table, part.recalled)
        for name, width in searches.items():
            tokens_Nn = search(part.lattice, scores, width, merge=name == "viterbi")
            rounds[name] += walk_rounds((tokens_Nn == part.labels).long().cumprod(-1).sum(-1).tolist())
        tokens += len(answer)
    return {name: {"selected": round(tokens / max(1, count), 4)} for name, count in rounds.items()}


def search(lattice: Lattice, scores: Scores, width: int, merge: bool) -> Tensor:
    """The most probable path [N, n] that a search with so many paths finds; a path's probability is the product of
    softmax(S) along it. With `merge` only the best path to each candidate goes on, so K paths are all that are needed
    (Viterbi); a width of 1 is the greedy walk."""
    block = torch.arange(len(lattice.ids), device=lattice.ids.device)[:, None]
    rest_NnKK, candidates = scores.rest.log_softmax(-1), lattice.ids.shape[2]
    reach_NP, end_NP = scores.first.log_softmax(-1).topk(min(width, candidates))
    taken_NPn = end_NP[..., None]
    for slot in range(1, lattice.ids.shape[1]):
        onward_NPK = reach_NP[..., None] + rest_NnKK[block, slot - 1, end_NP]
        if merge:
            reach_NP, before_NP = onward_NPK.max(1)
            end_NP = torch.arange(candidates, device=block.device).expand_as(before_NP)
        else:
            reach_NP, flat_NP = onward_NPK.flatten(1).topk(min(width, onward_NPK[0].numel()))
            before_NP, end_NP = flat_NP // candidates, flat_NP % candidates
        taken_NPn = torch.cat([taken_NPn[block, before_NP], end_NP[..., None]], dim=-1)
    best_Nn = taken_NPn[block[:, 0], reach_NP.argmax(-1)]
    return lattice.ids.gather(2, best_Nn[..., None])[..., 0]


def sampling(
    target: Target, tokenizer: Any, drafter: Any, corrector: Corrector, prompts: list[list[int]], max_tokens: int
) -> dict[str, dict[str, float]]:
    """Acceptance lengths of walks above temperature 0, by rule and temperature."""
    found: dict[str, dict[str, float]] = {}
    for rule in get_args(Rule):
        decoder = DCOCODecoder(target, tokenizer, drafter, corrector, [tokenizer.eos_token_id], rule)
        found[rule] = {}
        for temperature in (0.7, 1.0):
            asked = [SamplingParams(max_tokens, temperature, seed=seed) for seed in range(len(prompts))]
            outputs = decoder.generate(prompts, asked, "walk", progress=True)
            committed = sum(output.stats.committed_tokens for output in outputs)
            rounds = sum(output.stats.rounds for output in outputs)
            found[rule][f"T = {temperature}"] = round(committed / max(1, rounds), 4)
    return found


def markdown(name: str, table: dict[str, dict[str, float]]) -> str:
    """One table, a row an entry."""
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    lines = [f"| {name} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    lines += [f"| {key} | {' | '.join(str(row.get(column, '')) for column in columns)} |" for key, row in table.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
