"""The draft as a tree: the best continuations of the anchor that the corrected lattice holds, most probable first.

A walk takes one path through the lattice. A pass of the target over a few more tokens costs little more, so under the
rule match the decoder submits the most probable nodes of all paths. The probability of a node is that of its
path, the product of the transition probabilities softmax(S(. | i)); so the parent of a chosen node is always chosen.
A text that repeats itself outruns the lattice: a path that follows what was said before goes on beyond the last slot.

Above temperature 0 the target's own noise is known beforehand: it takes the token that wins the race of exponential
clocks. The scores then carry that noise, as in the walk, and name the tokens that are likely to win.

Shapes: R rows, n slots, K candidates, W paths kept a slot, m tokens beyond the lattice, N nodes.
"""

import math

import torch
from torch import Tensor

from dcoco.corrector import Scores
from dcoco.recall import Recalled
from dcoco.walk import target_race
from drafters.base import Draft, Lattice
from verifier.sampling import SamplingBatch
from verifier.tree import Tree

STEP_COST = 1e-3  # taken off a path's log-probability a slot, so that a child comes after its parent even at certainty
FLOOR = -1e3  # of a path's log-probability: far below, float32 can't tell the cost of a step any more


def grow(
    lattice: Lattice,
    scores: Scores,
    batch: SamplingBatch,
    positions: Tensor,
    limits: Tensor,
    size: int,
    recalled: Recalled | None = None,
    worth: float = 0.0,
) -> Draft:
    """Choose the most probable nodes of each row, at most K a slot, none deeper than its limit; the best come first.

    Args:
        positions: int64 [R, n], the absolute position of each slot's token.
        limits: int64 [R], how many tokens beyond the anchor each row's draft may reach.
        size: nodes at most.
        recalled: what the text recalls; where a path follows it through the whole lattice, it goes on beyond.
        worth: nodes less probable than this are left out.
    """
    rows, slots, candidates = lattice.ids.shape
    width = min(size, candidates)
    row = torch.arange(rows, device=lattice.ids.device)[:, None]
    race = target_race(lattice, batch, positions)
    first_RK = _log_probs(scores.first[:, None, None], race, 0)[:, 0, 0]
    rest_RnKK = _log_probs(scores.rest, race, 1)

    # By slot, W paths each: log-probability, candidate taken, and parent (a query of the tree of all paths kept).
    reach_RW, chosen_RW = first_RK.topk(width)
    reach, chosen, parents = [reach_RW], [chosen_RW], [torch.zeros_like(chosen_RW)]
    follows_RW = None if recalled is None else chosen_RW == recalled.column[:, :1]  # the recalled text so far
    for slot in range(1, slots):
        onward_RWK = reach[-1][..., None] + rest_RnKK[row, slot - 1, chosen[-1]]
        reach_RW, flat_RW = onward_RWK.flatten(1).topk(width)
        before_RW = flat_RW // candidates
        reach.append(reach_RW)
        chosen.append(flat_RW - before_RW * candidates)
        parents.append(before_RW + ((slot - 1) * width + 1))
        if recalled is not None and follows_RW is not None:
            follows_RW = follows_RW.gather(1, before_RW) & (chosen[-1] == recalled.column[:, slot : slot + 1])
    log_probs, parent = torch.cat(reach, dim=1), torch.cat(parents, dim=1)
    tokens = lattice.ids.gather(2, torch.stack(chosen, dim=1)).flatten(1)
    depth = torch.arange(1, slots + 1, device=limits.device).repeat_interleave(width)
    if recalled is not None and follows_RW is not None and (more := recalled.beyond.shape[1]):
        # One node a token, each as sure as the last step to a recalled token within the lattice.
        ahead_m = torch.arange(more, device=limits.device)
        last_R1 = follows_RW.byte().argmax(-1, keepdim=True)
        sure_R1 = _last_step(scores, recalled, None if race is None else race[0])[:, None] - STEP_COST
        found_R1 = follows_RW.any(-1, keepdim=True) & (recalled.matched[:, -1:] > 0)
        beyond_Rm = reach[-1].gather(1, last_R1) + sure_R1 * (ahead_m + 1)
        first = slots * width  # the query before the first of them
        parents_Rm = torch.where(ahead_m == 0, last_R1 + (first - width + 1), ahead_m + first)
        log_probs = torch.cat([log_probs, beyond_Rm.masked_fill(~found_R1, -torch.inf)], dim=1)
        parent, tokens = torch.cat([parent, parents_Rm], dim=1), torch.cat([tokens, recalled.beyond], dim=1)
        depth = torch.cat([depth, slots + 1 + ahead_m])

    log_probs = log_probs.masked_fill(depth > limits[:, None], -torch.inf)
    best_RN, node_RN = log_probs.topk(min(size, log_probs.shape[1]))
    valid_RN = best_RN > (math.log(worth) if worth else FLOOR)
    if valid_RN.device.type == "cpu":  # elsewhere asking how many there are would cost more than padding
        most = int(valid_RN.sum(-1).amax())
        best_RN, node_RN, valid_RN = best_RN[:, :most], node_RN[:, :most], valid_RN[:, :most]
    place = torch.zeros(rows, log_probs.shape[1] + 1, dtype=torch.int64, device=limits.device)  # 0: the anchor
    place.scatter_(1, node_RN + 1, torch.arange(1, node_RN.shape[1] + 1, device=limits.device).expand_as(node_RN))
    parents_RN = place.gather(1, parent.gather(1, node_RN)).masked_fill(~valid_RN, 0)
    levels = min(slots + (0 if recalled is None else recalled.beyond.shape[1]), node_RN.shape[1])
    return Draft(tokens.gather(1, node_RN), tree=Tree.build(parents_RN, valid_RN, levels), log_probs=best_RN)


def _last_step(scores: Scores, recalled: Recalled, temperature_R: Tensor | None) -> Tensor:
    """Log-probability [R] of the last slot's recalled token after the recalled token before it."""
    row, last = torch.arange(len(scores.first), device=scores.first.device), recalled.column[:, -1]
    scores_RK = scores.first if recalled.column.shape[1] == 1 else scores.rest[row, -1, recalled.column[:, -2]]
    if temperature_R is not None:
        scores_RK = scores_RK / temperature_R[:, None]
    return scores_RK.log_softmax(-1)[row, last]


def _log_probs(scores: Tensor, race: tuple[Tensor, Tensor] | None, first: int) -> Tensor:
    """Log-probabilities of scores [R, s, I, K] into the slots from index `first` on, given the noise of the target's
    draw, less the cost of a step; I counts the candidates before."""
    if race is not None:
        temperature_R, noise_RnK = race
        noise_RsK = noise_RnK[:, first : first + scores.shape[1]]
        scores = scores / temperature_R[:, None, None, None] - noise_RsK[:, :, None]
    return scores.log_softmax(-1) - STEP_COST
