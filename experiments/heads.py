"""The kinds of correctors, ours and the rivals: what each learns from the same lattices, and how far it gets.

Each slot is scored after its true predecessor (teacher forcing); losses are weighted exp(-(t - 1) / gamma).

- contextual (ours), selector (DFlash 2) and lilicorr: cross-entropy over the K candidates, wherever the truth is among
  the candidates of this slot and of all before it.
- markov (DSpark): cross-entropy over the whole draft vocabulary, wherever all before could be drafted; and the
  confidence head's binary cross-entropy on whether the best token there is the true one.

Shapes: N blocks, n slots, K candidates, S slots that count, W draft vocabulary, H hidden size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor

from dcoco.corrector import Corrector, CorrectorConfig, Scores, with_anchor
from dcoco.decoder import TREE_SIZE
from dcoco.lilicorr import LiLiCorr, LiLiCorrConfig
from dcoco.registry import CORRECTORS
from dcoco.selector import Selector, SelectorConfig
from dcoco.tree import grow
from dcoco.walk import walk
from drafters.base import Context
from drafters.dspark import DSparkConfig, DSparkDrafter
from experiments.lattices import Blocks, Examples
from experiments.precision import autocast
from experiments.train_drafter import walk_rounds
from verifier.rejection import verify_tree
from verifier.sampling import SamplingBatch, SamplingParams
from verifier.target import Target

KINDS = (*CORRECTORS, "markov")


def new_head(config: DictConfig, target: Target, drafter: Any) -> Any:
    """An untrained corrector of a kind, for the lattices of a drafter; for `markov` DSpark's heads on it."""
    hidden = target.hidden_size
    if config.kind == "markov":
        return DSparkDrafter(drafter, target, DSparkConfig(config.rank, config.gated))
    if config.kind == "selector":
        selector = Selector(SelectorConfig(hidden, len(drafter.draft_ids), config.rank))
        selector.draft_ids.copy_(drafter.draft_ids)
        return selector.to(target.device)
    if config.kind == "lilicorr":
        shape = LiLiCorrConfig(hidden, drafter.block_size, drafter.config.candidates, config.width)
        return LiLiCorr(shape).to(target.device)
    return Corrector(CorrectorConfig(hidden, config.width, config.pair_width)).to(target.device)


def teacher_forced_loss(
    corrector: Any, examples: Examples, embedding: Tensor, gamma: float, unary: bool = True
) -> Tensor:
    """Weighted cross-entropy of the true candidate after its true predecessor; `embedding` [V, H] is the target's.

    Without `unary` the drafter's log-probabilities are no part of the scores.
    """
    lattice = examples.lattice
    is_truth = lattice.ids == examples.labels[..., None]
    reachable = is_truth.any(-1).long().cumprod(-1).bool()  # the truth is on the lattice, here and at all slots before
    truth_Nn = is_truth.long().argmax(-1)
    if isinstance(corrector, Corrector):
        scores_SK = contextual_scores(corrector, examples, reachable, truth_Nn, embedding)
    else:
        scores = corrector(lattice, corrector.token_table(embedding.float()))
        block = torch.arange(len(truth_Nn), device=truth_Nn.device)[:, None]
        slot = torch.arange(truth_Nn.shape[1] - 1, device=truth_Nn.device)
        rest = scores.rest[block, slot, truth_Nn[:, :-1]]
        scores_SK = torch.cat([scores.first[:, None], rest], dim=1)[reachable]
    if not unary:
        scores_SK = scores_SK - lattice.log_probs[reachable]
    losses_S = F.cross_entropy(scores_SK, truth_Nn[reachable], reduction="none")
    return _faded_mean(losses_S, reachable, gamma)


def contextual_scores(
    corrector: Corrector, examples: Examples, reachable: Tensor, truth_Nn: Tensor, embedding: Tensor
) -> Tensor:
    """Scores [S, K] of the reachable slots after their true predecessors, without those of all other pairs."""
    lattice = examples.lattice
    used, column_NmK = torch.unique(with_anchor(lattice), return_inverse=True)  # each token projected once
    tokens_NmKD = F.embedding(column_NmK, corrector.token_table(embedding[used].float()))
    candidates_NmKD, states_NnM = corrector.represent(lattice, tokens_NmKD)
    index = F.pad(truth_Nn[:, :-1], (1, 0))[:, :, None, None].expand(-1, -1, 1, candidates_NmKD.shape[-1])
    before_NnD = candidates_NmKD[:, :-1].gather(2, index).squeeze(2)
    before_SM, _ = corrector.pair_both(before_NnD[reachable]).chunk(2, dim=-1)
    _, after_SKM = corrector.pair_both(candidates_NmKD[:, 1:][reachable]).chunk(2, dim=-1)
    after_SKM = after_SKM + states_NnM[reachable][:, None]
    if examples.recalled is not None:
        # The recalled candidate, where the truth has followed what was recalled so far.
        column_Nn, followed_Nn = examples.recalled.column, torch.ones_like(reachable)
        followed_Nn[:, 1:] = truth_Nn[:, :-1] == column_Nn[:, :-1]
        matched_S = (examples.recalled.matched * followed_Nn)[reachable]
        candidate_K = torch.arange(lattice.ids.shape[2], device=matched_S.device)
        is_it_SK1 = (candidate_K == column_Nn[reachable][:, None])[..., None]
        after_SKM = after_SKM + is_it_SK1 * corrector.pair_recalled(matched_S)[:, None]
    return lattice.log_probs[reachable] + corrector.pair(before_SM[:, None] + after_SKM)


def markov_loss(drafter: DSparkDrafter, examples: Examples, gamma: float) -> Tensor:
    """Weighted cross-entropy over the draft vocabulary after the true predecessor, plus that of the confidence."""
    lattice, labels, words = examples.lattice, examples.labels, len(drafter.base.draft_ids)
    column_Nn = torch.where(labels >= 0, drafter.column_of[labels.clamp(min=0)], words)
    reached = F.pad((column_Nn < words).long().cumprod(-1)[:, :-1], (1, 0), value=1).bool() & (labels >= 0)
    before_Nn = torch.cat([drafter.column_of[lattice.anchors][:, None], column_Nn[:, :-1]], dim=1)
    hidden_SH, truth_S = lattice.hidden[reached].to(drafter.dtype), column_Nn[reached]
    with torch.no_grad():
        base_SW = drafter.base.logits(hidden_SH)
    correction_SW, confidence_S = drafter.heads(hidden_SH, before_Nn[reached])
    logits_SW, known = base_SW.float() + correction_SW.float(), truth_S < words
    losses_S = F.cross_entropy(logits_SW, truth_S.masked_fill(~known, -100), ignore_index=-100, reduction="none")
    right_S = (logits_SW.detach().max(-1).indices == truth_S).float()
    doubts_S = F.binary_cross_entropy_with_logits(confidence_S.float(), right_S, reduction="none")
    drafted = reached & (column_Nn < words)
    return _faded_mean(losses_S[known], drafted, gamma) + _faded_mean(doubts_S, reached, gamma)


def _faded_mean(values_S: Tensor, counts: Tensor, gamma: float) -> Tensor:
    """Mean of the values of the slots that count (bool [N, n]), weighted exp(-(t - 1) / gamma)."""
    fading = torch.exp(-torch.arange(counts.shape[1], device=counts.device) / gamma)
    weights_S = fading.expand(counts.shape)[counts]
    return (values_S * weights_S).sum() / weights_S.sum().clamp(min=1e-6)


@torch.no_grad()
def lengths(
    head: Any, answers: list[Blocks], embedding: Tensor, candidates: int | None = None, unary: bool = True
) -> dict[str, float]:
    """Mean acceptance lengths of rounds walked through answers: the corrected walk and tree (DSpark drafts no trees),
    the plain drafter, the lattice's best path."""
    rounds: dict[str, int] = {}
    device = embedding.device
    is_corrector = not isinstance(head, DSparkDrafter)
    with autocast(device, embedding.dtype):
        table = head.token_table(embedding.float()) if is_corrector else None
    for answer in answers:
        part = answer.select(slice(None), is_corrector and head.recalls, candidates)
        lattice, labels = part.lattice, part.labels
        greedy = SamplingBatch.stack([SamplingParams()] * len(labels), [0] * len(labels), device)
        hits = {"top1": lattice.ids[..., 0] == labels, "oracle": (lattice.ids == labels[..., None]).any(-1)}
        accepted = {}
        with autocast(device, embedding.dtype):
            if table is None:
                context = Context(lattice.anchors[:, None], labels, greedy, sampled=False)
                draft = head.choose(lattice.anchors, lattice.hidden.to(head.dtype), context)
            else:
                scores: Scores = head(lattice, table, part.recalled)
        if table is not None:
            if not unary:
                plain = lattice.log_probs
                scores = Scores(scores.first - plain[:, 0], scores.rest - plain[:, 1:, None])
            draft = walk(lattice, scores, greedy, labels)
            unlimited = torch.full_like(lattice.anchors, labels.shape[1])
            tree = grow(lattice, scores, greedy, labels, unlimited, TREE_SIZE)
            assert tree.tree is not None
            truth = F.pad(labels, (0, 1), value=-1).gather(1, tree.tree.depths)
            accepted["tree"] = verify_tree(truth, tree.tokens, tree.tree, labels.shape[1]).accepted
        hits["selected"] = draft.tokens == labels
        accepted |= {name: hit.long().cumprod(-1).sum(-1) for name, hit in hits.items()}
        for name, counts in accepted.items():
            rounds[name] = rounds.get(name, 0) + walk_rounds(counts.tolist())
    tokens = sum(len(answer) for answer in answers)
    return {name: round(tokens / max(1, count), 4) for name, count in sorted(rounds.items())}
