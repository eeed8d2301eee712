"""Penalties, biases, early ends, log-probabilities and several answers: plain and drafted, against the bare model."""

import math

import pytest
import torch

from dcoco import SamplingParams
from dcoco.errors import ParameterError
from tests.models import EOS, VOCABULARY, explicit_mask, prompts, tiny_decoder
from verifier.processors import Processors
from verifier.sampling import Stream, exponential_noise

CASES = [
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.9},
    {"frequency_penalty": -1.0, "presence_penalty": -0.5, "repetition_penalty": 1.3},
    {"logit_bias": {5: 6.0, 9: -100.0, EOS: 2.5}},
    {"min_tokens": 12, "logit_bias": {EOS: 9.0, 7: 8.5}, "stop_token_ids": [7]},
    {
        "min_tokens": 5,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "logit_bias": {EOS: 4.0},
    },
]


def raw_logits(decoder, ids):
    mask = explicit_mask(decoder.target, len(ids))
    with torch.no_grad():
        out = decoder.target.model(input_ids=torch.tensor([ids]), attention_mask=mask, use_cache=False)
    return out.logits[0, -1].double()


def processed(logits, prompt, answer, params):
    """vLLM's order, token by token."""
    logits = logits.tolist()
    if len(answer) < params.min_tokens:
        for token in {EOS, *(params.stop_token_ids or ())}:
            logits[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in range(VOCABULARY):
        if token in prompt or token in answer:
            r = params.repetition_penalty
            logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
        logits[token] -= params.frequency_penalty * answer.count(token)
        logits[token] -= params.presence_penalty * (token in answer)
    return torch.tensor(logits, dtype=torch.float64)


def reference(decoder, prompt, params):
    """Plain decoding by the bare model, and the log-probability of each token before all processors."""
    answer, logprobs = [], []
    while len(answer) < params.max_tokens:
        raw = raw_logits(decoder, prompt + answer)
        logits = processed(raw, prompt, answer, params)
        if params.temperature:
            position = torch.tensor([[len(prompt) + len(answer)]])
            noise = exponential_noise(torch.tensor([params.seed]), position, Stream.TARGET, torch.arange(VOCABULARY))[
                0, 0
            ]
            logits = logits / params.temperature - noise.double().log()
        answer.append(int(logits.argmax()))
        logprobs.append(raw.log_softmax(-1)[answer[-1]].item())
        if answer[-1] == EOS or answer[-1] in (params.stop_token_ids or ()):
            break
    return answer, logprobs


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafted_text_is_the_bare_models(case, temperature):
    decoder = tiny_decoder("qwen3", max_rows=3, worth=0.0)
    given = prompts(5, seed=6)
    each = [SamplingParams(max_tokens=20, temperature=temperature, seed=i, logprobs=3, **case) for i in range(5)]
    each[3] = SamplingParams(max_tokens=9, temperature=temperature, seed=3)  # beside others, and without any
    outputs = {method: decoder.generate(given, each, method) for method in ("plain", "dcoco", "walk", "top1")}
    for index, (prompt, params) in enumerate(zip(given, each, strict=True)):
        answer, logprobs = reference(decoder, prompt, params)
        for method, found in outputs.items():
            assert found[index].token_ids == answer, (method, index)
            if params.logprobs is None:
                assert found[index].logprobs is None
                continue
            assert len(found[index].logprobs) == len(answer)
            for token, entry, logprob in zip(answer, found[index].logprobs, logprobs, strict=True):
                assert next(iter(entry)) == token
                assert entry[token] == pytest.approx(logprob, abs=1e-4)
                best = sorted(entry.values(), reverse=True)
                assert len(entry) in (3, 4) and best[0] == pytest.approx(max(best))


def test_control_drafts_that_do_not_see_the_drafts_before_them(monkeypatch):
    given = prompts(8, seed=7)
    params = SamplingParams(max_tokens=30, frequency_penalty=1.2, temperature=0.7, seed=1)
    truth = [output.token_ids for output in tiny_decoder("qwen3").generate(given, params, "plain")]
    real = Processors.apply

    def blind(self, logits, places, positions, counts, first, drafted, sees):
        return real(self, logits, places, positions, counts, first, drafted, torch.zeros_like(sees))

    monkeypatch.setattr(Processors, "apply", blind)
    decoder = tiny_decoder("qwen3", worth=0.0, tree_size=60)
    assert [output.token_ids for output in decoder.generate(given, params)] != truth


@pytest.mark.parametrize("rule", ["one_hot", "sampled"])
def test_other_rules_take_them_too(rule):
    decoder = tiny_decoder(rule=rule)
    params = [SamplingParams(max_tokens=20, presence_penalty=1.0, min_tokens=6, logit_bias={8: 3.0})] * 4
    given = prompts(4, seed=8)
    outputs = [[output.token_ids for output in decoder.generate(given, params, m)] for m in ("dcoco", "plain")]
    assert outputs[0] == outputs[1]


def test_n_answers_have_following_seeds():
    decoder = tiny_decoder(max_rows=2)
    given = prompts(2, seed=9)
    several = decoder.generate(given, SamplingParams(max_tokens=12, temperature=1.0, seed=40, n=3))
    for prompt, output in zip(given, several, strict=True):
        assert len(output.outputs) == 3
        for offset, answer in enumerate(output.outputs):
            alone = decoder.generate([prompt], SamplingParams(max_tokens=12, temperature=1.0, seed=40 + offset))[0]
            assert answer.token_ids == alone.token_ids
    last = 2**63 - 1
    assert len(decoder.generate([[5]], SamplingParams(max_tokens=2, temperature=1.0, seed=last, n=2))[0].outputs) == 2
    with pytest.raises(ParameterError, match="n=2"):
        next(decoder.stream([5], SamplingParams(n=2)))


@pytest.mark.parametrize(
    "field, value",
    [
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.5),
        ("min_tokens", -1),
        ("min_tokens", 300),
        ("logprobs", 21),
        ("logprobs", True),
        ("n", 0),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {"a": 1.0}),
    ],
)
def test_wrong_values_are_named(field, value):
    with pytest.raises(ParameterError, match=field):
        SamplingParams(**{field: value})


def test_a_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(ParameterError, match="logit_bias names token 64"):
        tiny_decoder().generate([[5]], SamplingParams(logit_bias={64: 1.0}))
