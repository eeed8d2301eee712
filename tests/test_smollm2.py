"""The real target with the shipped drafter and corrector, in float32. Fetches the pinned weights once."""

import pytest
import torch

from dcoco import DCOCODecoder, SamplingParams
from dcoco.errors import ParameterError
from dcoco.targets import load_target

QUESTIONS = [
    "Natalia sold 48 clips in April and half as many in May. How many did she sell altogether?",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
    "hi",
]
RIVALS = {  # and an acceptance length that an untrained one doesn't reach
    "prompt_lookup": 1.02,
    "smollm2_135m_selector": 1.7,
    "smollm2_135m_dspark": 1.7,
    "smollm2_135m_lilicorr": 1.7,
    "smollm2_135m_eagle": 1.2,
    "smollm2_135m_autoregressive": 1.1,
}


def chats():
    return [[{"role": "user", "content": question}] for question in QUESTIONS]


@pytest.fixture(scope="module")
def decoder():
    return DCOCODecoder.from_pretrained("smollm2_135m", dtype="float32", adaptive=False)


@pytest.fixture(scope="module")
def plain(decoder):
    return decoder.generate(chats(), SamplingParams(max_tokens=48), "plain")


def sampled():
    return [SamplingParams(max_tokens=32, temperature=0.8, seed=seed) for seed in range(len(QUESTIONS))]


@pytest.fixture(scope="module")
def plain_sampled(decoder):
    return [output.text for output in decoder.generate(chats(), sampled(), "plain")]


def test_plain_decoding_is_transformers_generate(plain):
    model, _, _ = load_target("smollm2_135m", dtype="float32")
    for output in plain[:2]:
        ids = torch.tensor([output.prompt_token_ids])
        with torch.inference_mode():
            theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
        assert output.token_ids == theirs[0, ids.shape[1] :].tolist()


def test_greedy_text_is_the_targets_in_a_batch_and_alone(decoder, plain):
    batched = decoder.generate(chats(), SamplingParams(max_tokens=48))
    alone = [decoder.generate([chat], SamplingParams(max_tokens=48))[0] for chat in chats()]
    for outputs in (batched, alone):
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]


def test_the_shipped_drafter_and_corrector_are_trained(decoder):
    lengths = {}
    for method in ("top1", "dcoco"):
        outputs = decoder.generate(chats(), SamplingParams(max_tokens=96), method)
        rounds = sum(output.stats.rounds for output in outputs)
        lengths[method] = sum(output.stats.committed_tokens for output in outputs) / rounds
    assert lengths["top1"] > 1.7
    assert lengths["dcoco"] > 1.3 * lengths["top1"]


@pytest.mark.parametrize("name", RIVALS)
def test_a_shipped_rival_is_trained_and_lossless(plain, plain_sampled, name):
    rival = DCOCODecoder.from_pretrained("smollm2_135m", name, dtype="float32", adaptive=False)
    method = "top1" if rival.corrector is None else "walk"
    outputs = rival.generate(chats(), SamplingParams(max_tokens=48), method)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    length = sum(o.stats.committed_tokens for o in outputs) / sum(o.stats.rounds for o in outputs)
    assert length > RIVALS[name]
    assert [output.text for output in rival.generate(chats(), sampled(), method)] == plain_sampled


def test_text_and_messages_that_can_not_be_read_are_named(decoder):
    with pytest.raises(ParameterError, match="the tokenizer can't read this text"):
        decoder.encode("\ud800")
    for wrong in (
        {"role": "user"},
        {"content": "hi"},
        {},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ):
        with pytest.raises(ParameterError, match="each needs a role and a content, both strings"):
            decoder.encode([wrong])


@pytest.mark.parametrize("method", ["dcoco", "top1"])
def test_sampled_text_is_plain_samplings(decoder, plain_sampled, method):
    assert [output.text for output in decoder.generate(chats(), sampled(), method)] == plain_sampled


def test_a_stream_is_the_text(decoder):
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=5)
    question = [{"role": "user", "content": "Say hello in Korean, Chinese and with an emoji."}]
    chunks = list(decoder.stream(question, params))
    assert "".join(chunk.text for chunk in chunks) == chunks[-1].output.text
    assert chunks[-1].output.text == decoder.generate([question], params, "plain")[0].text
