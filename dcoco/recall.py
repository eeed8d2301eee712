"""Recall: how the text went on the last time that it looked like this.

Answers quote their prompts and repeat themselves, code above all. The longest suffix of the text that stood in it
before is looked up, and what followed it then goes into the lattice as a candidate of each slot. How far to trust it is
not decided here: the corrector learns it from the length of the match, beside everything else that it sees. (As a draft
by itself it is prompt lookup: `drafters/prompt_lookup.py`.)

Shapes: R rows, L positions of text, n slots, K candidates.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafters.base import Lattice
from drafters.prompt_lookup import continuation

LONGEST = 16  # matches count up to here


@dataclass
class Recalled:
    """The recalled token of each slot of a lattice, and those beyond it."""

    column: Tensor  # [R, n] int64: which candidate it is
    matched: Tensor  # [R, n] int64: tokens before it that are as they were then, up to LONGEST; 0: nothing recalled
    beyond: Tensor  # [R, m] int64: how the text went on behind the last slot, where the last slot recalls anything


def recall(lattice: Lattice, history: Tensor, anchors: Tensor, beyond: int = 0) -> tuple[Lattice, Recalled]:
    """Look up how the text went on, and put that on the lattice.

    A recalled token that is no candidate of its slot takes the place of the last one, and its log-probability, which is
    at least its own.

    Args:
        history: int64 [R, L], the text of each row; what stands behind the anchor is ignored.
        anchors: int64 [R], the anchor's position in it.
        beyond: how many tokens behind the lattice to recall as well.
    """
    slots = lattice.ids.shape[1]
    tokens, matched_R = continuation(history, anchors, slots + beyond)
    tokens_Rn = tokens[:, :slots]
    steps_n = torch.arange(slots, device=history.device)
    matched_Rn = torch.where(matched_R[:, None] > 0, (matched_R[:, None] + steps_n).clamp(max=LONGEST), 0)
    tokens_Rn = torch.where(matched_Rn > 0, tokens_Rn, lattice.ids[..., -1])
    is_it_RnK = lattice.ids == tokens_Rn[..., None]
    column_Rn = torch.where(is_it_RnK.any(-1), is_it_RnK.byte().argmax(-1), lattice.ids.shape[2] - 1)
    ids = lattice.ids.scatter(2, column_Rn[..., None], tokens_Rn[..., None])
    return replace(lattice, ids=ids), Recalled(column_Rn, matched_Rn, tokens[:, slots:])
