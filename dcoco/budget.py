"""The verification budget: how much a round drafts and verifies, so that tokens come fastest.

A token more to verify costs little on an idle machine and a lot on a busy one. In each round the drafted tokens of all
rows compete: they are verified in the order of their probability, as many as make

    (rows + expected accepted tokens) / (seconds of the draft + seconds of the pass)

largest; or every row gets as many verified as the others, where the faster pass makes up for it. The expectation is
the sum of the tokens' path probabilities, calibrated by what was accepted of earlier ones at the same depth. How many
slots are drafted at all is settled before, by what drafts of each length have promised lately; none is plain
decoding. Under rule match the text is the same whatever is chosen (`verifier/rejection.py`).

Shapes: R rows, N drafted tokens a row, D depth.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dcoco.costs import Costs
from drafters.base import Draft
from verifier.packing import Packing

PROBE = 32  # rounds between full drafts, which show whether drafting more would pay again
FADE = 0.9  # of the promises of earlier drafts, a round
MEMORY = 0.98  # of the counts that the calibration rests on, a round
PRIOR = 8.0  # accepted tokens that calibration starts from, as if all had been expected
PLAIN, EVEN, RAGGED = range(3)  # kinds of rounds
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
        # By choice, and evenly or not: tokens that a row may expect to get accepted if 0, 1, 2, ... a row are verified.
        self._promise = np.zeros((len(self.choices), 2, most + 1))
        self._noted = np.full(len(self.choices), -np.inf)  # the round that it was last updated in
        self._drift = np.ones(3)  # how much longer rounds take than was measured: PLAIN, EVEN and RAGGED ones
        self._rounds = 0

    def slots(self, rows: int) -> int:
        """How many slots the next round should draft for each of so many rows; 0: none."""
        self._rounds += 1
        if np.isinf(self._noted[-1]) or self._rounds % PROBE == 0:
            return self.choices[-1]
        tokens = rows * np.arange(1, self._promise.shape[2] + 1)
        best, rate = 0, rows / (float(self.costs.of_even(rows, np.asarray(rows))) * self._drift[PLAIN])
        for choice, promises in zip(self.choices, self._promise, strict=True):
            drafting = self.costs.of_draft(rows, choice)
            for promise, (cost, drift) in zip(promises, self._passes(), strict=True):
                found = float((rows * (1.0 + promise) / (drafting + cost(rows, tokens))).max()) / drift
                if found > rate:
                    best, rate = choice, found
        return best

    def spend(self, draft: Draft, limits: Tensor, slots: int) -> list[int]:
        """How many tokens of each row's draft to verify: as many of each, or the most probable ones of all rows.

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
        self._remember(p_RN, depths_RN.cpu(), slots)
        drafting, rates = self.costs.of_draft(rows, slots), []
        for gains, step, (cost, drift) in zip(_gains(p_RN), (rows, 1), self._passes(), strict=True):
            tokens = rows + step * np.arange(len(gains))
            rates.append((rows + gains) / (drafting + cost(rows, tokens)) / drift)
        even, ragged = rates
        if even.max() >= ragged.max():
            return (p_RN[:, : int(even.argmax())] > 0).sum(-1).tolist()
        return (p_RN >= p_RN.flatten().sort(descending=True).values[int(ragged.argmax()) - 1]).sum(-1).tolist()

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

    def timed(self, slots: int, counts: list[int], seconds: float) -> None:
        """Take in how long a round took that drafted so many slots and verified so many tokens of each row."""
        rows, verified = len(counts), sum(counts)
        kind = PLAIN if not slots else EVEN if Packing.fits(verified + rows, rows, max(counts) + 1) else RAGGED
        cost = self.costs.of_ragged if kind == RAGGED else self.costs.of_even
        expected = float(cost(rows, np.asarray(rows + verified)))
        expected += self.costs.of_draft(rows, slots) if slots else 0.0
        if seconds < OUTLIER * expected * self._drift[kind]:
            self._drift[kind] += (1.0 - FADE) * (seconds / expected - self._drift[kind])
            if kind != PLAIN:  # what isn't tried is forgotten, so that it's tried again
                other = EVEN + RAGGED - kind
                self._drift[other] += (1.0 - MEMORY) * (self._drift[kind] - self._drift[other])

    def _passes(self) -> list[tuple[Callable[[int, np.ndarray], np.ndarray], float]]:
        """Costs and drift of even and of ragged rounds."""
        return [(self.costs.of_even, self._drift[EVEN]), (self.costs.of_ragged, self._drift[RAGGED])]

    def _remember(self, p_RN: Tensor, depths_RN: Tensor, slots: int) -> None:
        """Note what this draft promises, and what shorter ones would have promised."""
        rows, grid = len(p_RN), np.arange(self._promise.shape[2])
        for index, choice in enumerate(self.choices):
            if choice > slots:
                break
            even, ragged = _gains(p_RN if choice == slots else p_RN.masked_fill(depths_RN > choice, 0.0))
            found = [
                np.interp(grid, np.arange(len(even)), even),
                np.interp(grid * rows, np.arange(len(ragged)), ragged),
            ]
            fresh = 1.0 - FADE ** (self._rounds - self._noted[index])
            self._promise[index] += fresh * (np.stack(found) / rows - self._promise[index])
            self._noted[index] = self._rounds


def _gains(p_RN: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that may be expected to be accepted: of the first 0, 1, ... N of each row, and of the 0, 1, ... R * N most
    probable ones of all."""
    even = p_RN.sort(dim=-1, descending=True).values.double().sum(0).cumsum(0)
    ragged = p_RN.flatten().sort(descending=True).values.double().cumsum(0)
    return np.concatenate([[0.0], even.numpy()]), np.concatenate([[0.0], ragged.numpy()])


def _depths(draft: Draft) -> Tensor:
    """Tokens from the anchor to each drafted one: int64 [R, N]."""
    if draft.tree is not None:
        return draft.tree.depths[:, 1:]
    rows, slots = draft.tokens.shape
    return torch.arange(1, slots + 1, device=draft.tokens.device).expand(rows, -1)
