"""The contextual corrector: how well each candidate of a slot fits each candidate of the next, for all slots at once.

A parallel drafter predicts its slots without knowing which token the others will take, so its best candidates may not
fit together. The corrector scores neighbours in one small batched pass; the walk then picks one coherent path. The
score of candidate j of slot t+1 after candidate i of slot t is

    S[t+1](j | i) = u[t+1, j] + pair(i, j),      pair(i, j) = w . act(A r[t, i] + B r[t+1, j] + C s[t] + b)

with u the drafter's log-probability, r a representation of the candidate (its embedding, the slot's hidden state, how
probable it is) and s[t] of the two slots. The first layer is a sum of three terms, so the K x K part is an addition,
an activation and a dot product. The anchor is slot 0 and its own only candidate. Where i and j are both what the text
said after the same words before (`dcoco/recall.py`), a learned vector for the length of that match joins the sum. `w`
starts at zero: an untrained corrector is exactly the plain drafter.

Shapes: R rows, n slots, m = n + 1, K candidates, H hidden size, D width of a representation, M width of the pair score.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcoco.recall import LONGEST, Recalled
from drafters.base import Lattice


@dataclass(frozen=True)
class CorrectorConfig:
    """Sizes of a corrector: the hidden size of its drafter, of a representation, and of the pair score."""

    hidden_size: int
    width: int = 128
    pair_width: int = 128


@dataclass
class Scores:
    """Transition scores, unnormalised log-weights.

    first [R, K]: candidates of slot 1 after the anchor; rest [R, n - 1, K, K]: [.., i, j] for j after i.
    """

    first: Tensor
    rest: Tensor

    @classmethod
    def unary(cls, lattice: Lattice) -> "Scores":
        """The drafter's own scores, the same after every predecessor: the walk over them is the plain drafter."""
        log_probs = lattice.log_probs
        candidates = log_probs.shape[-1]
        return cls(log_probs[:, 0], log_probs[:, 1:, None, :].expand(-1, -1, candidates, -1))


class Corrector(nn.Module):
    """Scores neighbouring candidates of a lattice. About 512 x H + 52 k parameters, no vocabulary-sized table."""

    settings: ClassVar = CorrectorConfig
    recalls: ClassVar = True  # whether it has a use for what the text recalls

    def __init__(self, config: CorrectorConfig):
        super().__init__()
        self.config = config
        hidden, width, pair = config.hidden_size, config.width, config.pair_width
        self.token = nn.Linear(hidden, width, bias=False)
        self.slot = nn.Linear(hidden, 3 * width, bias=False)  # for its candidates, and as left and right of two slots
        self.scalars = nn.Linear(3, width)
        self.pair_both = nn.Linear(width, 2 * pair, bias=False)  # the candidate as the one before, and as the one after
        self.pair_state = nn.Linear(width, pair)
        self.pair_recalled = nn.Embedding(LONGEST + 1, pair, padding_idx=0)
        self.pair_out = nn.Linear(pair, 1, bias=False)
        nn.init.zeros_(self.pair_out.weight)

    def forward(self, lattice: Lattice, table: Tensor, recalled: Recalled | None = None) -> Scores:
        """Score all pairs of a lattice; `table` [V, D] is what `token_table` makes of the target's embedding."""
        candidates_RmKD, states_RnM = self.represent(lattice, F.embedding(with_anchor(lattice), table))
        before_RmKM, after_RmKM = self.pair_both(candidates_RmKD).chunk(2, dim=-1)
        after_RnKM = after_RmKM[:, 1:] + states_RnM[:, :, None]
        summed_RnKKM = before_RmKM[:, :-1, :, None] + after_RnKM[:, :, None]
        if recalled is not None:
            row = torch.arange(len(lattice.ids), device=lattice.ids.device)[:, None]
            slot = torch.arange(lattice.ids.shape[1], device=lattice.ids.device)
            column_Rm = F.pad(recalled.column, (1, 0))
            summed_RnKKM[row, slot, column_Rm[:, :-1], column_Rm[:, 1:]] += self.pair_recalled(recalled.matched)
        scores_RnKK = lattice.log_probs[:, :, None] + self.pair(summed_RnKKM)
        return Scores(scores_RnKK[:, 0, 0], scores_RnKK[:, 1:])

    def token_table(self, embedding: Tensor) -> Tensor:
        """Projections [.., D] of token embeddings [.., H]: of the whole vocabulary once, before decoding."""
        return self.token(_norm(embedding))

    def represent(self, lattice: Lattice, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Representations [R, n + 1, K, D] of the anchor (slot 0, where only column 0 has a meaning) and of all
        candidates, and the summand [R, n, M] of each pair of slots. `tokens` [R, n + 1, K, D] are the projections of
        `with_anchor(lattice)`."""
        hidden_RmH = _norm(torch.cat([lattice.anchor_hidden[:, None], lattice.hidden], dim=1))
        slot_RmD, left_RmD, right_RmD = self.slot(hidden_RmH).chunk(3, dim=-1)
        states_RnM = self.pair_state(_norm(left_RmD[:, :-1] + right_RmD[:, 1:]))
        log_probs = F.pad(lattice.log_probs, (0, 0, 1, 0))  # the anchor is certain
        rank = torch.arange(log_probs.shape[-1], device=log_probs.device) / 16.0
        scalars = torch.stack([log_probs, log_probs - log_probs[..., :1], rank.expand_as(log_probs)], dim=-1)
        scalars_RmKD = self.scalars(scalars.to(hidden_RmH.dtype))
        return _norm(tokens + slot_RmD[:, :, None] + scalars_RmKD), states_RnM

    def pair(self, summed: Tensor) -> Tensor:
        """Pair scores [...] float32 of summed first layers [..., M] (overwritten)."""
        return self.pair_out(F.relu_(summed)).squeeze(-1).float()


def with_anchor(lattice: Lattice) -> Tensor:
    """Candidates int64 [R, n + 1, K] with the anchor as slot 0, in each column."""
    anchors_R1K = lattice.anchors[:, None, None].expand(-1, 1, lattice.ids.shape[2])
    return torch.cat([anchors_R1K, lattice.ids], dim=1)


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])
