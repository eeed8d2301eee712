"""The verification budget: how much a round drafts and verifies, so that tokens come fastest.

A token more to verify costs little on an idle machine and a lot on a busy one. In each round the drafted tokens of all
rows compete: they are verified in the order of their probability, as many as make

    (rows + expected accepted tokens) / (seconds of the draft + seconds of the pass)

largest; or every row gets as many verified as the others, where the faster pass makes up for it. The expectation is
the sum of the tokens' path probabilities, calibrated by how often tokens of that probability were accepted before. How
many slots are drafted at all is settled before, by what drafts of each length have promised lately, against what the
text recalls at no cost; with neither a round is plain decoding. Under rule match the text is the same whatever is
chosen (`verifier/rejection.py`).

Shapes: R rows, N drafted tokens a row.
"""

from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from dcoco.costs import Costs
from drafters.base import Draft
from verifier.packing import Packing

PROBE = 32  # rounds between full drafts, which show whether drafting more would pay again
FADE = 0.9  # of the promises of earlier drafts, a round
MEMORY = 0.98  # of the counts that the calibration rests on, a round
EDGES = np.array([0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97, 1.0])  # of the classes of probability
HOPE = 0.998  # of the drift of a kind of round that isn't tried, a round
PRIOR = 4.0  # tokens of each class that calibration starts from, accepted as often as they said
PLAIN, EVEN, RAGGED = range(3)  # kinds of rounds
OUTLIER = 2.0  # a round that takes so many times what was expected says nothing of the next


class Budget:
    """The choices of one method on one machine, and what they have learnt.

    Args:
        costs: of rounds on this machine.
        block: the slots of a full draft.
        most: tokens of a row's draft at most.
    """

    def __init__(self, costs: Costs, block: int, most: int):
        self.costs = costs
        self.choices = sorted({max(1, block >> halved) for halved in range(3)})
        self._middles = (EDGES[:-1] + EDGES[1:]) / 2
        # By source (0: recalled, 1: drafted) and class: tokens verified lately, and how many of them were accepted.
        self._tried = np.zeros((2, len(self._middles)))
        self._accepted = np.zeros((2, len(self._middles)))
        self._said = np.empty((0, 0))  # [R, N]: the last draft's own probabilities
        # By choice, and evenly or not: tokens that a row may expect to get accepted if 0, 1, 2, ... a row are verified.
        self._promise = np.zeros((len(self.choices), 2, most + 1))
        self._noted = np.full(len(self.choices), -np.inf)  # the round that it was last updated in
        self._drift = np.ones(3)  # how much longer rounds take than was measured: PLAIN, EVEN and RAGGED ones
        self._ran = np.zeros(3)  # the last round of each kind
        self._rounds = 0

    def slots(self, recalled: Draft, limits: Tensor) -> int:
        """How many slots the next round should draft; 0: none, what the text recalls is the draft.

        Args:
            recalled: with `log_probs` [R, N], where N may be 0.
            limits: int64 [R], how deep each row's draft may go.
        """
        self._rounds += 1
        if np.isinf(self._noted[-1]) or self._rounds % PROBE == 0:
            return self.choices[-1]
        said = _said(recalled, _depths(recalled), limits)
        rows, best = len(said), 0
        rate = max(float(rates.max()) for rates in self._rates(self.calibrate(said, 0), 0.0))
        tokens = rows * np.arange(1, self._promise.shape[2] + 1)
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
            draft: with `log_probs` [R, N], the most probable of each row first.
            limits: int64 [R], how deep each row's draft may go.
            slots: that were drafted; 0 for what the text recalls.
        """
        depths_RN = _depths(draft)
        self._said = _said(draft, depths_RN, limits)
        rows, most = self._said.shape
        if most == 0:
            return [0] * rows
        p = self.calibrate(self._said, min(slots, 1))
        if slots:
            self._remember(p, depths_RN.cpu().numpy(), slots)
        even, ragged = self._rates(p, self.costs.of_draft(rows, slots) if slots else 0.0)
        if even.max() >= ragged.max() or not ragged.argmax():
            return (self._said[:, : int(even.argmax())] > 0).sum(-1).tolist()
        # What was said tells tokens apart that calibration makes equal.
        last = np.sort(self._said, axis=None)[-int(ragged.argmax())]
        return ((self._said >= last) & (self._said > 0)).sum(-1).tolist()  # 0: beyond a limit, or no draft at all

    def calibrate(self, said: np.ndarray, source: int) -> np.ndarray:
        """How often tokens are accepted whose drafts (0: recalled, 1: drafted) give them these probabilities; never
        lower for a higher one."""
        weights = self._tried[source] + PRIOR
        rates = isotonic_regression((self._accepted[source] + PRIOR * self._middles) / weights, weights=weights).x
        return np.interp(said, [0.0, *self._middles, 1.0], [0.0, *rates, rates[-1]])

    def learn(self, slots: int, counts: list[int], accepted: list[list[int]], seconds: float) -> None:
        """Take in what came of a round.

        Args:
            slots: that were drafted.
            counts: tokens of each row that were verified.
            accepted: which of them were accepted.
            seconds: that the round took.
        """
        rows, verified = len(counts), sum(counts)
        if len(self._said) == rows:
            source, classes = min(slots, 1), len(self._middles)
            kind_of = np.searchsorted(EDGES, self._said, side="right").clip(1, classes) - 1
            seen = np.arange(self._said.shape[1]) < np.array(counts)[:, None]
            hits = [kind_of[row, node] for row, nodes in enumerate(accepted) for node in nodes]
            for counted, found in ((self._tried, kind_of[seen]), (self._accepted, np.array(hits, dtype=np.int64))):
                counted[source] = MEMORY * counted[source] + np.bincount(found, minlength=classes)
        kind = (
            PLAIN if not slots + verified else EVEN if Packing.fits(verified + rows, rows, max(counts) + 1) else RAGGED
        )
        cost = self.costs.of_ragged if kind == RAGGED else self.costs.of_even
        expected = float(cost(rows, np.asarray(rows + verified)))
        expected += self.costs.of_draft(rows, slots) if slots else 0.0
        if seconds < OUTLIER * expected * self._drift[kind]:
            fresh = 1.0 - FADE ** max(1, self._rounds - self._ran[kind])
            self._drift[kind] += fresh * (seconds / expected - self._drift[kind])
        self._ran[kind] = self._rounds

    def _rates(self, p: np.ndarray, drafting: float) -> tuple[np.ndarray, np.ndarray]:
        """Expected tokens a second if 0, 1, 2, ... tokens of each row are verified, or of all rows together, by the
        probabilities p [R, N] of drafts that took so many seconds."""
        rows, found = len(p), []
        for gains, step, (cost, drift) in zip(_gains(p), (rows, 1), self._passes(), strict=True):
            tokens = rows + step * np.arange(len(gains))
            found.append((rows + gains) / (drafting + cost(rows, tokens)) / drift)
            if not drafting:
                found[-1][0] = rows / (float(self.costs.of_even(rows, tokens[:1])[0]) * self._expected_drift(PLAIN))
        return found[0], found[1]

    def _passes(self) -> list[tuple[Callable[[int, np.ndarray], np.ndarray], float]]:
        """Costs and drift of even and of ragged rounds."""
        costs = self.costs
        return [(costs.of_even, self._expected_drift(EVEN)), (costs.of_ragged, self._expected_drift(RAGGED))]

    def _expected_drift(self, kind: int) -> float:
        """The drift of a kind of round; what hasn't been tried for long is thought ever faster, and so tried again."""
        return float(self._drift[kind] * HOPE ** (self._rounds - self._ran[kind]))

    def _remember(self, p: np.ndarray, depths: np.ndarray, slots: int) -> None:
        """Note what this draft promises, and what shorter ones would have promised."""
        rows, grid = len(p), np.arange(self._promise.shape[2])
        for index, choice in enumerate(self.choices):
            if choice > slots:
                break
            even, ragged = _gains(p if choice == slots else np.where(depths > choice, 0.0, p))
            found = [
                np.interp(grid, np.arange(len(even)), even),
                np.interp(grid * rows, np.arange(len(ragged)), ragged),
            ]
            fresh = 1.0 - FADE ** (self._rounds - self._noted[index])
            self._promise[index] += fresh * (np.stack(found) / rows - self._promise[index])
            self._noted[index] = self._rounds


def _gains(p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that may be expected to be accepted, by p [R, N]: of the first 0, 1, ... N of each row, and of the 0, 1,
    ... R * N most probable ones of all."""
    even, ragged = np.sort(p, axis=1)[:, ::-1].sum(0), np.sort(p, axis=None)[::-1]
    return np.concatenate([[0.0], even.cumsum()]), np.concatenate([[0.0], ragged.cumsum()])


def _said(draft: Draft, depths_RN: Tensor, limits: Tensor) -> np.ndarray:
    """The draft's own probabilities [R, N], 0 beyond the limits [R]."""
    assert draft.log_probs is not None
    return draft.log_probs.exp().masked_fill(depths_RN > limits[:, None], 0.0).cpu().double().numpy()


def _depths(draft: Draft) -> Tensor:
    """Tokens from the anchor to each drafted one: int64 [R, N]."""
    if draft.tree is not None:
        return draft.tree.depths[:, 1:]
    rows, slots = draft.tokens.shape
    return torch.arange(1, slots + 1, device=draft.tokens.device).expand(rows, -1)
