"""Ablations: searches find what they say, and what is left out stays out."""

from itertools import pairwise, product

import pytest
import torch
from omegaconf import OmegaConf

from dcoco.errors import ConfigError
from dcoco.walk import walk
from experiments.ablate import FULL, learnt, markdown, new_trainer, search, variants
from experiments.lattices import Blocks
from experiments.train_corrector import Trainer
from tests.dcoco.test_walk import CANDIDATES, HIDDEN, POSITIONS, ROWS, SLOTS, batch, lattice, scores
from tests.models import llama
from verifier.target import Target

CONFIG = OmegaConf.create(
    {"width": 6, "pair_width": 8, "steps": 4, "blocks_per_step": 8, "gamma": 4.0, "lr": 0.1, "weight_decay": 0.1}
    | {"seed": 0, "save_every": 1}
)


def test_a_search_of_one_path_is_the_walk():
    given, values = lattice(), scores()
    assert torch.equal(search(given, values, 1, merge=False), walk(given, values, batch(0.0), POSITIONS).tokens)


@pytest.mark.parametrize(("width", "merge"), [(CANDIDATES, True), (CANDIDATES**SLOTS, False)])
def test_viterbi_and_an_unlimited_beam_find_the_most_probable_path(width, merge):
    given, values = lattice(), scores()
    found = search(given, values, width, merge)
    first, rest = values.first.log_softmax(-1), values.rest.log_softmax(-1)
    for row in range(ROWS):

        def probability(path, row=row):
            return first[row, path[0]] + sum(rest[row, slot, i, j] for slot, (i, j) in enumerate(pairwise(path)))

        best = max(product(range(CANDIDATES), repeat=SLOTS), key=probability)
        assert found[row].tolist() == [given.ids[row, slot, k].item() for slot, k in enumerate(best)]


def test_variants_leave_out_what_they_name():
    torch.manual_seed(0)
    target, parts = Target(llama(hidden_size=HIDDEN), pack=False), lattice()
    labels = parts.ids[..., 1]
    training = Blocks(parts, labels, torch.full((ROWS,), 3), labels)
    losses = {}
    for name, options in variants(CANDIDATES).items():
        trainer = new_trainer(CONFIG, target, training, **options)
        for _ in range(CONFIG.steps):
            losses[name] = trainer.train_step()
        for layer in options.get("without", ()):
            assert not trainer.head.get_submodule(layer).weight.any()
        assert trainer.head.recalls == (name == "with recall")
        assert trainer.lengths([training])["selected"] >= 1
    assert (
        len({losses[name] for name in (FULL, "2 candidates", "pair scores only", "no pair state", "tokens only")}) == 5
    )


def test_what_counts_is_a_variants_best_also_after_a_stop(tmp_path, monkeypatch):
    target, parts = Target(llama(hidden_size=HIDDEN), pack=False), lattice()
    training = Blocks(parts, parts.ids[..., 1], torch.full((ROWS,), 3), parts.ids[..., 1])
    lengths = iter([1.5, 2.5, 2.0, 1.0])
    monkeypatch.setattr(Trainer, "lengths", lambda self, _: {"selected": next(lengths)})
    stopped, trainer = (new_trainer(CONFIG, target, training, candidates=CANDIDATES) for _ in range(2))
    stopped.config = OmegaConf.merge(CONFIG, {"steps": 2})
    learnt("a variant", stopped, [training], tmp_path)
    best = {name: weight.clone() for name, weight in stopped.head.state_dict().items()}
    assert learnt("a variant", trainer, [training], tmp_path)["selected"] == 2.5
    another = new_trainer(CONFIG, target, training, "another drafter", candidates=CANDIDATES)
    with pytest.raises(ConfigError, match="name another run"):
        learnt("a variant", another, [training], tmp_path)
    assert trainer.step == 4 and all(torch.equal(best[name], kept) for name, kept in trainer.head.state_dict().items())


def test_a_table_has_a_row_an_entry():
    table = markdown("rule", {"match": {"T = 0.7": 2.5}, "sampled": {"T = 0.7": 2.25, "T = 1": 2}})
    assert table.splitlines() == [
        "| rule | T = 0.7 | T = 1 |",
        "|---|---|---|",
        "| match | 2.5 |  |",
        "| sampled | 2.25 | 2 |",
    ]
