"""How long drafts are where nothing drawn for them may decide it: by what came of the rounds before.

Under rule sampled a draft cut short for what was drawn changes the text's distribution (`verifier/rejection.py`), so
the budget (`dcoco/budget.py`), which reads the draft, can't be used. A length that is settled before the draft is
exact. Each round takes the one that promises most tokens a second: the slot that is t tokens ahead is accepted, if
those before it are, as often as it was lately.
"""

import numpy as np
from torch import Tensor

from dcoco.costs import Costs
from drafters.base import Draft

PROBE = 32  # rounds between full drafts, which show whether drafting more would pay again
MEMORY = 0.98  # of what was counted of a slot, each round that tries it again
PRIOR = 4.0  # tokens of each slot that the counts start from, half of them accepted


class Lengths:
    """The choices of one method on one machine, and what they rest on.

    Args:
        costs: of rounds on this machine.
        block: the slots of a full draft.
    """

    def __init__(self, costs: Costs, block: int):
        self.costs, self.block = costs, block
        self._tried = np.full(block, PRIOR)  # by slot: drafts that were accepted up to it
        self._accepted = self._tried / 2  # and of these, those accepted one further
        self._seconds: dict[int, np.ndarray] = {}  # by rows: of a round whose drafts have 0, 1, 2, ... tokens
        self._rounds = 0

    def slots(self, recalled: Draft, limits: Tensor) -> int:
        """How many slots the next round should draft; 0: none.

        Args:
            recalled: what the text recalls, which isn't used here.
            limits: int64 [R], how deep each row's draft may go.
        """
        self._rounds += 1
        if self._rounds % PROBE == 0:
            return self.block
        rows, lengths = len(limits), np.arange(self.block + 1)
        deep = np.minimum(limits.cpu().numpy()[:, None], lengths)  # [R, lengths]
        committed = (1.0 + np.concatenate([[0.0], (self._accepted / self._tried).cumprod().cumsum()]))[deep].sum(0)
        if rows not in self._seconds:
            drafting = [self.costs.of_draft(rows, int(length)) if length else 0.0 for length in lengths]
            self._seconds[rows] = drafting + self.costs.of_even(rows, rows * (1 + lengths))
        return int((committed / self._seconds[rows]).argmax())

    def spend(self, draft: Draft, limits: Tensor, slots: int) -> list[int]:
        """How many tokens of each row's draft to verify: all that were drafted and lie within the limits [R]."""
        return limits.clamp(max=slots).tolist()

    def learn(self, slots: int, counts: list[int], accepted: list[list[int]], seconds: float | None) -> None:
        """Take in what came of a round.

        Args:
            slots: that were drafted.
            counts: tokens of each row that were verified.
            accepted: which of them were accepted.
            seconds: that the round took, which isn't used here.
        """
        places, lengths = np.arange(self.block), np.array([len(nodes) for nodes in accepted])[:, None]
        tried = (places < np.array(counts)[:, None]) & (places <= lengths)
        kept = np.where(tried.any(0), MEMORY, 1.0)
        self._tried = kept * self._tried + tried.sum(0)
        self._accepted = kept * self._accepted + (tried & (places < lengths)).sum(0)
