"""The verification budget: how much a round drafts and verifies, so that tokens come fastest.

A token more to verify costs little on an idle machine and a lot on a busy one. In each round the drafted tokens of all
rows compete: they are verified in the order of their probability, as many as make

    (rows + expected accepted tokens) / (seconds of the draft + seconds of the pass)

largest. The expectation is the sum of the tokens' path probabilities, calibrated by what was accepted of earlier ones
at the same depth. How many slots are drafted at all is settled before, by what drafts of each length have promised
lately; none is plain decoding. Under rule match the text is the same whatever is chosen (`verifier/rejection.py`).

Shapes: R rows, N drafted tokens a row, D depth.
"""

import numpy as np
import torch
from torch import Tensor

from dcoco.costs import Costs
from drafters.base import Draft

PROBE = 32  # rounds between full drafts, which show whether drafting more would pay again
FADE = 0.9  # of the promises of earlier drafts, a round
MEMORY = 0.98  # of the counts that the calibration rests on, a round
PRIOR = 8.0  # accepted tokens that calibration starts from, as if all had been expected
OUTLIER = 2.0  # a round that takes so many times what was expected says nothing of the next


class Budget:
    """The choices of one method on one machine, and what they have learnt.

    Args:
        costs: of rounds on this machine.
        block: the slots of a full draft.
        most: tokens of a row's draft at most.
        deepest: how far beyond the anchor a draft may reach.
    """

    def __init__(self, costs: Costs, block: int, most: int, deepest: int, device: torch.device | str = "cpu"):
        self.costs = costs
        self.choices = sorted({max(1, block >> halved) for halved in range(3)})
        self.calibration = torch.zeros(deepest, device=device)  # [D] to add to log-probabilities; never rises
        self._expected = torch.full((deepest,), PRIOR, device=device)  # [D]: tokens verified, by their probability
        self._accepted = torch.full((deepest,), PRIOR, device=device)
        # By choice: tokens that a row may expect to get accepted if the batch verifies 0, 1, 2, ... tokens a row.
        self._promise = np.zeros((len(self.choices), most + 1))
        self._noted = np.full(len(self.choices), -np.inf)  # the round that it was last updated in
        self._drift = [1.0, 1.0]  # how much longer plain and drafted rounds take than was measured
        self._rounds = 0

    def slots(self, rows: int) -> int:
        """How many slots the next round should draft for each of so many rows; 0: none."""
        self._rounds += 1
        if np.isinf(self._noted[-1]) or self._rounds % PROBE == 0:
            return self.choices[-1]
        tokens = rows * np.arange(1, self._promise.shape[1] + 1)
        passes = self.costs.of_target(rows, tokens)
        best, rate = 0, rows / (passes[0] * self._drift[0])
        for choice, promise in zip(self.choices, self._promise, strict=True):
            seconds = (passes + self.costs.of_draft(rows, choice)) * self._drift[1]
            found = float((rows * (1.0 + promise) / seconds).max())
            if found > rate:
                best, rate = choice, found
        return best

    def spend(self, draft: Draft, limits: Tensor, slots: int) -> list[int]:
        """How many tokens of each row's draft to verify, the most probable ones of all rows.

        Args:
            draft: with calibrated `log_probs` [R, N].
            limits: int64 [R], how deep each row's draft may go.
            slots: that were drafted.
        """
        assert draft.log_probs is not None
        rows, most = draft.log_probs.shape
        if most == 0:
            return [0] * rows
        depths_RN = _depths(draft)
        p_RN = draft.log_probs.exp().masked_fill(depths_RN > limits[:, None], 0.0).cpu()
        pooled = p_RN.flatten().sort(descending=True).values.double().numpy()
        gains = np.concatenate([[0.0], pooled.cumsum()])
        passes = self.costs.of_target(rows, rows + np.arange(len(gains)))
        seconds = passes + self.costs.of_draft(rows, slots)
        bought = int(((rows + gains) / seconds).argmax())
        self._remember(p_RN, depths_RN.cpu(), slots)
        if bought == 0:
            return [0] * rows
        return (p_RN >= pooled[bought - 1]).sum(-1).tolist()

    def learn(self, draft: Draft, counts: list[int], accepted: Tensor) -> None:
        """Calibrate by a round that verified the first counts[r] tokens of row r and accepted accepted[r] of them."""
        if draft.log_probs is None or not max(counts):
            return
        depths_RN = _depths(draft)
        verified_RN = torch.arange(depths_RN.shape[1], device=depths_RN.device) < torch.tensor(
            counts, device=depths_RN.device
        ).unsqueeze(1)
        level_RN = (depths_RN - 1).clamp(min=0)
        raw_RN = (draft.log_probs - self.calibration[level_RN]).exp().masked_fill_(~verified_RN, 0.0)
        levels_D = torch.arange(len(self.calibration), device=depths_RN.device)
        self._expected.mul_(MEMORY).index_add_(0, level_RN.flatten(), raw_RN.flatten())
        self._accepted.mul_(MEMORY).add_((accepted[:, None] > levels_D).sum(0))
        share_D = (self._accepted + PRIOR) / (self._expected + PRIOR)
        self.calibration = share_D.log_().clamp_(-3.0, 1.0).cummin(0).values

    def timed(self, rows: int, drafted: int, verified: int, seconds: float) -> None:
        """Take in how long a round of `rows` rows took that drafted so many slots a row and verified so many tokens."""
        expected = float(self.costs.of_target(rows, np.asarray(rows + verified)))
        expected += self.costs.of_draft(rows, drafted) if drafted else 0.0
        kind = int(drafted > 0)
        if seconds < OUTLIER * expected * self._drift[kind]:
            self._drift[kind] += (1.0 - FADE) * (seconds / expected - self._drift[kind])

    def _remember(self, p_RN: Tensor, depths_RN: Tensor, slots: int) -> None:
        """Note what this draft promises, and what shorter ones would have promised."""
        rows, grid = len(p_RN), np.arange(self._promise.shape[1])
        for index, choice in enumerate(self.choices):
            if choice > slots:
                break
            within_RN = p_RN if choice == slots else p_RN.masked_fill(depths_RN > choice, 0.0)
            pooled = within_RN.flatten().sort(descending=True).values.double().numpy().cumsum()
            found = np.interp(grid * rows, np.arange(len(pooled) + 1), np.concatenate([[0.0], pooled])) / rows
            fresh = 1.0 - FADE ** (self._rounds - self._noted[index])
            self._promise[index] += fresh * (found - self._promise[index])
            self._noted[index] = self._rounds


def _depths(draft: Draft) -> Tensor:
    """Tokens from the anchor to each drafted one: int64 [R, N]."""
    if draft.tree is not None:
        return draft.tree.depths[:, 1:]
    rows, slots = draft.tokens.shape
    return torch.arange(1, slots + 1, device=draft.tokens.device).expand(rows, -1)
