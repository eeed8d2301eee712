"""The walk: one candidate a slot, left to right, each the best continuation of the one just chosen (prefix-first).

Only the walk is sequential, and it only looks scores up: no model runs in it. At temperature 0 a slot takes its best
score. Above, it draws from q(j | i) = softmax(S(j | i) / T) over the K candidates, by a race of exponential clocks:

- under the rules match and one-hot the draft may be anything, so the race uses the very noise with which the target
  will draw at that position. Drafter and target are then coupled: where q is close to p, both take the same token
  (Gumbel coupling; Daliri, Musco and Suresh 2024, arXiv 2408.07978).
- under the sampled walk the noise is its own, and q is returned for the verifier.

Shapes: R rows, n slots, K candidates.
"""

import torch
from torch import Tensor

from dcoco.corrector import Scores
from drafters.base import Draft, Lattice
from verifier.sampling import SamplingBatch, Stream, exponential_noise


def walk(lattice: Lattice, scores: Scores, batch: SamplingBatch, positions: Tensor, sampled: bool = False) -> Draft:
    """Choose a path; unless it is sampled, say how probable each of its beginnings is.

    Args:
        positions: int64 [R, n], the absolute position of each slot's token.
        sampled: draw with noise of its own and return q, for `verify_sampled`; else couple to the target's draw.
    """
    rows = torch.arange(len(lattice.ids), device=lattice.ids.device)
    race = target_race(lattice, batch, positions, Stream.WALK if sampled else Stream.TARGET)
    chosen: list[Tensor] = []
    log_probs: list[Tensor] = []  # of each step
    q: list[Tensor] = []
    scores_RK = scores.first
    for slot in range(lattice.ids.shape[1]):
        if slot:
            scores_RK = scores.rest[rows, slot - 1, chosen[-1]]
        raced_RK = scores_RK
        if race is not None:
            temperature_R, noise_RnK = race
            scores_RK = scores_RK / temperature_R[:, None]
            raced_RK = scores_RK - noise_RnK[:, slot]
        chosen.append(raced_RK.argmax(-1))
        if sampled:
            q.append(_one_hot_where_greedy(scores_RK.softmax(-1), chosen[-1], batch))
        else:
            log_probs.append(raced_RK.amax(-1) - raced_RK.logsumexp(-1))
    path_Rn = torch.stack(chosen, dim=1)
    tokens = lattice.ids.gather(2, path_Rn[..., None]).squeeze(-1)
    if sampled:
        return Draft(tokens, lattice.ids, torch.stack(q, dim=1))
    return Draft(tokens, log_probs=torch.stack(log_probs, dim=1).cumsum(1))


def target_race(
    lattice: Lattice, batch: SamplingBatch, positions: Tensor, stream: Stream = Stream.TARGET
) -> tuple[Tensor, Tensor] | None:
    """Temperatures float32 [R] and the logarithms [R, n, K] of the exponential noise of each candidate: the winner of a
    race is the candidate whose score / temperature - log noise is largest. None where all rows are greedy; a greedy row
    beside others gets temperature 1 and no noise."""
    if batch.all_greedy:
        return None
    noise_RnK = exponential_noise(batch.seed, positions, stream, lattice.ids).log_()
    return torch.where(batch.temperature > 0, batch.temperature, 1.0), noise_RnK.mul_(
        (batch.temperature > 0)[:, None, None]
    )


def _one_hot_where_greedy(q_RK: Tensor, chosen_R: Tensor, batch: SamplingBatch) -> Tensor:
    if not batch.any_greedy:
        return q_RK
    one_hot = torch.zeros_like(q_RK).scatter_(-1, chosen_R[:, None], 1.0)
    return torch.where((batch.temperature == 0)[:, None], one_hot, q_RK)
