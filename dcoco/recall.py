"""Recall: how the text went on the last time that it looked like this.

Answers quote their prompts and repeat themselves, code above all. The longest suffix of the text that stood in it
before is looked up (`drafters/prompt_lookup.py`), and what followed it then goes into the lattice as a candidate of
each slot. How far to trust it is not decided here: the corrector learns it from the length of the match, beside
everything else that it sees. Where the match is so long, or the engine so busy, that a lattice isn't worth its time,
what is recalled is the draft by itself (`dcoco/budget.py`).

Shapes: R rows, n slots, m recalled tokens, K candidates.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafters.base import Lattice
from drafters.prompt_lookup import Continuation

LONGEST = 16  # matches count up to here


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
    tokens_Rn, matched_Rn = found.tokens[:, :slots], found.matches(slots, LONGEST)
    tokens_Rn = torch.where(matched_Rn > 0, tokens_Rn, lattice.ids[..., -1])
    is_it_RnK = lattice.ids == tokens_Rn[..., None]
    column_Rn = torch.where(is_it_RnK.any(-1), is_it_RnK.byte().argmax(-1), lattice.ids.shape[2] - 1)
    ids = lattice.ids.scatter(2, column_Rn[..., None], tokens_Rn[..., None])
    return replace(lattice, ids=ids), Recalled(column_Rn, matched_Rn, found.tokens[:, slots:])
