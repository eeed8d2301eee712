"""Random requests against tiny models: drafted text is plain text. DCOCO_FUZZ sets the number of examples."""

import os
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcoco import SamplingParams
from dcoco.budget import Budget
from dcoco.engine import Engine
from tests.models import EOS, FAMILIES, VOCABULARY, costs_of, tiny_decoder

EXAMPLES = int(os.environ.get("DCOCO_FUZZ", "500"))


@cache
def decoder_of(family, block, candidates, trusting):
    decoder = tiny_decoder(family, block=block, candidates=candidates)
    if trusting:  # recall outweighs everything: trees run far beyond the block
        decoder.corrector.pair_out.weight[0, 0] = 1.0
        decoder.corrector.pair_recalled.weight[1:, 0] = 20.0
    return decoder


tokens = st.one_of(st.integers(0, VOCABULARY - 1), st.sampled_from([5, 6]))  # the second makes texts repeat themselves
prompt_ids = st.one_of(
    st.lists(tokens, min_size=1, max_size=24),
    st.lists(st.sampled_from([5, 6, 7]), min_size=1, max_size=40),
    st.lists(tokens, min_size=112, max_size=127),  # up to the position limit
)


@st.composite
def parameters(draw):
    limit = draw(st.integers(1, 14))
    penalised = draw(st.booleans())
    return SamplingParams(
        max_tokens=limit,
        temperature=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.3])),
        top_k=draw(st.sampled_from([0, 0, 1, 5, 1000])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 1.0])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=2)),
        stop=[chr(256 + token) for token in draw(st.lists(st.integers(3, VOCABULARY - 1), max_size=2))],
        min_tokens=draw(st.integers(0, limit)),
        logprobs=draw(st.sampled_from([None, 0, 3])),
        repetition_penalty=draw(st.sampled_from([0.7, 1.5])) if penalised else 1.0,
        frequency_penalty=draw(st.sampled_from([-2.0, 0.5])) if penalised else 0.0,
        logit_bias=draw(st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, 5.0]), max_size=2)),
    )


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=EXAMPLES <= 500)
@given(
    data=st.data(),
    family=st.sampled_from(sorted(FAMILIES)),
    shape=st.sampled_from([(4, 6, False), (4, 6, True), (1, 1, False), (3, 16, True)]),
    requests=st.lists(st.tuples(prompt_ids, parameters()), min_size=1, max_size=4),
    rows=st.integers(1, 4),
    tree_size=st.integers(1, 30),
    worth=st.sampled_from([0.0, 0.02, 0.2, 0.99]),
    recall=st.booleans(),
    a_token=st.sampled_from([None, None, 0.01, 0.3]),
    chunk=st.sampled_from([3, 17, 100, 256]),
)
def test_drafted_text_is_plain_text(data, family, shape, requests, rows, tree_size, worth, recall, a_token, chunk):
    decoder = decoder_of(family, *shape)
    decoder.max_rows, decoder.tree_size, decoder.worth, decoder.recall = rows, tree_size, worth, recall
    given_prompts, each = [list(ids) for ids, _ in requests], [params for _, params in requests]
    method = data.draw(st.sampled_from(["dcoco", "dcoco", "walk", "top1"]))
    decoder.adaptive = a_token is not None
    if a_token is not None:
        decoder._budgets = {method: Budget(costs_of(a_token), decoder.drafter.block_size, decoder.reach(method))}
    plain = decoder.generate(given_prompts, each, "plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcoco.engine.PREFILL_CHUNK", chunk)
        drafted = decoder.generate(given_prompts, each, method, trace=True)
    for prompt, params, mine, theirs in zip(given_prompts, each, drafted, plain, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert (mine.text, mine.finish_reason) == (theirs.text, theirs.finish_reason)
        assert 1 <= len(mine.token_ids) <= min(params.max_tokens, 128 - len(prompt))
        if params.logprobs is not None:
            assert len(mine.logprobs) == len(mine.token_ids)
            for one, other, token in zip(mine.logprobs, theirs.logprobs, mine.token_ids, strict=True):
                torch.testing.assert_close(one[token], other[token], atol=1e-3, rtol=1e-3)
        stats = mine.stats
        assert stats.committed_tokens == len(mine.token_ids) - 1 == sum(t.committed for t in mine.trace)
        assert sum(stats.accepted_at) == stats.accepted_tokens <= stats.draft_tokens
        assert stats.accepted_at == sorted(stats.accepted_at, reverse=True)
        assert stats.rounds <= stats.committed_tokens
        assert stats.accepted_tokens <= stats.committed_tokens <= stats.accepted_tokens + stats.rounds


@settings(max_examples=max(20, EXAMPLES // 10), deadline=None, derandomize=EXAMPLES <= 500)
@given(requests=st.lists(st.tuples(prompt_ids, parameters()), min_size=2, max_size=6), rows=st.integers(1, 3))
def test_the_cache_counts_what_is_committed(requests, rows):
    """After every round each row holds prompt and answer up to the anchor, and its text lies in the history."""
    decoder = decoder_of("gemma3", 4, 6, True)
    decoder.tree_size, decoder.worth, decoder.recall, decoder.adaptive = 9, 0.0, True, False
    engine = Engine(decoder, "dcoco", rows, 128)
    for ids, params in requests:
        engine.submit(ids, params)
    while engine.busy:
        engine.step()
        batch = engine.batch
        assert len(batch.requests) <= rows
        for row, request in enumerate(batch.requests):
            text = request.prompt_ids + request.token_ids
            assert batch.cache.lengths[row] == len(text) - 1
            assert batch.history[row, : len(text)].tolist() == text
            assert batch.anchors[row] == text[-1]
            assert EOS not in request.token_ids or request.params.ignore_eos
