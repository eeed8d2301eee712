"""Which drafted tokens are committed: three rules, each of which keeps the target's distribution exactly.

The rule match also takes drafts that branch (`verify_tree`).

All take a whole batch, ragged by `lengths`, and know nothing but tensors. Common arguments:

    p          [R, n+1, V]  the target's distribution at slots 1..n and at the bonus slot (`sampling.probabilities`)
    draft      [R, n]       int64 drafted tokens, every entry a valid id, also beyond the row's length
    lengths    [R]          int64, row r drafted lengths[r] <= n tokens; 0 is plain decoding: a token from p[:, 0]
    positions  [R, n+1]     int64 absolute positions of the tokens that the slots predict
    batch                   the rows' `SamplingBatch`: their seeds, and whether all are greedy

Shapes: R rows, n drafted slots, V vocabulary, K candidates a slot. Slots count from 0 in the tensors.

A position's noise is used again when a later round drafts it again. That is harmless: what was drawn beyond the first
rejection had no influence on what was committed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from verifier.sampling import SamplingBatch, Stream, draw, uniform_noise
from verifier.tree import Tree


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """Row r commits tokens[r, :accepted[r] + 1]: its accepted drafts, then the correction or the bonus token."""

    tokens: Tensor  # [R, n+1] int64; what follows the committed tokens of a row has no meaning
    accepted: Tensor  # [R] int64, from 0 to the row's draft length
    drafted: Tensor  # [R] int64: tokens that were submitted
    path: Tensor | None = None  # [R, n+1] int64, of a tree: the query that ran each committed token's predecessor


def verify_match(y: Tensor, draft: Tensor, lengths: Tensor) -> Verdict:
    """Accept the draft while it equals y[R, n+1], the target's own tokens (from `sampling.draw`, or the argmax).

    y is what is committed, so the text is that of plain sampling with the same seed, whatever was drafted. A token d
    fixed in advance is accepted with probability P(y = d) = p(d), as by `verify_one_hot`.
    """
    return Verdict(y, _leading(y[:, : draft.shape[1]] == draft, lengths), lengths)


def verify_tree(y: Tensor, draft: Tensor, tree: Tree, levels: int) -> Verdict:
    """`verify_match` for a draft [R, N] that branches: from the anchor on, go to the child that equals y[R, N+1].

    y[r, i] is the target's own token after query i, drawn with the noise of its position. Siblings are distinct, so at
    most one path agrees with y all the way; y along it is committed. `levels` is the depth of the deepest node.
    """
    hit_RN = (draft == y.gather(1, tree.parents)) & tree.valid
    missed_RQ = pad(~hit_RN, (1, 0))
    alive_RQ = ~(tree.sees & missed_RQ[:, None, :]).any(-1)  # the node and all its ancestors were what y says
    path_Rn = (~alive_RQ).byte().argsort(dim=-1, stable=True)[:, : levels + 1]  # a parent's index is below its child's
    return Verdict(y.gather(1, path_Rn), alive_RQ.sum(-1) - 1, tree.valid.sum(-1), path_Rn)


def verify_one_hot(p: Tensor, draft: Tensor, lengths: Tensor, batch: SamplingBatch, positions: Tensor) -> Verdict:
    """Speculative sampling of a draft that was not sampled, or whose q is unknown: q is taken as one-hot at d.

    Accept d with probability p(d); on rejection sample p with d removed. Leviathan et al. 2022 (arXiv 2211.17192),
    algorithm 1, with q(d) = 1. At temperature 0: accept iff d is the argmax. The draft may be chosen in any way, also
    by a race with the noise of `Stream.TARGET`, but not with that of ACCEPT or RESIDUAL.
    """
    candidates = draft.unsqueeze(-1)
    return verify_sampled(p, draft, lengths, candidates, torch.ones_like(candidates, dtype=p.dtype), batch, positions)


def verify_sampled(
    p: Tensor, draft: Tensor, lengths: Tensor, candidates: Tensor, q: Tensor, batch: SamplingBatch, positions: Tensor
) -> Verdict:
    """Speculative sampling of a draft whose token d of each slot was drawn from q over K candidates.

    Accept d with probability min(1, p(d) / q(d)); on the first rejection sample norm(max(p - q, 0)) over the whole
    vocabulary; if all are accepted, sample the bonus token from p. Leviathan et al. 2022 (arXiv 2211.17192), algorithm
    1 and theorem 1; Chen et al. 2023 (arXiv 2302.01318), algorithm 2.

    candidates[R, n, K] are distinct ids, q[R, n, K] their probabilities given the draft's earlier tokens: exactly the
    distribution that d was drawn from, with the noise of `Stream.WALK` (or any independent of ACCEPT and RESIDUAL).
    Nothing is checked here: if q doesn't sum to 1, or d is no candidate, the output is not the target's. `lengths` may
    depend on a slot's q and the tokens before it, never on the token drawn there or later.
    """
    slots = draft.unsqueeze(-1)
    p_draft = p[:, :-1].gather(-1, slots).squeeze(-1)  # [R, n]
    q_draft = torch.where(candidates == slots, q, 0.0).sum(-1)
    # Strict: u can be 0, and a token with p(d) = 0 must not pass.
    accept = uniform_noise(batch.seed, positions[:, :-1], Stream.ACCEPT) < accept_probability(p_draft, q_draft)
    accepted = _leading(accept, lengths)

    # The last token of each row: a correction where a draft was refused, otherwise p itself (q = 0, at the slot of the
    # bonus or after a short draft). One slot a row, so only [R, V] is touched.
    row = torch.arange(len(draft), device=draft.device)
    q_last = pad(q, (0, 0, 0, 1))[row, accepted] * (accepted < lengths).unsqueeze(-1)
    weights = residual(p[row, accepted], pad(candidates, (0, 0, 0, 1))[row, accepted], q_last)
    last = accepted.unsqueeze(-1)  # [R, 1]
    token = draw(weights.unsqueeze(1), batch, positions.gather(1, last), Stream.RESIDUAL)
    return Verdict(pad(draft, (0, 1)).scatter(1, last, token), accepted, lengths)


def accept_probability(p_draft: Tensor, q_draft: Tensor) -> Tensor:
    """min(1, p(d) / q(d)), elementwise; 0 wherever p(d) = 0."""
    return torch.where(p_draft > 0, p_draft / q_draft, 0.0).clamp(max=1.0)


def residual(p: Tensor, candidates: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0), not normalised, of p[..., V] and q[..., K] at distinct candidates[..., K]; where that's all 0, p.

    It has no mass only where p = q, up to rounding; then a rejection is itself a rounding error, and p is right.
    """
    r = p.scatter_add(-1, candidates, -q.to(p.dtype)).clamp_(min=0.0)
    return torch.where(r.sum(-1, keepdim=True) > 0, r, p)


def _leading(accept: Tensor, lengths: Tensor) -> Tensor:
    """How many slots of accept[R, n] are true before the first that is false or beyond the row's length: [R] int64."""
    drafted = torch.arange(accept.shape[1], device=accept.device) < lengths.unsqueeze(-1)
    return (accept & drafted).long().cumprod(-1).sum(-1)
