"""Recall: how the text went on the last time that it looked like this.

Answers quote their prompts and repeat themselves, code above all. The longest suffix of the text that stood in it
before is looked up, and what followed it then goes into the lattice as a candidate of each slot. How far to trust it is
not decided here: the corrector learns it from the length of the match, beside everything else that it sees. (Prompt
lookup decoding, as transformers and vLLM have it, takes such a continuation as the draft.)

Shapes: R rows, L positions of text, n slots, K candidates, M the longest suffix compared.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.base import Lattice

SUFFIX = 8  # M: tokens compared at most
LONGEST = 16  # matches count up to here


@dataclass
class Recalled:
    """The recalled token of each slot of a lattice, and those beyond it."""

    column: Tensor  # [R, n] int64: which candidate it is
    matched: Tensor  # [R, n] int64: tokens before it that are as they were then, up to LONGEST; 0: nothing recalled
    beyond: Tensor  # [R, m] int64: how the text went on behind the last slot, where the last slot recalls anything


def recall(lattice: Lattice, history: Tensor, anchors: Tensor, beyond: int = 0) -> tuple[Lattice, Recalled]:
    """Look up how the text went on, and put that on the lattice.

    Args:
        history: int64 [R, L], the text of each row; what stands behind the anchor is ignored.
        anchors: int64 [R], the anchor's position in it.
        beyond: how many tokens behind the lattice to recall as well.
    """
    return place(lattice, *continuation(history, anchors, lattice.ids.shape[1] + beyond))


def place(lattice: Lattice, tokens: Tensor, matched_R: Tensor) -> tuple[Lattice, Recalled]:
    """Put a continuation on the lattice: tokens int64 [R, n or more], and the length of the match int64 [R].

    A recalled token that is no candidate of its slot takes the place of the last one, and its log-probability, which is
    at least its own.
    """
    slots = lattice.ids.shape[1]
    tokens_Rn = tokens[:, :slots]
    steps_n = torch.arange(slots, device=tokens.device)
    matched_Rn = torch.where(matched_R[:, None] > 0, (matched_R[:, None] + steps_n).clamp(max=LONGEST), 0)
    tokens_Rn = torch.where(matched_Rn > 0, tokens_Rn, lattice.ids[..., -1])
    is_it_RnK = lattice.ids == tokens_Rn[..., None]
    column_Rn = torch.where(is_it_RnK.any(-1), is_it_RnK.byte().argmax(-1), lattice.ids.shape[2] - 1)
    ids = lattice.ids.scatter(2, column_Rn[..., None], tokens_Rn[..., None])
    return replace(lattice, ids=ids), Recalled(column_Rn, matched_Rn, tokens[:, slots:])


def continuation(history: Tensor, anchors: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """What followed the longest earlier occurrence of a suffix that ends at the anchor; of equals, the latest.

    Returns tokens int64 [R, n] (a short loop goes round) and the length of the match int64 [R], at most SUFFIX; 0 where
    the anchor is new to the text, and then the tokens mean nothing. Arguments as for `recall`.
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
    ahead_Rn = found_R[:, None] + 1 + torch.arange(slots, device=history.device) % distance_R1
    return history.gather(1, ahead_Rn.clamp(max=length - 1)), matched_RL.gather(1, found_R[:, None])[:, 0]
