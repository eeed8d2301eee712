"""Draft lengths that are chosen by what came of earlier rounds."""

import pytest
import torch

from dcoco.costs import Costs
from dcoco.lengths import PROBE, Lengths
from drafters.base import Draft
from tests.models import costs_of

BLOCK = 4
NOTHING = Draft(torch.zeros(1, 0, dtype=torch.int64))


def after(chooser, accepted, rounds=60, limit=BLOCK):
    """What is drafted once so many rounds each accepted what was drafted, but no more than `accepted`."""
    slots = 0
    for _ in range(rounds):
        slots = chooser.slots(NOTHING, torch.tensor([limit]))
        counts = chooser.spend(NOTHING, torch.tensor([limit]), slots)
        chooser.learn(slots, counts, [list(range(min(accepted, counts[0])))], 1.0)
    return slots


@pytest.mark.parametrize("accepted", range(BLOCK + 1))
def test_drafts_become_as_long_as_what_is_accepted(accepted):
    assert after(Lengths(costs_of(0.1), BLOCK), accepted) == accepted


def test_what_costs_a_pass_is_not_drafted():
    assert after(Lengths(costs_of(1.0), BLOCK), BLOCK) == 0


def test_what_was_given_up_is_tried_again():
    chooser = Lengths(costs_of(0.1), BLOCK)
    assert after(chooser, 0) == 0
    assert BLOCK in [chooser.slots(NOTHING, torch.tensor([BLOCK])) for _ in range(PROBE)]
    assert after(chooser, BLOCK, 20 * PROBE) == BLOCK


def test_limits_of_the_rows_count():
    """What lies beyond a row's limit is not hoped for, and never verified."""
    chooser = Lengths(costs_of(0.1), BLOCK)
    assert after(chooser, BLOCK) == BLOCK
    assert chooser.slots(NOTHING, torch.tensor([2])) == 2
    assert chooser.spend(NOTHING, torch.tensor([0, 2, 4]), 3) == [0, 2, 3]
    assert chooser.slots(NOTHING, torch.tensor([0])) == 0


def test_a_busy_machine_drafts_less():
    """Four rows of two tokens cost twice four of one; one row of two costs hardly more than one."""
    costs = Costs([1, 4], [[1, 2, 5]] * 2, [[10.0, 10.1, 10.4], [10.0, 20.0, 50.0]], [[1.0] * 4] * 2, [1], [[0.1]] * 2)
    chooser = Lengths(costs, BLOCK)
    assert after(chooser, 2, 20) >= 2
    assert chooser.slots(NOTHING, torch.tensor([BLOCK] * 4)) == 0
