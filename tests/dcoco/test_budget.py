"""The verification budget: it buys what brute force would buy, learns from what is accepted, never changes a text."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from dcoco import SamplingParams
from dcoco import costs as costs_module
from dcoco.budget import LATER, PROBE, Budget
from dcoco.costs import Costs, find_costs
from drafters.base import Draft
from tests.models import prompts, tiny_decoder
from verifier.tree import Tree

BLOCK, MOST = 8, 12
EVEN, RAGGED = [[10.0, 11.0, 14.0], [20.0, 26.0, 40.0]], [[10.0, 10.25, 11.0, 14.0], [20.0, 24.0, 29.0, 43.0]]
COSTS = Costs([1, 4], [[1, 2, 4]] * 2, EVEN, RAGGED, slots=[2, 8], draft=[[2, 3], [4, 8]])


def machine(a_pass, of_two, a_draft):
    """Costs of one row whose passes of one and two tokens take so long."""
    return Costs([1], [[1, 2]], [[a_pass, of_two]], [[a_pass, (3 * a_pass + of_two) / 4, of_two]], [1], [[a_draft]])


FREE = machine(10.0, 10.0, 0.1)  # a token more to verify costs nothing
DEAR = machine(10.0, 20.0, 5.0)  # it costs a whole pass


def budget(costs=COSTS):
    return Budget(costs, BLOCK, MOST)


def chain(*rows):
    """A draft whose paths have these probabilities, token by token."""
    p = torch.tensor(rows)
    return Draft(torch.zeros(p.shape, dtype=torch.int64), log_probs=p.log())


def test_costs_are_what_was_measured_and_go_on_in_between():
    assert COSTS.of_even(4, np.array([4, 8, 16])).tolist() == [20.0, 26.0, 40.0]
    assert COSTS.of_ragged(4, np.array([4, 5, 8, 16])).tolist() == [20.0, 24.0, 29.0, 43.0]
    assert COSTS.of_even(1, np.array([1, 3, 6])).tolist() == [10.0, 12.5, 17.0]
    assert COSTS.of_even(2, np.array([2]))[0] == pytest.approx(10 + 10 / 3)
    assert COSTS.of_even(7, np.array([7]))[0] == pytest.approx(30.0)  # beyond the rows measured
    assert COSTS.of_draft(4, 8) == 8
    assert COSTS.of_draft(4, 4) == pytest.approx(4 + 4 / 3)


def test_what_is_bought_is_the_best_that_any_choice_could_buy():
    random = np.random.default_rng(0)
    for _ in range(40):
        p = -np.sort(-random.random((3, 3)), axis=1)
        counts = budget().spend(chain(*p.tolist()), torch.full((3,), MOST), 8)

        def rate(counts, p=p):
            gained = 3 + sum(p[row, :count].sum() for row, count in enumerate(counts))
            even = len(set(counts)) == 1
            cost = (COSTS.of_even if even else COSTS.of_ragged)(3, np.array([3 + sum(counts)]))[0]
            return gained / (cost + COSTS.of_draft(3, 8)) / (1.0 if even else LATER)

        best = max(product(range(4), repeat=3), key=rate)
        assert rate(counts) == pytest.approx(rate(best), rel=1e-6)


def test_what_calibration_makes_equal_is_bought_in_its_order():
    chooser = budget(Costs([3], [[1, 2, 3]], [[10.0, 50.0, 100.0]], [[10.0, 10.03, 10.1, 100.0]], [8], [[1.0]]))
    # The surer a draft, the less comes true: calibration takes all for equal.
    chooser._tried[:], chooser._accepted[:] = 1e6, np.linspace(9e5, 1e5, chooser._tried.shape[2])
    chooser._fit()
    draft = chain([0.9, 0.8, 0.7], [0.6, 0.5, 0.4], [0.3, 0.2, 0.1])
    assert chooser.spend(draft, torch.full((3,), MOST), 8) == [3, 0, 0]


@pytest.mark.parametrize("drift", [(1.0, 1.0), (1.0, 0.9), (0.9, 1.0)])
def test_nothing_is_bought_where_nothing_pays(drift):
    dear = [[10.0, 20.0, 40.0], [40.0, 80.0, 160.0]]
    chooser = budget(replace(COSTS, even=dear, ragged=[[10.0, 13.0, 20.0, 40.0], [40.0, 50.0, 80.0, 160.0]]))
    chooser._drift[:, 1:] = np.array(drift)[:, None]
    draft = chain([0.2, 0.1], [0.1, 0.01], [0.3, 0.1])
    assert chooser.spend(draft, torch.full((3,), MOST), 8) == [0, 0, 0]


def test_no_draft_goes_beyond_its_limit():
    counts = budget(FREE).spend(chain([0.9, 0.8, 0.7], [0.9, 0.8, 0.7]), torch.tensor([2, 0]), 8)
    assert counts == [2, 0]


def test_a_tree_is_cut_by_probability_and_limited_by_depth():
    parents = torch.tensor([[0, 0, 1, 3]])
    tree = Tree.build(parents, torch.ones(1, 4, dtype=torch.bool), 3)
    draft = Draft(torch.arange(4)[None], log_probs=torch.tensor([[0.8, 0.7, 0.6, 0.5]]).log(), tree=tree)
    assert budget(FREE).spend(draft, torch.tensor([3]), 8) == [4]
    assert budget(FREE).spend(draft, torch.tensor([2]), 8) == [3]
    assert budget(DEAR).spend(draft, torch.tensor([3]), 8) == [1]
    first = draft.first([3])
    assert first.tree.valid.tolist() == [[True] * 3]
    assert torch.equal(first.tree.depths, tree.depths[:, :4])


NOTHING = Draft(torch.empty(1, 0, dtype=torch.int64), log_probs=torch.empty(1, 0))


def drafted(chooser, p, accepted, rounds):
    """Rounds of one row whose drafts promise p a token; returns the slots that they drafted."""
    found = []
    for _ in range(rounds):
        slots = chooser.slots(NOTHING, torch.tensor([MOST]))
        found.append(slots)
        if not slots:
            continue
        counts = chooser.spend(chain([p**depth for depth in range(1, slots + 1)]), torch.tensor([MOST]), slots)
        chooser.learn(slots, counts, [list(range(min(accepted, counts[0])))], 10.0)
    return found


def test_a_machine_with_time_to_spare_drafts_whole_blocks_and_a_busy_one_none():
    assert set(drafted(budget(FREE), 0.9, 8, 100)) == {BLOCK}
    found = drafted(budget(DEAR), 0.6, 1, 4 * PROBE)
    assert found[:1] == [BLOCK]
    assert found.count(0) >= 4 * PROBE - 5  # but for a probe now and then
    assert found.count(BLOCK) > 1


def test_what_the_text_recalls_is_verified_where_drafting_does_not_pay():
    chooser, limits = budget(machine(10.0, 12.0, 9.0)), torch.tensor([MOST])
    drafted(chooser, 0.5, 1, 5)
    sure, unsure = chain([0.9, 0.85, 0.8]), chain([0.1, 0.05, 0.01])
    assert chooser.slots(sure, limits) == chooser.slots(unsure, limits) == 0
    assert chooser.spend(unsure, limits, 0) == [0]
    assert chooser.spend(sure, limits, 0) == [3]
    assert chooser.spend(sure, torch.tensor([2]), 0) == [2]


def test_what_is_recalled_wins_over_drafting_only_where_it_is_surer():
    chooser, limits = budget(machine(10.0, 11.0, 3.0)), torch.tensor([MOST])
    drafted(chooser, 0.9, 8, 20)
    sure, unsure = chain([0.97**depth for depth in range(1, MOST)]), chain([0.3, 0.1])
    assert chooser.slots(sure, limits) == 0
    assert chooser.slots(unsure, limits) == BLOCK


ONE = np.array([1])


def test_what_is_recalled_is_calibrated_apart():
    chooser = budget(FREE)
    for _ in range(100):
        chooser.spend(chain([0.85]), torch.tensor([MOST]), 0)
        chooser.learn(0, [1], [[]], 10.0)
    assert chooser.calibrate(np.array([0.85]), ONE, 0) < 0.3 and chooser.calibrate(np.array([0.85]), ONE, 1) > 0.7


def test_deep_tokens_are_calibrated_apart():
    chooser, draft = budget(FREE), chain([0.9, 0.88, 0.87, 0.86, 0.85, 0.84, 0.83])
    for _ in range(300):
        chooser.spend(draft, torch.tensor([MOST]), 8)
        chooser.learn(8, [7], [list(range(5))], 10.0)  # whatever is said, five tokens come true
    p = chooser.calibrate(np.array([0.85] * 3), np.array([1, 4, 6]), 1)
    assert p[0] > 0.9 and p[1] > 0.9 and p[2] < 0.3


def test_drafting_comes_back_when_it_pays_again():
    chooser = budget(machine(10.0, 15.0, 2.0))
    assert drafted(chooser, 0.1, 0, 3 * PROBE - 1)[-2:] == [0, 0]
    assert drafted(chooser, 0.97, 8, 6 * PROBE)[-2:] == [BLOCK, BLOCK]


def test_probabilities_are_calibrated_by_what_is_accepted():
    chooser = budget(FREE)
    random = torch.Generator().manual_seed(0)
    for _ in range(600):
        counts = chooser.spend(chain([0.85, 0.3]), torch.tensor([MOST]), 8)
        kept = torch.rand(2, generator=random) < torch.tensor([0.4, 0.5])  # of 0.85 only 0.4 come true
        chooser.learn(8, counts, [list(range(int(kept.int().cumprod(0).sum())))], 10.0)
    sure, unsure = chooser.calibrate(np.array([0.85, 0.3]), np.array([1, 2]), 1)
    assert sure == pytest.approx(0.4, abs=0.1) and unsure == pytest.approx(0.2, abs=0.1)
    grid = chooser.calibrate(np.linspace(0, 1, 50), np.ones(50), 1)
    assert (np.diff(grid) >= 0).all() and grid[0] == 0


def test_a_tree_is_calibrated_by_the_nodes_that_were_accepted():
    """Of two siblings the less probable one comes true, again and again."""
    tree = Tree.build(torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.bool), 1)
    draft = Draft(torch.tensor([[4, 5]]), log_probs=torch.tensor([[0.7, 0.3]]).log(), tree=tree)
    chooser = budget(FREE)
    for _ in range(300):
        assert chooser.spend(draft, torch.tensor([1]), 8) == [2]
        chooser.learn(8, [2], [[1]], 10.0)
    assert chooser._tried[1, 0, 3] == chooser._accepted[1, 0, 3] > 40  # the class of 0.3
    assert chooser._tried[1, 0, 6] > 40 > chooser._accepted[1, 0, 6] == 0


def test_a_slow_round_is_learnt_and_a_hiccup_is_not():
    chooser = budget(FREE)
    for _ in range(50):
        chooser.learn(0, [0], [[]], 12.0)
    chooser.learn(0, [0], [[]], 900.0)
    assert chooser._drift[0, 0] == pytest.approx(1.2, abs=0.01)


def test_a_kind_of_round_that_proves_slow_is_left_and_tried_again():
    chooser, found = budget(replace(COSTS, ragged=[[10.0, 10.25, 11.0, 14.0], [20.0, 21.5, 26.0, 40.0]])), []
    draft = chain([0.9, 0.9, 0.9, 0.9], [0.9, 0.1, 0.1, 0.1], [0.9, 0.1, 0.1, 0.1], [0.9, 0.1, 0.1, 0.1])
    for _ in range(120):
        counts = chooser.spend(draft, torch.full((4,), MOST), 8)
        even = len(set(counts)) == 1
        found.append(even)
        seconds = COSTS.of_even(4, np.array([4 + sum(counts)]))[0] + COSTS.of_draft(4, 8)
        said = [[0] * (count > 0) for count in counts]  # the first of each row is accepted
        chooser.learn(8, counts, said, seconds if even else 1.5 * seconds)
    assert not found[0] and found.count(True) > 90
    chooser._rounds += 400  # even ones only
    chooser._ran[0] = chooser._rounds
    assert len(set(chooser.spend(draft, torch.full((4,), MOST), 8))) > 1


def test_costs_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("DCOCO_CACHE", str(tmp_path))
    monkeypatch.setattr(costs_module, "ROWS", (1, 2))
    decoder = tiny_decoder(max_rows=3)
    found = find_costs(decoder, "dcoco", 3)
    assert found.rows == [1, 2, 3] and found.slots == [1, 2, 4]
    assert [len(curve) for curve in found.even] == [len(points) for points in found.tokens]
    assert [len(curve) for curve in found.ragged] == [len(points) + 1 for points in found.tokens]
    assert np.array(found.draft).shape == (3, 3)
    monkeypatch.setattr(costs_module, "measure_passes", None)
    other = find_costs(decoder, "top1", 3)  # which drafts in another way, for the same target
    assert (other.rows, other.tokens, other.even, other.ragged) == (found.rows, found.tokens, found.even, found.ragged)
    monkeypatch.setattr(costs_module, "measure_drafts", None)
    assert find_costs(decoder, "dcoco", 3) == found
    for file in (tmp_path / "costs").iterdir():
        file.write_text("{}")
    with pytest.raises(TypeError):  # an unreadable file is measured again
        find_costs(decoder, "dcoco", 3)


@pytest.mark.parametrize("costs", [FREE, DEAR, COSTS, replace(COSTS, ragged=[[10, 10, 11, 14], [18, 18, 19, 23]])])
@pytest.mark.parametrize("method", ["dcoco", "walk", "top1"])
def test_the_text_is_the_targets_whatever_is_bought(costs, method):
    decoder = tiny_decoder("gemma3", max_rows=5)
    each = [SamplingParams(max_tokens=24, seed=seed, temperature=0.8 * (seed % 2)) for seed in range(12)]
    plain = decoder.generate(prompts(12, seed=3), each, "plain")
    decoder.adaptive = True
    decoder._budgets[method] = Budget(costs, decoder.drafter.block_size, decoder.reach(method))
    outputs = decoder.generate(prompts(12, seed=3), each, method)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert sum(output.stats.draft_tokens for output in outputs) > 0
