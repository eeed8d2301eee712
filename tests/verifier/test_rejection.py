"""The rejection rules are lossless: by exact enumeration, by sampling whole texts, and with controls that must fail.

Toy model throughout: V tokens, a target whose next-token law depends on the position and the previous token, and a
walk that draws from K candidates a position, given the previous token. Shapes as in `verifier.rejection`; texts are L
tokens long.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from verifier import rejection
from verifier.rejection import (
    Verdict,
    accept_probability,
    residual,
    verify_match,
    verify_one_hot,
    verify_sampled,
    verify_tree,
)
from verifier.sampling import SamplingBatch, SamplingParams, Stream, draw, exponential_noise, probabilities
from verifier.tree import Tree


@dataclass
class Toy:
    target: Tensor  # [L, V, V]: p of the token at a position, given the previous token
    candidates: Tensor  # [L, K] distinct ids
    q: Tensor  # [L, V, K]: the walk's law over the candidates, given the previous token

    @classmethod
    def random(cls, vocab: int, k: int, length: int, seed: int) -> "Toy":
        generator = torch.Generator().manual_seed(seed)

        def law(*shape: int) -> Tensor:
            return (1.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)).softmax(-1)

        candidates = torch.stack([torch.randperm(vocab, generator=generator)[:k] for _ in range(length)])
        return cls(law(length, vocab, vocab), candidates, law(length, vocab, k))

    def q_full(self) -> Tensor:
        """q over the whole vocabulary, [L, V, V]."""
        index = self.candidates.unsqueeze(1).expand_as(self.q)
        return torch.zeros_like(self.target).scatter_(-1, index, self.q)

    def law(self) -> Tensor:
        """What the target alone would write after a token 0: [V, ..., V], one dimension a position."""
        return extend(torch.ones((), dtype=torch.float64), self.target)


def extend(joint: Tensor, law: Tensor) -> Tensor:
    """Continue joint[V, ..., V] over t tokens with law[L, V, V] to all L positions; the token before the text is 0."""
    for t in range(joint.dim(), len(law)):
        joint = joint.unsqueeze(-1) * (law[0, 0] if t == 0 else law[t])
    return joint


# --- exact enumeration ---


def every_draft(vocab: int, n: int) -> Tensor:
    """All drafts [V^n, n], in the order of a flattened [V, ..., V]."""
    return torch.cartesian_prod(*[torch.arange(vocab)] * n).view(-1, n)


def previous(draft: Tensor) -> Tensor:
    """The token before each slot and before the bonus slot: [R, n+1]."""
    return torch.nn.functional.pad(draft, (1, 0))


def committed_law(toy: Toy, draft: Tensor, weight: Tensor, accept: Tensor, corrections: Tensor) -> Tensor:
    """The law [V, ..., V] of the first L = n+1 tokens, of a round and then plain decoding.

    draft[R, n] happens with probability weight[R] and its slots pass with probability accept[R, n];
    corrections[R, n+1, V] is the law of the token that ends the round at each slot (the last: the bonus).
    """
    vocab, n = corrections.shape[-1], draft.shape[1]
    law = torch.zeros([vocab] * (n + 1), dtype=torch.float64)
    reached = weight.clone()
    for slot in range(n + 1):
        ends = reached * (1 - accept[:, slot]) if slot < n else reached
        joint = torch.zeros([vocab] * (slot + 1), dtype=torch.float64)
        for row, prefix in enumerate(draft[:, :slot].tolist()):
            joint[tuple(prefix)] += ends[row] * corrections[row, slot]
        law += extend(joint, toy.target)
        if slot < n:
            reached = reached * accept[:, slot]
    return law


def sampled_walk_law(toy: Toy, believed_q: Tensor | None = None, residual_of=residual) -> Tensor:
    """The law under `verify_sampled`, from its own pieces; `believed_q`[L, V, K] is what the verifier is told."""
    length, vocab, k = toy.q.shape
    n = length - 1
    told = toy.q if believed_q is None else believed_q
    draft = every_draft(vocab, n)
    before, slot = previous(draft), torch.arange(length)
    p = toy.target[slot, before]  # [R, n+1, V]
    drawn = toy.q_full()[slot[:n], before[:, :n]].gather(-1, draft.unsqueeze(-1)).squeeze(-1)
    q = told[slot[:n], before[:, :n]]  # [R, n, K]
    candidates = toy.candidates[:n].expand(len(draft), n, k)
    q_draft = torch.where(candidates == draft.unsqueeze(-1), q, 0.0).sum(-1)
    accept = accept_probability(p[:, :n].gather(-1, draft.unsqueeze(-1)).squeeze(-1), q_draft)
    rest = residual_of(p[:, :n], candidates, q)
    corrections = torch.cat([rest / rest.sum(-1, keepdim=True), p[:, n:]], 1)
    return committed_law(toy, draft, drawn.prod(-1), accept, corrections)


SIZES = [(vocab, k, n) for vocab, k in ((3, 2), (4, 4), (5, 3), (5, 1)) for n in (1, 2, 3)]


@pytest.mark.parametrize(("vocab", "k", "n"), SIZES)
def test_sampled_walk_is_exact(same_law, vocab, k, n):
    toy = Toy.random(vocab, k, n + 1, seed=vocab + n)
    same_law(sampled_walk_law(toy), toy.law())
    toy.target[:, :, 0] = 0.0  # an impossible token, which the walk may draft
    toy.target /= toy.target.sum(-1, keepdim=True)
    same_law(sampled_walk_law(toy), toy.law())
    toy.q = toy.target.gather(-1, toy.candidates.unsqueeze(1).expand_as(toy.q)) + 1e-300
    toy.q /= toy.q.sum(-1, keepdim=True)  # where K = V: p = q
    same_law(sampled_walk_law(toy), toy.law())


@pytest.mark.parametrize(("vocab", "n"), [(3, 1), (4, 2), (5, 3)])
def test_one_hot_is_exact_for_every_draft(same_law, vocab, n):
    toy = Toy.random(vocab, 1, n + 1, seed=n)
    slot = torch.arange(n + 1)
    for draft in every_draft(vocab, n).split(1):
        p = toy.target[slot, previous(draft)]
        one = torch.ones(1, n, 1, dtype=torch.float64)
        accept = accept_probability(p[:, :n].gather(-1, draft.unsqueeze(-1)).squeeze(-1), one[..., 0])
        rest = residual(p[:, :n], draft.unsqueeze(-1), one)
        corrections = torch.cat([rest / rest.sum(-1, keepdim=True), p[:, n:]], 1)
        law = committed_law(toy, draft, torch.ones(1, dtype=torch.float64), accept, corrections)
        same_law(law, toy.law())


def verdict_law(toy: Toy, verdict: Verdict, weight: Tensor) -> Tensor:
    """The law [V, ..., V] of the first L tokens, of a round with row r's outcome at probability weight[R], and then
    plain decoding."""
    length, vocab, _ = toy.target.shape
    law = torch.zeros([vocab] * length, dtype=torch.float64)
    for a in range(length):
        joint = torch.zeros([vocab] * (a + 1), dtype=torch.float64)
        rows = verdict.accepted == a
        joint.index_put_(tuple(verdict.tokens[rows, : a + 1].t()), weight[rows], accumulate=True)
        law += extend(joint, toy.target)
    return law


@pytest.mark.parametrize(("vocab", "n"), [(3, 1), (4, 2), (5, 3)])
def test_match_is_exact_for_every_draft(same_law, vocab, n):
    """The whole rule, on all of the target's possible draws."""
    toy = Toy.random(vocab, 1, n + 1, seed=n)
    y = every_draft(vocab, n + 1)
    for draft in every_draft(vocab, n)[:: max(1, n * n)].split(1):
        p = toy.target[torch.arange(n + 1), previous(draft)].expand(len(y), -1, -1)
        weight = (
            p.gather(-1, y.unsqueeze(-1)).squeeze(-1).prod(-1)
        )  # the draws of a round are independent given the draft
        for length in range(n + 1):
            verdict = verify_match(y, draft.expand(len(y), n), torch.full((len(y),), length))
            same_law(verdict_law(toy, verdict, weight), toy.law())


def random_draft_tree(random: torch.Generator, vocab: int, nodes: int, levels: int) -> tuple[Tensor, Tree, Tensor]:
    """Tokens [1, N] of a random tree with distinct siblings, the tree, and each query's last token [1, N + 1]."""
    tokens, parents, depths, taken = [], [], [0], {(0, -1)}
    while len(tokens) < nodes:
        parent = int(torch.randint(len(depths), (1,), generator=random))
        token = int(torch.randint(vocab, (1,), generator=random))
        if depths[parent] < levels and (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
    valid = torch.rand(1, nodes, generator=random) < 0.9
    return torch.tensor([tokens]), Tree.build(torch.tensor([parents]), valid, levels), torch.tensor([[0, *tokens]])


@pytest.mark.parametrize(("vocab", "nodes", "levels"), [(3, 1, 1), (3, 4, 2), (3, 5, 3), (4, 4, 2), (5, 3, 3)])
def test_trees_are_exact_for_every_draw(same_law, vocab, nodes, levels):
    """`verify_tree` on all of the target's possible draws at all queries, for trees of any shape."""
    random = torch.Generator().manual_seed(vocab + nodes)
    toy = Toy.random(vocab, 1, levels + 1, seed=nodes)
    y = every_draft(vocab, nodes + 1)
    for _ in range(6):
        tokens, tree, last = random_draft_tree(random, vocab, min(nodes, vocab * levels), levels)
        p = toy.target[tree.depths[0], last[0]].expand(len(y), -1, -1)
        weight = p.gather(-1, y.unsqueeze(-1)).squeeze(-1).prod(-1)
        every = [part.expand(len(y), *part.shape[1:]) for part in (tree.parents, tree.valid, tree.sees, tree.depths)]
        verdict = verify_tree(y, tokens.expand(len(y), -1), Tree(*every), levels)
        same_law(verdict_law(toy, verdict, weight), toy.law())


@pytest.mark.parametrize(
    "filters", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.6}, {"top_k": 3, "top_p": 0.7}, {"top_k": 1}]
)
@pytest.mark.parametrize("ties", [False, True])
def test_filters_that_remove_drafted_tokens_stay_exact(same_law, filters, ties):
    """p after the filters: one-hot, with ties, and with zeros where the walk drafts."""
    toy = Toy.random(5, 3, 3, seed=11)
    logits = toy.target.log()
    if ties:
        logits = logits.round()
    batch = SamplingBatch.stack([SamplingParams(temperature=0.7, **filters)] * len(logits), range(len(logits)))
    toy.target = probabilities(logits, batch)
    assert toy.target.dtype == torch.float64 and (toy.target == 0).any()
    same_law(sampled_walk_law(toy), toy.law())
    one = Toy(toy.target, toy.candidates[:, :1], torch.ones_like(toy.q[..., :1]))  # a draft that was not drawn
    same_law(sampled_walk_law(one), one.law())


def test_control_unnormalised_q():
    toy = Toy.random(5, 3, 3, seed=1)
    assert (sampled_walk_law(toy, believed_q=1.2 * toy.q) - toy.law()).abs().max() > 1e-3


def test_control_predecessor_off_by_one():
    """q of the token two places before instead of the one before."""
    toy = Toy.random(5, 3, 3, seed=1)
    shifted = toy.q.clone()
    shifted[1] = toy.q[1, 0]
    assert (sampled_walk_law(toy, believed_q=shifted) - toy.law()).abs().max() > 1e-3


def test_control_rows_mixed_up():
    """The verifier is told the q of the row beside."""
    n = 40_000
    toy = [Toy.random(4, 4, 2, seed=seed) for seed in (0, 1)]
    p = torch.stack([t.target[:, 0] for t in toy]).float().repeat(n // 2, 1, 1)
    q = torch.stack([t.q[:1, 0] for t in toy]).float().repeat(n // 2, 1, 1)
    ids = torch.stack([t.candidates[:1] for t in toy]).repeat(n // 2, 1, 1)
    batch, positions, lengths = sampled(n), torch.arange(2).expand(n, 2), torch.ones(n, dtype=torch.int64)
    noise = exponential_noise(batch.seed, positions[:, :1], Stream.WALK, ids)
    draft = ids.gather(-1, (q / noise).argmax(-1, keepdim=True)).squeeze(-1)
    for told, exact in ((q, True), (q.roll(1, 0), False)):
        verdict = verify_sampled(p, draft, lengths, ids, told, batch, positions)
        pvalue = g_test(verdict.tokens[::2, :1], toy[0].target[0, 0])
        assert pvalue > 1e-3 if exact else pvalue < 1e-9


def test_control_residual_restricted_to_the_candidates():
    toy = Toy.random(5, 3, 3, seed=1)

    def restricted(p: Tensor, candidates: Tensor, q: Tensor) -> Tensor:
        return residual(p, candidates, q) * torch.zeros_like(p).scatter_(-1, candidates, 1.0) + 1e-9

    assert (sampled_walk_law(toy, residual_of=restricted) - toy.law()).abs().max() > 1e-3


def test_control_marginal_q():
    """The drafter's distribution before correction is not what the token was drawn from."""
    toy = Toy.random(5, 3, 3, seed=1)
    marginal = toy.q.clone()
    first = toy.q_full()[0, 0]
    marginal[1] = first @ toy.q[1]
    assert (sampled_walk_law(toy, believed_q=marginal) - toy.law()).abs().max() > 1e-3


def test_zero_probability_is_refused_even_at_u_zero(monkeypatch):
    p = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    draft, candidates, q = torch.zeros(1, 1).long(), torch.tensor([[[0, 1]]]), torch.tensor([[[0.0, 1.0]]])
    lengths, positions, batch = torch.ones(1).long(), torch.arange(2).view(1, 2), sampled(1)
    monkeypatch.setattr(rejection, "uniform_noise", lambda seed, position, stream: torch.zeros(position.shape))
    for verdict in (
        verify_one_hot(p, draft, lengths, batch, positions),
        verify_sampled(p, draft, lengths, candidates, q, batch, positions),
        verify_sampled(p, draft, lengths, candidates, 1 - q, batch, positions),
    ):
        assert verdict.accepted.tolist() == [0] and verdict.tokens[0, 0] == 1
    # Control: a comparison that isn't strict would let it pass. A u just below 0 makes `u < a` what `0 <= a` is.
    monkeypatch.setattr(rejection, "uniform_noise", lambda seed, position, stream: torch.full(position.shape, -1e-30))
    assert verify_one_hot(p, draft, lengths, batch, positions).accepted.tolist() == [1]


# --- whole texts, many seeds at once ---


def sampled(rows: int, first_seed: int = 0) -> SamplingBatch:
    return SamplingBatch.stack([SamplingParams(temperature=1.0)] * rows, range(first_seed, first_seed + rows))


@dataclass
class Texts:
    tokens: Tensor  # [R, L]
    rounds: float  # mean rounds a text


def decode(toy: Toy, rule: str, rows: int, block: int, walk_stream: Stream = Stream.WALK) -> Texts:
    """Write `rows` texts of L tokens by rounds of draft and verification, each row at its own position."""
    length, _, k = toy.q.shape
    batch = sampled(rows)
    target, q_table = toy.target.float(), toy.q.float()
    last_position = length - 1
    text = torch.zeros(rows, length + block + 2, dtype=torch.int64)  # column 0 is the token before the text
    done = torch.zeros(rows, dtype=torch.int64)
    row = torch.arange(rows)
    rounds = 0
    while int(done.min()) < length:
        rounds += int((done < length).sum())
        positions = done.unsqueeze(-1) + torch.arange(block + 1)
        lengths = (length - 1 - done).clamp(0, block)  # drafts and a last token fit
        slot = positions.clamp(max=last_position)
        # The walk: each token from the candidates, given the one before.
        before = text[row, done].unsqueeze(-1)
        q = torch.empty(rows, block, k)
        for t in range(block):
            q[:, t] = q_table[slot[:, t], before[:, t]]
            ids = toy.candidates[slot[:, t]].unsqueeze(1)
            noise = exponential_noise(batch.seed, positions[:, t : t + 1], walk_stream, ids)
            best = (q[:, t : t + 1] / noise).argmax(-1)
            before = torch.cat([before, ids[:, 0].gather(1, best)], 1)
        draft, p = before[:, 1:], target[slot, before]
        if rule == "match":
            verdict = verify_match(draw(p, batch, positions), draft, lengths)
        elif rule == "one_hot":
            verdict = verify_one_hot(p, draft, lengths, batch, positions)
        else:
            candidates = toy.candidates[slot[:, :block]]
            verdict = verify_sampled(p, draft, lengths, candidates, q, batch, positions)
        committed = torch.arange(block + 1) <= verdict.accepted.unsqueeze(-1)
        committed &= positions < length
        text[row.unsqueeze(-1).expand_as(positions)[committed], positions[committed] + 1] = verdict.tokens[committed]
        done = (done + verdict.accepted + 1).clamp(max=length)
    return Texts(text[:, 1 : length + 1], rounds / rows)


def g_test(tokens: Tensor, law: Tensor) -> float:
    """p-value of the texts tokens[R, L] under law[V, ..., V]; rare texts are pooled."""
    code = torch.zeros(len(tokens), dtype=torch.int64)
    for column in tokens.t():
        code = code * law.shape[0] + column
    seen = torch.bincount(code, minlength=law.numel()).numpy()
    expected = law.flatten().numpy() * len(tokens)
    rare = expected < 8
    if rare.any():
        seen = np.append(seen[~rare], seen[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return stats.power_divergence(seen, expected, lambda_="log-likelihood").pvalue


ROWS = 40_000


@pytest.mark.parametrize("stream", [Stream.WALK, Stream.TARGET])
@pytest.mark.parametrize("rule", ["match", "one_hot", "sampled"])
def test_texts_follow_the_target(rule, stream):
    toy = Toy.random(5, 3, 4, seed=3)
    texts = decode(toy, rule, ROWS, block=3, walk_stream=stream)
    assert g_test(texts.tokens, toy.law()) > 1e-3


def test_match_writes_what_plain_sampling_writes():
    toy = Toy.random(5, 3, 4, seed=3)
    plain = decode(toy, "match", 2000, block=0)
    coupled = decode(toy, "match", 2000, block=3, walk_stream=Stream.TARGET)
    independent = decode(toy, "match", 2000, block=3)
    assert torch.equal(plain.tokens, coupled.tokens) and torch.equal(plain.tokens, independent.tokens)
    assert coupled.rounds < independent.rounds < plain.rounds == 4
    # A walk that races the target's noise is accepted almost as often as the sampled walk is.
    assert coupled.rounds < 1.1 * decode(toy, "sampled", 2000, block=3).rounds


def test_control_walk_that_shares_the_noise_of_the_correction():
    toy = Toy.random(5, 3, 4, seed=3)
    assert g_test(decode(toy, "sampled", ROWS, block=3, walk_stream=Stream.RESIDUAL).tokens, toy.law()) < 1e-9


def test_control_length_chosen_by_the_sampled_token():
    """p = q = (.6, .4), submitting only drafts with q >= .5, gives .84; match and one-hot stay exact."""
    n = 20_000
    p = torch.tensor([0.6, 0.4]).expand(n, 2, 2)
    batch, positions = sampled(n), torch.arange(2).expand(n, 2)
    draft = draw(p[:, :1], batch, positions[:, :1], Stream.WALK)
    lengths = (draft[:, 0] == 0).long()
    biased = verify_sampled(p, draft, lengths, torch.arange(2).expand(n, 1, 2), p[:, :1], batch, positions)
    assert abs((biased.tokens[:, 0] == 0).float().mean() - 0.84) < 0.015
    for exact in (
        verify_one_hot(p, draft, lengths, batch, positions),
        verify_match(draw(p, batch, positions), draft, lengths),
    ):
        assert abs((exact.tokens[:, 0] == 0).float().mean() - 0.6) < 0.015


# --- edges ---


def all_rules(
    p: Tensor, draft: Tensor, lengths: Tensor, batch: SamplingBatch, q: Tensor | None = None
) -> list[Verdict]:
    """All three verdicts; the sampled walk has every token as a candidate, and q = p if not given."""
    rows, slots, vocab = p.shape
    positions = torch.arange(slots).expand(rows, slots)
    candidates = torch.arange(vocab).expand(rows, slots - 1, vocab)
    return [
        verify_match(draw(p, batch, positions), draft, lengths),
        verify_one_hot(p, draft, lengths, batch, positions),
        verify_sampled(p, draft, lengths, candidates, p[:, :-1] if q is None else q, batch, positions),
    ]


def test_shapes_and_lengths():
    rows, n, vocab = 64, 3, 6
    p = torch.randn(rows, n + 1, vocab, generator=torch.Generator().manual_seed(0)).softmax(-1)
    batch, lengths = sampled(rows), torch.arange(rows) % (n + 1)
    draft = draw(p[:, :n], batch, torch.arange(n).expand(rows, n), Stream.WALK)
    for verdict in all_rules(p, draft, lengths, batch):
        assert verdict.tokens.shape == (rows, n + 1) and verdict.tokens.dtype == torch.int64
        assert verdict.accepted.shape == (rows,) and verdict.accepted.dtype == torch.int64
        assert ((verdict.accepted >= 0) & (verdict.accepted <= lengths)).all()
        for r, a in enumerate(verdict.accepted.tolist()):
            assert torch.equal(verdict.tokens[r, :a], draft[r, :a])
    assert torch.equal(all_rules(p, draft, lengths, batch)[2].accepted, lengths)  # p = q: everything passes


def test_no_draft_is_plain_sampling():
    p = torch.tensor([0.1, 0.2, 0.7]).expand(5000, 1, 3)
    batch = sampled(5000)
    for verdict in all_rules(p, torch.empty(5000, 0, dtype=torch.int64), torch.zeros(5000).long(), batch):
        assert verdict.tokens.shape == (5000, 1) and (verdict.accepted == 0).all()
        assert g_test(verdict.tokens, p[0, 0].double()) > 1e-3


def test_only_the_first_rejection_counts():
    p = torch.eye(4)[[1, 2, 3, 0]].unsqueeze(0)  # the text must be 1 2 3 0
    for draft, accepted in (([1, 2, 3], 3), ([1, 0, 3], 1), ([0, 2, 3], 0)):
        for verdict in all_rules(p, torch.tensor([draft]), torch.tensor([3]), sampled(1)):
            assert verdict.accepted.tolist() == [accepted]
            assert verdict.tokens[0, : accepted + 1].tolist() == [1, 2, 3, 0][: accepted + 1]


def test_greedy_and_near_greedy_rows_take_the_argmax():
    settings = [SamplingParams(), SamplingParams(temperature=1e-5), SamplingParams(temperature=1.0, top_k=1)]
    logits = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(4))
    logits[..., 6:] = -torch.inf  # vocabulary padding
    best = logits.argmax(-1)
    draft = best[:, :3].clone()
    draft[:, 2] = (draft[:, 2] + 1) % 6
    q = torch.full((3, 3, 8), 1 / 8)
    for batch in (
        SamplingBatch.stack(settings, [1, 2, 3]),
        SamplingBatch.stack([SamplingParams()] * 3, [1, 2, 3]),
    ):
        for verdict in all_rules(probabilities(logits, batch), draft, torch.tensor([3, 3, 2]), batch, q):
            assert verdict.accepted.tolist() == [2, 2, 2]
            assert torch.equal(verdict.tokens[:, :3], best[:, :3])


def test_an_empty_residual_falls_back_to_p():
    p, ids = torch.tensor([[0.25, 0.75, 0.0]]), torch.tensor([[1, 0]])
    assert torch.equal(residual(p, ids, torch.tensor([[0.75, 0.25]])), p)
    assert torch.equal(residual(p, ids, torch.tensor([[1.0, 1.0]])), p)
    assert residual(p, ids, torch.tensor([[1.0, 0.0]])).tolist() == [[0.25, 0.0, 0.0]]
    p_draft, q_draft = torch.tensor([0.0, 0.0, 0.2, 0.2, 0.2]), torch.tensor([0.0, 0.5, 0.0, 0.8, 0.1])
    assert accept_probability(p_draft, q_draft).tolist() == [0.0, 0.0, 1.0, 0.25, 1.0]
