"""Sampled text follows the target's law: whole rounds of the real engine against float64 probabilities, by G-tests."""

from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from scipy.stats import chi2, combine_pvalues

from dcoco import SamplingParams
from tests.models import costs_of, explicit_mask, llama, tiny_decoder
from verifier import rejection
from verifier.rejection import verify_sampled

TOKENS = 5  # an answer: the prefill's token, then about two rounds
REQUESTS = 9_600  # at least 20,000 rounds
LEAST = 5  # expected of a cell
SETTINGS = {"cool": {"temperature": 0.7, "top_p": 0.9375}, "warm": {"temperature": 1.0, "top_p": 0.875}}
PATHS = {
    "tree": ("match", "dcoco"),
    "match": ("match", "walk"),
    "one_hot": ("one_hot", "walk"),
    "sampled": ("sampled", "walk"),
}


def decoder_of(rule="sampled"):
    """In float64 engine and reference agree on what top-p keeps; with few and less peaked words a third is accepted."""

    def model():
        return llama(vocab_size=8, initializer_range=0.25).double()

    return tiny_decoder(model, seed=1, rule=rule, block=3, eos_ids=[], max_rows=450)


def answers(of, method, requests, **settings):
    """Texts (prompt and answer) of many seeds, for prompts of different lengths side by side, and the rounds taken."""
    given = [[3, 4, 5], [2], [1, 5]]
    asked = [given[seed % len(given)] for seed in range(requests)]
    each = [SamplingParams(max_tokens=TOKENS, seed=seed, **settings) for seed in range(requests)]
    outputs = of.generate(asked, each, method)
    assert sum(output.stats.accepted_tokens for output in outputs) > 0
    return [(*output.prompt_token_ids, *output.token_ids) for output in outputs], sum(o.stats.rounds for o in outputs)


@torch.no_grad()
def laws(of, histories, temperature, top_p):
    """The target's law [V] after each history, all of one length: the bare model, and nucleus sampling by the book."""
    ids = torch.tensor(histories)
    logits = of.target.model(input_ids=ids, attention_mask=explicit_mask(of.target, ids.shape[1]), use_cache=False)
    order = (logits.logits[:, -1] / temperature).softmax(-1).sort(dim=-1, descending=True)
    before = order.values.cumsum(-1) - order.values
    assert (before - top_p).abs().min() > 1e-9, "a near-tie at the edge of the nucleus: take another seed"
    kept = torch.where(before < top_p, order.values, 0.0)
    law = torch.zeros_like(kept).scatter(1, order.indices, kept / kept.sum(-1, keepdim=True))
    return dict(zip(histories, law.numpy(), strict=True))


def combined_pvalue(of, texts, **settings):
    """G-tests of the next token after every history that is common enough: a p-value a position, combined."""
    pvalues = []
    for position in range(-TOKENS, 0):
        following = defaultdict(Counter)
        for text in texts:
            following[text[:position]][text[position]] += 1
        statistic, freedom = 0.0, 0
        for length in {len(history) for history in following}:
            histories = [history for history in following if len(history) == length]
            for history, law in laws(of, histories, **settings).items():
                seen = np.zeros(len(law))
                seen[list(following[history])] = list(following[history].values())
                assert not (seen[law == 0]).any(), f"a token of probability zero after {history}"
                expected = law * seen.sum()
                common = expected >= LEAST
                if common.sum() < 2:
                    continue
                rarest = np.where(common, expected, np.inf).argmin()  # takes in all that are rarer
                seen[rarest] += seen[~common].sum()
                expected[rarest] += expected[~common].sum()
                seen, expected = seen[common], expected[common]
                statistic += 2 * (seen * np.log(np.maximum(seen, 1) / expected)).sum()
                freedom += common.sum() - 1
        assert freedom > 0
        pvalues.append(chi2.sf(statistic, freedom))
    return combine_pvalues(pvalues).pvalue


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(("rule", "method"), PATHS.values(), ids=PATHS)
def test_committed_tokens_follow_the_targets_law(rule, method, settings):
    of = decoder_of(rule)
    texts, rounds = answers(of, method, REQUESTS, **settings)
    assert rounds >= 20_000
    assert combined_pvalue(of, texts, **settings) > 1e-3


@pytest.mark.parametrize("rule", ["one_hot", "sampled"])
def test_they_do_whatever_lengths_are_chosen(rule, monkeypatch):
    monkeypatch.setattr("dcoco.decoder.find_costs", lambda *_: costs_of(0.25))
    of, chosen = decoder_of(rule), set()
    of.adaptive, of.max_rows = True, 5
    budget = of.budget("walk")
    spend = budget.spend

    def noted(draft, limits, slots):
        counts = spend(draft, limits, slots)
        chosen.update(counts)
        return counts

    monkeypatch.setattr(budget, "spend", noted)
    texts, _ = answers(of, "walk", 1500, **SETTINGS["warm"])
    assert chosen >= {1, 2}
    assert combined_pvalue(of, texts, **SETTINGS["warm"]) > 1e-3


def told(change):
    """`verify_sampled` that is told another q than the draft was drawn from."""
    return lambda p, draft, lengths, candidates, q, *rest: verify_sampled(
        p, draft, lengths, candidates, change(q), *rest
    )


def short(p, draft, lengths, candidates, q, *rest):
    """`verify_sampled` of the part of a draft that was likely: a length that looks at the sampled tokens."""
    likely = torch.where(candidates == draft[..., None], q, 0.0).sum(-1) > 0.4
    return verify_sampled(p, draft, lengths.minimum(likely.cumprod(-1).sum(-1)), candidates, q, *rest)


FAULTS = {
    "unnormalised q": told(lambda q: 1.3 * q),
    "q of the row beside": told(lambda q: q.roll(1, 0)),
    "marginal q": told(lambda q: q.mean(0, keepdim=True).expand_as(q)),
    "length chosen by the sampled token": short,
}


@pytest.mark.parametrize("faulty", FAULTS.values(), ids=FAULTS)
def test_controls_that_must_fail(monkeypatch, faulty):
    of = decoder_of()
    monkeypatch.setattr("dcoco.decoder.verify_sampled", faulty)
    texts, _ = answers(of, "walk", 3000, **SETTINGS["warm"])
    assert combined_pvalue(of, texts, **SETTINGS["warm"]) < 1e-9


def test_control_impossible_tokens_are_found(monkeypatch):
    """A comparison that isn't strict passes drafts of probability 0 where u is 0; here it always is."""
    of = decoder_of()
    monkeypatch.setattr(rejection, "uniform_noise", lambda seed, position, stream: torch.full(position.shape, -1e-30))
    texts, _ = answers(of, "walk", 300, **SETTINGS["warm"])
    with pytest.raises(AssertionError, match="probability zero"):
        combined_pvalue(of, texts, **SETTINGS["warm"])
