"""Recall: how the text went on the last time that it looked like this.

Answers quote their prompts and repeat themselves, code above all. The longest suffix of the text that stood in it
before is looked up, and what followed it then goes into the lattice as a candidate of each slot. How far to trust it is
not decided here: the corrector learns it from the length of the match, beside everything else that it sees. Where the
match is so long, or the engine so busy, that a lattice isn't worth its time, what is recalled is the draft by itself
(prompt lookup decoding, as transformers and vLLM have it).

Shapes: R rows, L positions of text, n slots, m recalled tokens, K candidates, M the longest suffix compared.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.base import Draft, Lattice

SUFFIX = 8  # M: tokens compared at most
LONGEST = 16  # matches count up to here
# How often the recalled token is right after matches of 1, 2, ... tokens: greedy answers of SmolLM2 to 50 prompts. The
# budget corrects it by what it sees.
RIGHT = (0.26, 0.58, 0.63, 0.62, 0.77, 0.80, 0.83, 0.86, 0.88, 0.90, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96)


@dataclass
class Continuation:
    """How the text of each row went on, the last time that it looked like this."""

    tokens: Tensor  # [R, m] int64
    matched: (
        Tensor  # [R] int64: tokens that were the same then, at most SUFFIX; 0: nothing recalled, tokens mean nothing
    )

    def draft(self) -> Draft:
        """What is recalled as a draft, as probable as such continuations are."""
        rates_m = torch.tensor([0.0, *RIGHT], device=self.matched.device).log()
        lengths_Rm = _matched(self.matched, torch.arange(self.tokens.shape[1], device=self.matched.device))
        return Draft(self.tokens, log_probs=rates_m[lengths_Rm].cumsum(1))


@dataclass
class Recalled:
    """The recalled token of each slot of a lattice, and those beyond it."""

    column: Tensor  # [R, n] int64: which candidate it is
    matched: Tensor  # [R, n] int64: tokens before it that are as they were then, up to LONGEST; 0: nothing recalled
    beyond: Tensor  # [R, m - n] int64: how the text went on behind the last slot, where that recalls anything


def recall(lattice: Lattice, found: Continuation) -> tuple[Lattice, Recalled]:
    """Put how the text went on (at least n tokens of it) on the lattice.

    A recalled token that is no candidate of its slot takes the place of the last one, and its log-probability, which is
    at least its own.
    """
    slots = lattice.ids.shape[1]
    tokens_Rn = found.tokens[:, :slots]
    matched_Rn = _matched(found.matched, torch.arange(slots, device=tokens_Rn.device))
    tokens_Rn = torch.where(matched_Rn > 0, tokens_Rn, lattice.ids[..., -1])
    is_it_RnK = lattice.ids == tokens_Rn[..., None]
    column_Rn = torch.where(is_it_RnK.any(-1), is_it_RnK.byte().argmax(-1), lattice.ids.shape[2] - 1)
    ids = lattice.ids.scatter(2, column_Rn[..., None], tokens_Rn[..., None])
    return replace(lattice, ids=ids), Recalled(column_Rn, matched_Rn, found.tokens[:, slots:])


def continuation(history: Tensor, anchors: Tensor, tokens: int) -> Continuation:
    """What followed the longest earlier occurrence of a suffix that ends at the anchor; of equals, the latest.

    Args:
        history: int64 [R, L], the text of each row; what stands behind the anchor is ignored.
        anchors: int64 [R], the anchor's position in it.
        tokens: how many to recall; a short loop goes round.
    """
    length = history.shape[1]
    columns_L = torch.arange(length, device=history.device)
    back_M = torch.arange(SUFFIX, device=history.device)
    from_RM = anchors[:, None] - back_M
    suffix_RM = history.gather(1, from_RM.clamp(min=0)).masked_fill(from_RM < 0, -2)
    before_RLM = pad(history, (SUFFIX - 1, 0), value=-1).unfold(1, SUFFIX, 1).flip(-1)  # [r, l, m]: m places before l
    matched_RL = (before_RLM == suffix_RM[:, None, :]).int().cumprod(-1).sum(-1)
    matched_RL = matched_RL.masked_fill(columns_L >= anchors[:, None], 0)
    found_R = (matched_RL * length + columns_L).argmax(-1)
    distance_R1 = (anchors - found_R).clamp(min=1)[:, None]
    ahead_Rm = found_R[:, None] + 1 + torch.arange(tokens, device=history.device) % distance_R1
    matched_R = matched_RL.gather(1, found_R[:, None])[:, 0]
    return Continuation(history.gather(1, ahead_Rm.clamp(max=length - 1)), matched_R)


def _matched(matched_R: Tensor, steps_m: Tensor) -> Tensor:
    """The length of the match before each recalled token [R, m], 0 where nothing is recalled."""
    return torch.where(matched_R[:, None] > 0, (matched_R[:, None] + steps_m).clamp(max=LONGEST), 0)
