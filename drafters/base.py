"""What a drafter is: it sees what the target has just computed, and proposes the next tokens of every row.

Shapes: S rows allocated, R rows of a call, Q tokens a row, n slots drafted, K candidates a slot, H hidden size,
W tokens that a drafter can draft.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from verifier.cache import RaggedCache
from verifier.sampling import SamplingBatch, Stream, exponential_noise, probabilities
from verifier.tree import Tree


@dataclass
class Lattice:
    """The K most probable tokens of each slot of a block, for every row.

    Candidates are ordered by `log_probs`, best first; slot t (index t - 1) predicts the token t after the anchor.
    """

    anchors: Tensor  # [R] int64: the last committed token of each row
    anchor_hidden: Tensor  # [R, H]: the drafter's input at the anchor, standing in for a hidden state
    ids: Tensor  # [R, n, K] int64
    log_probs: Tensor  # [R, n, K] float32: the drafter's own log-probability (unary score)
    hidden: Tensor  # [R, n, H]: the drafter's final hidden state of each slot

    def best(self, candidates: int) -> "Lattice":
        """The lattice of fewer candidates a slot."""
        return replace(self, ids=self.ids[..., :candidates], log_probs=self.log_probs[..., :candidates])


@dataclass
class Draft:
    """A finished draft: n tokens a row, and the distribution each was drawn from where it was drawn.

    The tokens follow one another, unless `tree` says how they branch; then the most probable come first. `log_probs`
    are of the path to each token, where the drafter can say how likely it is to be accepted. `candidates` and `q` are
    None for a draft that is a fixed function of the past (deterministic), else [R, n, K]: `q` is the probability with
    which the walk chose among `candidates`, given the tokens before it. Where rows have different numbers of tokens,
    `counts` says how many; what fills up the others is any valid id.
    """

    tokens: Tensor  # [R, n] int64
    candidates: Tensor | None = None  # [R, n, K] int64
    q: Tensor | None = None  # [R, n, K] float32
    tree: Tree | None = None
    log_probs: Tensor | None = None  # [R, n] float32
    counts: Tensor | None = None  # [R] int64, from 0 to n: not for a tree, nor with q

    def first(self, counts: list[int]) -> "Draft":
        """The first counts[r] tokens of each row, padded to the longest. Not for a draft with q."""
        longest = max(counts)
        tree = None if self.tree is None else self.tree.first(counts)
        return Draft(self.tokens[:, :longest], tree=tree)


@dataclass
class Pick:
    """One token a row, chosen by a drafter that goes token by token."""

    column: Tensor  # [R] int64, among the W tokens
    log_prob: Tensor  # [R] float32: of its being the target's, as the drafter sees it
    q: Tensor | None  # [R, W] float32: the distribution that it was drawn from, under the sampled walk


@dataclass
class Context:
    """What a round tells its drafter about the rows, beyond their anchors and the target's cache."""

    text: Tensor  # [R, L] int64: the tokens by position, prompt and answer up to the anchor, then anything
    positions: Tensor  # [R, n] int64: the absolute positions of the tokens to be drafted
    sampling: SamplingBatch
    sampled: bool  # whether the rule is the sampled walk: then draws have noise of their own, and q is returned

    def pick(self, logits: Tensor, slot: int, ids: Tensor) -> Pick:
        """Choose the token of one slot (from 0) by the drafter's logits [R, W] of the tokens `ids` int64 [W].

        Temperature and filters are the request's, as for the target (Leviathan et al. 2022, section 2.2). Greedy rows
        take the best token. The others draw: with noise of their own under the sampled walk, else with the target's
        (`dcoco/walk.py` says why).
        """
        batch, logits = self.sampling, logits.float()
        if batch.all_greedy and not self.sampled:
            scores, q = logits, None
        else:
            q = probabilities(logits[:, None], batch)[:, 0]
            stream = Stream.WALK if self.sampled else Stream.TARGET
            noise = exponential_noise(batch.seed, self.positions[:, slot : slot + 1], stream, ids)[:, 0]
            greedy = (batch.temperature == 0)[:, None]
            scores = torch.where(greedy, logits, q.log() - noise.log_())
        best, column = scores.max(-1)
        return Pick(column, best - scores.logsumexp(-1), q if self.sampled else None)


def finish(picks: list[Pick], ids: Tensor) -> Draft:
    """The draft of one pick a slot, among the tokens `ids` int64 [W]."""
    columns_Rn = torch.stack([pick.column for pick in picks], dim=1)
    q = [pick.q for pick in picks if pick.q is not None]
    if q:
        return Draft(ids[columns_Rn], ids.expand(*columns_Rn.shape, -1), torch.stack(q, dim=1))
    return Draft(ids[columns_Rn], log_probs=torch.stack([pick.log_prob for pick in picks], dim=1).cumsum(1))


class DraftState(Protocol):
    """What a drafter remembers of the rows of one engine."""

    @property
    def memory_bytes(self) -> int:
        """What it takes when all rows are full."""

    def move(self, source: int, target: int) -> None:
        """Make row `target` a copy of row `source`."""

    def reset(self, row: int) -> None:
        """Forget a row: another request takes it over."""

    def clean(self) -> None:
        """Zero what doesn't count and is computed with all the same: a pass that failed may have left NaN."""


class Drafter(Protocol):
    """Proposes the next tokens of every row from what the target has computed."""

    block_size: int  # the most slots that one call drafts
    taps: tuple[int, ...]  # decoder layers of the target whose outputs `observe` receives (-1: the embedding)
    max_positions: int  # the last position a block may reach, exclusive

    def start(self, rows: int, max_length: int) -> DraftState:
        """Memory for `rows` rows of at most `max_length` tokens."""

    def observe(self, state: DraftState, first: int, taps: list[Tensor], counts_R: Tensor) -> None:
        """Take in the taps ([R, Q, H] each) of tokens that the target has run for rows `first ..`.

        Of row r the first `counts_R[r]` (int64, may be 0) tokens are committed; the rest is to be ignored.
        """

    def draft(
        self, state: DraftState, anchors_R: Tensor, cache: RaggedCache, slots: int, context: Context
    ) -> Lattice | Draft:
        """Propose `slots` tokens behind the anchors (int64 [R]) of rows `0 .. R - 1`.

        The cache is the target's; its lengths count everything before the anchors.
        """


@dataclass
class TrainingBatch:
    """Blocks to learn from: anchors in sequences that the target has run.

    Shapes: A anchors a sequence, P positions a sequence (the longest's), G key/value heads, D head size.
    Positions behind a sequence's end hold anything finite; no block with labels looks at them.
    """

    ids: Tensor  # [R, P] int64
    anchors: Tensor  # [R, A] int64: positions, at least 1; a block sees what stands before its anchor, and itself
    taps: list[Tensor]  # [R, P, H] each, for the drafter's taps
    keys: dict[int, Tensor]  # target layer -> [R, G, P, D], for a drafter that reads the target's cache
    values: dict[int, Tensor]
