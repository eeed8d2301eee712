"""Tokenizers with more or fewer ids than the model has rows: padding is usual, and neither may crash or bend a text."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dcoco import SamplingParams
from dcoco.errors import ParameterError
from tests.models import VOCABULARY, prompts, tiny_decoder


def words(count):
    return Tokenizer(models.WordLevel({f"w{index}": index for index in range(count)}, unk_token="w0"))


def byte_fallback(count):
    """As of sentencepiece models: bytes that make up no character come out as replacement characters."""
    vocabulary = {f"<0x{index + 192:02X}>" if index % 2 else f"▁w{index}": index for index in range(count)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


@pytest.mark.parametrize("kind", [words, byte_fallback])
@pytest.mark.parametrize("method", ["dcoco", "plain"])
def test_ids_that_the_tokenizer_does_not_know_add_no_text(kind, method):
    decoder = tiny_decoder("qwen3", eos_ids=[])
    decoder.tokenizer = tokenizer = PreTrainedTokenizerFast(tokenizer_object=kind(40))
    unknown = 0
    for seed, prompt in enumerate(prompts(6, seed=11)):
        params = SamplingParams(max_tokens=30, temperature=1.0, seed=seed, stop=["w3 w5", "w9"], logprobs=1)
        *chunks, last = decoder.stream(prompt, params, method)
        output = decoder.generate([prompt], params, method)[0]
        known = [token for token in output.token_ids if token < 40]
        unknown += len(output.token_ids) - len(known)
        text = tokenizer.decode(known)
        cut = min((text.index(stop) for stop in params.stop if stop in text), default=len(text))
        assert output.text == text[:cut] == "".join(chunk.text for chunk in [*chunks, last])
        assert (output.finish_reason == "stop") == (cut < len(text))
    assert unknown > 20


def test_ids_that_the_model_does_not_know_are_refused_in_prompts_and_end_nothing():
    decoder = tiny_decoder(eos_ids=[VOCABULARY + 5])
    decoder.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words(VOCABULARY + 10))
    with pytest.raises(ParameterError, match=r"prompt token 70 .*\(0..63\); where the tokenizer has more ids"):
        decoder.generate([decoder.tokenizer.convert_tokens_to_ids(["w5", "w70"])])
    for method in ("dcoco", "plain"):
        output = decoder.generate([[5, 6]], SamplingParams(max_tokens=8, min_tokens=3), method)[0]
        assert len(output.token_ids) == 8
        assert output.text == decoder.tokenizer.decode(output.token_ids)
