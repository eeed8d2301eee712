"""The draft as a tree: the best continuations of the anchor that the corrected lattice holds, most probable first.

A walk takes one path through the lattice. A pass of the target over a few more tokens costs hardly more, so under the
rule match the decoder submits the `size` most probable nodes of all paths. The probability of a node is that of its
path, the product of the transition probabilities softmax(S(. | i)); so the parent of a chosen node is always chosen.

Above temperature 0 the target's own noise is known beforehand: it takes the token that wins the race of exponential
clocks. The scores then carry that noise, as in the walk, and name the tokens that are likely to win.

Shapes: R rows, n slots, K candidates, W paths kept a slot, N nodes.
"""

import torch
from torch import Tensor

from dcoco.corrector import Scores
from dcoco.walk import target_race
from drafters.base import Draft, Lattice
from verifier.sampling import SamplingBatch
from verifier.tree import Tree

STEP_COST = 1e-3  # taken off a path's log-probability a slot, so that a child comes after its parent even at certainty


def grow(
    lattice: Lattice, scores: Scores, batch: SamplingBatch, positions: Tensor, limits: Tensor, size: int
) -> Draft:
    """Choose the `size` most probable nodes of each row, none deeper than its limit.

    Args:
        positions: int64 [R, n], the absolute position of each slot's token.
        limits: int64 [R], slots that each row may use.
    """
    rows, slots, candidates = lattice.ids.shape
    width = min(size, candidates)
    row = torch.arange(rows, device=lattice.ids.device)[:, None]
    race = target_race(lattice, batch, positions)

    reach_RW, chosen_RW = _log_probs(scores.first, race, 0).topk(width)
    parent_RW = torch.zeros_like(chosen_RW)
    reach, chosen, parents = [reach_RW - STEP_COST], [chosen_RW], [parent_RW]
    for slot in range(1, slots):
        step_RKK = _log_probs(scores.rest[:, slot - 1], race, slot)
        onward_RWK = reach[-1][..., None] + step_RKK[row, chosen[-1]]
        reach_RW, flat_RW = onward_RWK.flatten(1).topk(width)
        parent_RW = flat_RW // candidates
        reach.append(reach_RW - STEP_COST)
        chosen.append(flat_RW - parent_RW * candidates)
        parents.append(parent_RW + ((slot - 1) * width + 1))  # as a query of the tree of all paths kept
    reach_RnW = torch.stack(reach, dim=1)
    reach_RnW = reach_RnW.masked_fill(
        torch.arange(slots, device=limits.device)[:, None] >= limits[:, None, None], -torch.inf
    )
    best_RN, node_RN = reach_RnW.flatten(1).topk(min(size, slots * width))
    place = torch.zeros(rows, slots * width + 1, dtype=torch.int64, device=limits.device)  # 0: the anchor
    place.scatter_(1, node_RN + 1, torch.arange(1, node_RN.shape[1] + 1, device=limits.device).expand_as(node_RN))
    valid_RN = best_RN > -torch.inf
    parents_RN = place.gather(1, torch.cat(parents, dim=1).gather(1, node_RN)).masked_fill(~valid_RN, 0)
    column_RN = torch.cat(chosen, dim=1).gather(1, node_RN)
    tokens_RN = lattice.ids.flatten(1).gather(1, node_RN // width * candidates + column_RN)
    return Draft(tokens_RN, tree=Tree.build(parents_RN, valid_RN, slots))


def _log_probs(scores: Tensor, race: tuple[Tensor, Tensor] | None, slot: int) -> Tensor:
    """Log-probabilities [..., K] of scores [R, K] or [R, K, K], given the noise of the target's draw."""
    if race is not None:
        temperature_R, noise_RnK = race
        shape = (-1,) + (1,) * (scores.ndim - 2)
        scores = scores / temperature_R.view(*shape, 1) - noise_RnK[:, slot].view(*shape, scores.shape[-1])
    return scores.log_softmax(-1)
