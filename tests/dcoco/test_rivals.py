"""Every rival drafter is lossless: whole rounds of the real engine with each of them, over tiny random models.

A rival is one line in RIVALS: a function from a target to a drafter that drafts for it.
"""

import random
from copy import deepcopy
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcoco import SamplingParams
from dcoco.budget import Budget
from dcoco.costs import find_costs
from dcoco.engine import Engine
from drafters.autoregressive import AutoregressiveDrafter
from drafters.prompt_lookup import PromptLookupDrafter
from tests.dcoco.test_decoder import reference
from tests.dcoco.test_fuzz import parameters, prompt_ids
from tests.dcoco.test_law import SETTINGS, answers, combined_pvalue
from tests.models import EOS, costs_of, llama, prompts, tiny_decoder
from verifier.target import Target


def small_model(target, block=3):
    """A model of another family and depth whose vocabulary has padding, and fewer positions than the target."""
    shape = {"num_hidden_layers": 2, "max_position_embeddings": 96, "vocab_size": target.vocab_size + 3}
    torch.manual_seed(7)
    model = llama(**shape).to(target.dtype)
    if target.vocab_size > 8:  # somewhat like the target: acceptance and rejection both happen
        model.lm_head.weight.data[: target.vocab_size] += target.embedding_weight()
    return AutoregressiveDrafter(target, Target(model), block, torch.arange(1, target.vocab_size))


def itself(target, block=3):
    model = deepcopy(target.model)
    model.set_attn_implementation("sdpa")  # what a target finds
    return AutoregressiveDrafter(target, Target(model), block)


RIVALS = {
    "autoregressive": small_model,
    "prompt_lookup": lambda target: PromptLookupDrafter(target.max_positions, 4),
}
rivals = pytest.mark.parametrize("rival", RIVALS)


def decoder_with(drafter, model="llama", **options):
    decoder = tiny_decoder(model, **options)
    decoder.drafter, decoder.corrector = drafter(decoder.target), None
    return decoder


def decoder_of(rival, model="llama", **options):
    return decoder_with(RIVALS[rival], model, **options)


def some_prompts(count, seed=0):
    """Of mixed lengths; every second one repeats itself."""
    found = prompts(count, seed=seed)
    return [prompt * 2 + prompt[:3] if index % 2 else prompt for index, prompt in enumerate(found)]


def ids_of(outputs):
    return [output.token_ids for output in outputs]


@rivals
@pytest.mark.parametrize("rule", ["match", "one_hot", "sampled"])
def test_greedy_is_the_bare_model_alone_and_in_batches(rival, rule):
    decoder, given_prompts = decoder_of(rival, rule=rule), [*some_prompts(5), [5], [5]]
    outputs = decoder.generate(given_prompts, SamplingParams(max_tokens=20))
    assert ids_of(outputs) == [reference(decoder, prompt, 20) for prompt in given_prompts]
    assert ids_of(outputs) == [decoder.generate([p], SamplingParams(max_tokens=20))[0].token_ids for p in given_prompts]


@rivals
@pytest.mark.parametrize("a_token", [None, 0.01, 0.3])
def test_sampled_text_is_plain_samplings_alone_and_in_batches(rival, a_token, monkeypatch):
    monkeypatch.setattr("dcoco.engine.PREFILL_CHUNK", 9)
    decoder, given_prompts = decoder_of(rival, "gemma3", max_rows=3, adaptive=a_token is not None), some_prompts(7, 1)
    if a_token is not None:
        decoder._budgets = {"dcoco": Budget(costs_of(a_token), decoder.drafter.block_size, decoder.reach("dcoco"))}
    each = [SamplingParams(max_tokens=6 + 4 * seed, seed=seed, temperature=0.4 * (seed % 3)) for seed in range(7)]
    plain, drafted = (decoder.generate(given_prompts, each, method) for method in ("plain", "dcoco"))
    assert ids_of(drafted) == ids_of(plain)
    alone = [decoder.generate([p], one)[0] for p, one in zip(given_prompts, each, strict=True)]
    assert ids_of(alone) == ids_of(plain)
    assert a_token or sum(output.stats.accepted_tokens for output in drafted) > 0  # dear tokens are not bought


@rivals
@pytest.mark.parametrize("rule", ["match", "one_hot", "sampled"])
def test_committed_tokens_follow_the_targets_law(rival, rule):
    def model():
        return llama(vocab_size=8, initializer_range=0.25).double()

    decoder = decoder_of(rival, model, seed=1, rule=rule, eos_ids=[], max_rows=450)
    texts, _ = answers(decoder, "dcoco", 1350, **SETTINGS["warm"])
    assert combined_pvalue(decoder, texts, **SETTINGS["warm"]) > 1e-3


@cache
def kept(rival):
    return decoder_of(rival)


@rivals
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    requests=st.lists(st.tuples(prompt_ids, parameters()), min_size=1, max_size=4),
    rows=st.integers(1, 4),
    chunk=st.sampled_from([3, 100]),
    a_token=st.sampled_from([None, 0.01, 0.3]),
)
def test_whatever_is_asked_drafted_text_is_plain_text(rival, requests, rows, chunk, a_token):
    """Stops, penalties, prompts up to the position limits of target and draft model."""
    decoder = kept(rival)
    decoder.max_rows, decoder.adaptive = rows, a_token is not None
    if a_token is not None:
        decoder._budgets = {"dcoco": Budget(costs_of(a_token), decoder.drafter.block_size, decoder.reach("dcoco"))}
    given_prompts, each = [list(ids) for ids, _ in requests], [params for _, params in requests]
    plain = decoder.generate(given_prompts, each, "plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcoco.engine.PREFILL_CHUNK", chunk)
        drafted = decoder.generate(given_prompts, each)
    assert [(o.token_ids, o.text, o.finish_reason) for o in drafted] == [
        (o.token_ids, o.text, o.finish_reason) for o in plain
    ]


@rivals
@pytest.mark.parametrize("seed", range(3))
def test_requests_come_and_go(rival, seed, monkeypatch):
    """Rows move, are sorted, given up and taken over; each text is what plain decoding gives it alone."""
    monkeypatch.setattr("dcoco.engine.DISORDER", 0.5)  # sort whenever rows come
    draw, decoder = random.Random(seed), decoder_of(rival, eos_ids=[EOS])
    engine, asked = Engine(decoder, max_num_seqs=3, max_model_len=128), []
    for prompt in some_prompts(12, seed):
        params = SamplingParams(max_tokens=draw.randint(1, 30), temperature=draw.choice([0, 0.7]), seed=len(asked))
        asked.append(engine.submit(prompt * draw.choice([1, 2]), params))
        for _ in range(draw.randint(0, 3)):
            engine.step()
        if draw.random() < 0.3:
            engine.cancel(draw.choice(asked))
    while engine.busy:
        engine.step()
    for request in asked:
        alone = decoder.generate([request.prompt_ids], request.params, "plain")[0].token_ids
        assert request.token_ids == alone[: len(request.token_ids)]
        assert request.output.finish_reason == "cancelled" or request.token_ids == alone


@pytest.mark.parametrize("rule", ["match", "one_hot", "sampled"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drafter_that_is_the_target_is_accepted_whole(rule, temperature):
    """Negative control: drafts and their q are the target's p. One-hot q of a sampled token is not."""
    decoder = decoder_with(itself, "gemma3", rule=rule, eos_ids=[])
    params = SamplingParams(max_tokens=25, temperature=temperature, top_p=0.95, seed=3)
    for output in decoder.generate(some_prompts(4), params):
        whole = output.stats.rounds == 6 and output.stats.mean_acceptance_length == 4.0
        assert whole or (rule, temperature) == ("one_hot", 0.8)


@rivals
def test_what_its_rounds_cost_can_be_measured(rival, tmp_path, monkeypatch):
    monkeypatch.setenv("DCOCO_CACHE", str(tmp_path / "targets"))
    monkeypatch.setattr("dcoco.costs.CONTEXT", (60, 9))
    decoder = decoder_of(rival)
    assert find_costs(decoder, "dcoco", 4) == find_costs(decoder, "dcoco", 4)
