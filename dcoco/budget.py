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

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from dcoco.costs import Costs
from drafters.base import Draft
from verifier.packing import Packing

PROBE = 32  # rounds between full drafts, which show whether drafting more would pay again: of up to MANY rows
MANY = 8  # rows; more of them show as much in fewer drafts
FADE = 0.9  # of the promises of earlier drafts, a round
REFIT = 8  # rounds between new curves of calibration
MEMORY = 0.98  # of the counts that the calibration rests on, a round
EDGES = np.array([0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97, 1.0])  # of the classes of probability
DEPTHS = (2, 5)  # between the bands of depth: what a draft says of its deep tokens holds less often
TRUST = 20.0  # tokens that are taken to have come true as expected
LEAST = 0.05  # tokens of a row that nothing recalled makes sure
HOPE = 0.9995  # of the drift of a kind of round that isn't tried, a round
LATER = 1.06  # what a ragged round's time counts for: what it takes would mostly come as easily in the next one
PRIOR = 4.0  # tokens of each class that calibration starts from, accepted as often as they said
EVEN, RAGGED = range(2)  # kinds of rounds
SIZES = (0.0, 1.5, 2.5, 4.5, 8.5)  # tokens of a row that are verified: between the classes of rounds; 0 is plain
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
        # By source (0: recalled, 1: drafted), depth and class: tokens verified lately, and of them those accepted.
        self._tried = np.zeros((2, len(DEPTHS) + 1, len(self._middles)))
        self._accepted = np.zeros_like(self._tried)
        self._curves = np.zeros((*self._tried.shape[:2], len(self._middles) + 2))  # what follows for 0, the classes, 1
        self._fit()
        self._said = np.empty((0, 0))  # [R, N]: the last draft's own probabilities
        self._depths = np.empty((0, 0), dtype=np.int64)  # and how deep its tokens are
        # Evenly or not, by 0, 1, 2, ... tokens of a row that are verified: how many of them what is recalled may expect
        # to get accepted; and by choice, what part of the others a draft makes good.
        self._recalled = np.zeros((2, most + 1))
        self._promise = np.zeros((len(self.choices), 2, most + 1))
        self._noted = np.full(len(self.choices), -np.inf)  # the round that it was last updated in
        # By kind: tokens that were expected to be accepted lately, and those that were: what looks best is overrated.
        self._hoped, self._got = np.zeros(2), np.zeros(2)
        self._plan = EVEN, 0.0  # the last round's kind, and what was expected of it
        self._tables: dict[int, list[np.ndarray]] = {}  # by rows: seconds and sizes of passes
        self._drafts: dict[tuple[int, int], float] = {}  # by rows and slots: seconds of one
        self._drift = np.ones((2, len(SIZES) + 1))  # by kind and size: how much longer rounds take than was measured
        self._ran = np.zeros_like(self._drift)  # the last round of each kind and size
        self._rounds = 0

    def slots(self, recalled: Draft, limits: Tensor) -> int:
        """How many slots the next round should draft; 0: none, what the text recalls is the draft.

        Args:
            recalled: with `log_probs` [R, N], where N may be 0.
            limits: int64 [R], how deep each row's draft may go.
        """
        self._rounds += 1
        said, depths = _read(recalled, limits)
        rows, best = len(said), 0
        free = _gains(self.calibrate(said, depths, 0), said)
        self._recalled = self._by_row(free, rows)
        if np.isinf(self._noted[-1]) or self._rounds % (PROBE * max(1, rows // MANY)) == 0:
            return self.choices[-1]
        rate = max(float(rates.max()) for rates in self._rates(free, rows, 0.0))
        for choice, promises in zip(self.choices, self._promise, strict=True):
            drafting, gains = self._seconds(rows, choice), self._recalled + promises * self._open()
            for gain, (seconds, drift) in zip(gains * self._truth(), self._passes(rows), strict=True):
                found = float((rows * (1.0 + gain) / (drafting + seconds[::rows]) / drift[::rows]).max())
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
        self._said, self._depths = _read(draft, limits)
        rows, most = self._said.shape
        if most == 0:
            return [0] * rows
        p = self.calibrate(self._said, self._depths, min(slots, 1))
        if slots:
            self._remember(p, slots)
        gains = _gains(p, self._said)
        even, ragged = self._rates(gains, rows, self._seconds(rows, slots))
        each, together = int(even.argmax()), int(ragged.argmax())
        if even[each] >= ragged[together] or not together:
            self._plan = EVEN, gains[EVEN][each]
            return (self._said[:, :each] > 0).sum(-1).tolist()
        self._plan = RAGGED, gains[RAGGED][together]
        last = np.sort(self._said, axis=None)[-together]
        return ((self._said >= last) & (self._said > 0)).sum(-1).tolist()  # 0: beyond a limit, or no draft at all

    def calibrate(self, said: np.ndarray, depths: np.ndarray, source: int) -> np.ndarray:
        """How often tokens are accepted whose drafts (0: recalled, 1: drafted) give them these probabilities, and which
        are so deep; at one depth never lower for a higher probability. All are [R, N]."""
        p, bands = np.zeros_like(said), np.searchsorted(DEPTHS, depths)
        for band, curve in enumerate(self._curves[source]):
            mine = bands == band
            p[mine] = np.interp(said[mine], [0.0, *self._middles, 1.0], curve)
        return p

    def learn(self, slots: int, counts: list[int], accepted: list[list[int]], seconds: float | None) -> None:
        """Take in what came of a round.

        Args:
            slots: that were drafted.
            counts: tokens of each row that were verified.
            accepted: which of them were accepted.
            seconds: that the round took; None where it did more, which costs can't tell apart.
        """
        rows, verified = len(counts), sum(counts)
        if len(self._said) == rows:
            source = min(slots, 1)
            shape = self._tried[source].shape
            classes = np.searchsorted(EDGES, self._said, side="right").clip(1, shape[1]) - 1
            kind_of = np.searchsorted(DEPTHS, self._depths) * shape[1] + classes
            seen = np.arange(self._said.shape[1]) < np.array(counts)[:, None]
            hits = [kind_of[row, node] for row, nodes in enumerate(accepted) for node in nodes]
            for counted, found in ((self._tried, kind_of[seen]), (self._accepted, np.array(hits, dtype=np.int64))):
                fresh = np.bincount(found, minlength=shape[0] * shape[1]).reshape(shape)
                counted[source] = MEMORY * counted[source] + fresh
            if self._rounds % REFIT == 0:
                self._fit()
        if verified:
            kind, hoped = self._plan
            self._hoped[kind] = MEMORY * self._hoped[kind] + hoped
            self._got[kind] = MEMORY * self._got[kind] + sum(map(len, accepted))
        if seconds is not None:
            self._time(slots, rows, verified, max(counts), seconds)

    def _time(self, slots: int, rows: int, verified: int, longest: int, seconds: float) -> None:
        """Take in how long a round took that verified so many tokens, `longest` of one row."""
        kind = EVEN if Packing.fits(verified + rows, rows, longest + 1) else RAGGED
        cell = kind, np.searchsorted(SIZES, verified / rows)
        expected = float(self._table(rows)[kind][verified]) + self._seconds(rows, slots)
        if seconds < OUTLIER * expected * self._drift[cell]:
            fresh = 1.0 - FADE ** max(1, self._rounds - self._ran[cell])
            self._drift[cell] += fresh * (seconds / expected - self._drift[cell])
        self._ran[cell] = self._rounds

    def _rates(self, gains: tuple[np.ndarray, np.ndarray], rows: int, drafting: float) -> tuple[np.ndarray, np.ndarray]:
        """Expected tokens a second if 0, 1, 2, ... tokens of each row are verified, or of all rows together, by the
        gains of drafts that took so many seconds."""
        found = []
        kinds = zip(gains, (rows, 1), self._truth()[:, 0], self._passes(rows), strict=True)
        for gain, step, truth, (seconds, drift) in kinds:
            taken = (drafting + seconds[::step]) * drift[::step]
            found.append((rows + truth * gain) / taken[: len(gain)])
        return found[0], found[1]

    def _passes(self, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Seconds of an even and a ragged pass that verifies 0, 1, 2, ... tokens of so many rows, and their drift.

        What hasn't been tried for long is thought ever faster, and so tried again.
        """
        even, ragged, sizes = self._table(rows)
        drift = self._drift * HOPE ** (self._rounds - self._ran)
        drift[RAGGED, 0] = drift[EVEN, 0]  # plain either way
        return [(even, drift[EVEN, sizes]), (ragged, LATER * drift[RAGGED, sizes])]

    def _table(self, rows: int) -> list[np.ndarray]:
        """Of an even and a ragged pass that verifies 0, 1, 2, ... tokens of so many rows: seconds, and its size."""
        if rows not in self._tables:
            tokens = np.arange(rows * (self._promise.shape[2] - 1) + 1)
            passes = self.costs.of_even(rows, rows + tokens), self.costs.of_ragged(rows, rows + tokens)
            self._tables[rows] = [*passes, np.searchsorted(SIZES, tokens / rows)]
        return self._tables[rows]

    def _seconds(self, rows: int, slots: int) -> float:
        """Of drafting so many slots, or none."""
        if (rows, slots) not in self._drafts:
            self._drafts[rows, slots] = self.costs.of_draft(rows, slots) if slots else 0.0
        return self._drafts[rows, slots]

    def _truth(self) -> np.ndarray:
        """What part of the expected tokens of even and of ragged rounds comes true: [2, 1]."""
        return ((self._got + TRUST) / (self._hoped + TRUST))[:, None]

    def _fit(self) -> None:
        """Draw the curves of calibration through what was counted."""
        weights = self._tried + PRIOR
        rates = (self._accepted + PRIOR * self._middles) / weights
        for where in np.ndindex(*rates.shape[:2]):
            curve = isotonic_regression(rates[where], weights=weights[where]).x
            self._curves[where] = [0.0, *curve, curve[-1]]

    def _remember(self, p: np.ndarray, slots: int) -> None:
        """Note what this draft promises, and what shorter ones would have promised."""
        for index, choice in enumerate(self.choices):
            if choice > slots:
                break
            within = self._depths <= (choice if choice < slots else np.inf)
            promise = (self._by_row(_gains(p * within, self._said * within), len(p)) - self._recalled) / self._open()
            fresh = 1.0 - FADE ** (self._rounds - self._noted[index])
            self._promise[index] += fresh * (promise - self._promise[index])
            self._noted[index] = self._rounds

    def _by_row(self, gains: tuple[np.ndarray, np.ndarray], rows: int) -> np.ndarray:
        """Tokens of a row that may be expected to be accepted if 0, 1, 2, ... a row are verified, evenly or not."""
        grid = np.arange(self._promise.shape[2])
        even, ragged = gains
        found = np.interp(grid, np.arange(len(even)), even), np.interp(grid * rows, np.arange(len(ragged)), ragged)
        return np.stack(found) / rows

    def _open(self) -> np.ndarray:
        """Of 0, 1, 2, ... tokens of a row, those that what is recalled leaves to be made good."""
        return np.maximum(np.arange(self._promise.shape[2]) - self._recalled, LEAST)


def _gains(p: np.ndarray, said: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that may be expected to be accepted, by p [R, N]: of the first 0, 1, ... N of each row, and of the 0, 1,
    ... R * N first ones of all, in the order of what was said of them."""
    even = np.take_along_axis(p, np.argsort(-said, axis=1, kind="stable"), axis=1).sum(0)
    ragged = p.flatten()[np.argsort(-said, axis=None, kind="stable")]
    return np.concatenate([[0.0], even.cumsum()]), np.concatenate([[0.0], ragged.cumsum()])


def _read(draft: Draft, limits: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The draft's own probabilities, 0 beyond the limits [R], and the tokens from the anchor to each: [R, N] both."""
    assert draft.log_probs is not None
    rows, slots = draft.tokens.shape
    chain_RN = torch.arange(1, slots + 1, device=limits.device).expand(rows, -1)
    depths_RN = chain_RN if draft.tree is None else draft.tree.depths[:, 1:]
    said_RN = draft.log_probs.exp().masked_fill(depths_RN > limits[:, None], 0.0)
    return said_RN.cpu().double().numpy(), depths_RN.cpu().numpy()
