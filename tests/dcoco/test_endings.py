"""Every way to end, with drafts that are mostly right: text, ids, log-probabilities and statistics stop together."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from dcoco import DCOCODecoder, SamplingParams
from dcoco.errors import ParameterError
from drafters.block_diffusion import BlockDiffusionConfig, BlockDiffusionDrafter
from drafters.dflash import DFlashConfig, DFlashDrafter
from tests.models import VOCABULARY, LetterTokenizer, tiny_decoder
from verifier.target import Target

PROMPT = [9, 8, 4]
BLOCK = 4
METHODS = ["dcoco", "walk", "top1", "plain"]
TEMPERATURES = [0.0, 0.8]


def params(temperature, **changes):
    return SamplingParams(**{"max_tokens": 24, "temperature": temperature, "seed": 1, "logprobs": 0} | changes)


@cache
def informed(temperature):
    """A decoder whose drafter knows the text, but for every sixth token, and that text: it has no end of its own."""
    decoder = tiny_decoder(seed=1, block=BLOCK, trained=False, eos_ids=[])
    text = decoder.generate([PROMPT], params(temperature, max_tokens=60), "plain")[0].token_ids
    draft = decoder.drafter.draft

    def told(state, anchors, cache, slots, context):
        lattice = draft(state, anchors, cache, slots)
        for row, length in enumerate(cache.lengths[: len(anchors)]):
            for slot, index in enumerate(range(length - len(PROMPT) + 1, min(length - len(PROMPT) + 1 + slots, 60))):
                ids = lattice.ids[row, slot]
                ids[ids == text[index]] = ids[0].item()
                ids[0] = text[index] if index % 6 else (text[index] + 1) % VOCABULARY
        lattice.log_probs[..., 1:] -= 20.0
        return lattice

    decoder.drafter.draft = told
    return decoder, text


def letters(token_ids):
    return LetterTokenizer().decode(token_ids)


# What ends the text t: parameters, end-of-sequence ids, and (tokens, characters, reason) of the answer.
ENDINGS = {
    **{f"{n} tokens": lambda t, n=n: ({"max_tokens": n}, [], (n, n, "length")) for n in (1, 2, BLOCK, BLOCK + 1, 24)},
    "eos first": lambda t: ({}, [t[0]], (1, 0, "stop")),
    "eos inside a block": lambda t: ({}, [t[3]], (4, 3, "stop")),
    "several eos": lambda t: ({}, [t[8], t[6], t[10]], (7, 6, "stop")),
    "eos as the last token": lambda t: ({"max_tokens": 7}, [t[6]], (7, 6, "stop")),
    "eos ignored": lambda t: ({"ignore_eos": True}, [t[3]], (24, 24, "length")),
    "stop token": lambda t: ({"stop_token_ids": [t[8], t[10]], "ignore_eos": True}, [t[3]], (9, 8, "stop")),
    "stop at once": lambda t: ({"stop": letters(t[:1])}, [], (1, 0, "stop")),
    "stop inside a block": lambda t: ({"stop": letters(t[2:4])}, [], (4, 2, "stop")),
    "stop across blocks": lambda t: ({"stop": letters(t[2:12])}, [], (12, 2, "stop")),
    "stops that overlap": lambda t: ({"stop": [letters(t[6:11]), letters(t[4:8])]}, [], (8, 4, "stop")),
    "stop within a stop": lambda t: ({"stop": [letters(t[3:9]), letters(t[5:7])]}, [], (7, 5, "stop")),
    "stops that end together": lambda t: ({"stop": [letters(t[7:9]), letters(t[5:9])]}, [], (9, 5, "stop")),
    "stop as the last token": lambda t: ({"stop": letters(t[4:7]), "max_tokens": 7}, [], (7, 4, "stop")),
    "half a stop": lambda t: ({"stop": letters(t[5:9]), "max_tokens": 7}, [], (7, 7, "length")),
    "eos inside a stop": lambda t: ({"stop": letters(t[5:8])}, [t[7]], (8, 7, "stop")),
    "stop too early": lambda t: ({"stop": letters(t[2:4]), "min_tokens": 4}, [], (24, 24, "length")),
    "stop early enough": lambda t: ({"stop": letters(t[2:4]), "min_tokens": 3}, [], (4, 2, "stop")),
    "stop too early within a stop": lambda t: (
        {"stop": [letters(t[3:9]), letters(t[4:6])], "min_tokens": 6},
        [],
        (9, 3, "stop"),
    ),
    "stop before eos": lambda t: ({"stop": letters(t[5:8])}, [t[8]], (8, 5, "stop")),
}


def check(decoder, asked, method, token_ids, text, reason):
    """The answer, in one piece and as a stream: everything about it ends at the same token."""
    output = decoder.generate([PROMPT], asked, method, trace=True)[0]
    *_, last = chunks = list(decoder.stream(PROMPT, asked, method, trace=True))
    assert "".join(chunk.text for chunk in chunks) == text
    assert [token for chunk in chunks for token in chunk.token_ids] == token_ids
    for found in (output, last.output):
        assert (found.token_ids, found.text, found.finish_reason) == (token_ids, text, reason)
        assert [list(entry) for entry in found.logprobs] == [[token] for token in token_ids]
        stats, trace = found.stats, found.trace
        assert stats.committed_tokens == len(token_ids) - 1 == sum(one.committed for one in trace)
        assert stats.accepted_tokens == sum(stats.accepted_at) == sum(one.accepted for one in trace)
        assert stats.accepted_tokens <= stats.draft_tokens
        assert all(one.accepted <= one.committed <= one.accepted + 1 for one in trace)
        assert (len(trace), stats.accepted_at) == (output.stats.rounds, output.stats.accepted_at)
    return output


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_everything_ends_at_the_same_token(monkeypatch, ending, method, temperature):
    decoder, text = informed(temperature)
    changes, eos_ids, (tokens, characters, reason) = ending(text)
    monkeypatch.setattr(decoder, "eos_ids", frozenset(eos_ids))
    check(decoder, params(temperature, **changes), method, text[:tokens], letters(text[:characters]), reason)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_drafts_are_mostly_right(temperature):
    """The endings above do fall into accepted blocks, and no token of the text could end it twice."""
    decoder, text = informed(temperature)
    assert len(set(text[:9])) == 9
    for method in METHODS[:-1]:
        stats = decoder.generate([PROMPT], params(temperature, max_tokens=60), method)[0].stats
        assert stats.mean_acceptance_length > 2.5


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("method", METHODS)
def test_min_tokens_puts_ends_off(monkeypatch, method, temperature):
    decoder, text = informed(temperature)
    for changes, eos_ids in (
        ({"min_tokens": 6}, text[3:5]),
        ({"min_tokens": 6, "stop_token_ids": text[3:5]}, []),
        ({"min_tokens": 24}, text[:20]),
        ({"min_tokens": 6, "ignore_eos": True}, text[3:5]),
    ):
        monkeypatch.setattr(decoder, "eos_ids", frozenset(eos_ids))
        asked = params(temperature, **changes)
        plain = decoder.generate([PROMPT], asked, "plain")[0]
        ends = {*(() if asked.ignore_eos else eos_ids), *asked.stop_token_ids}
        assert not ends & set(plain.token_ids[: asked.min_tokens])
        assert ends.isdisjoint(plain.token_ids[:-1]) and len(plain.token_ids) >= asked.min_tokens
        check(decoder, asked, method, plain.token_ids, plain.text, plain.finish_reason)


@pytest.mark.parametrize("method", METHODS)
def test_rows_that_end_early_leave_the_others_alone(monkeypatch, method):
    decoder, text = informed(0.0)
    monkeypatch.setattr(decoder, "eos_ids", frozenset([text[8]]))
    each = [params(0.0, max_tokens=1), params(0.0, stop=letters(text[2:4])), params(0.0), params(0.0, ignore_eos=True)]
    outputs = decoder.generate([PROMPT] * 4, each, method)
    assert [output.token_ids for output in outputs] == [text[:1], text[:4], text[:9], text[:24]]
    assert [output.stats.committed_tokens for output in outputs] == [0, 3, 8, 23]


@pytest.mark.parametrize("method", METHODS)
def test_the_targets_position_limit_ends_the_answer(method):
    decoder = tiny_decoder(eos_ids=[])
    for prompt, room in (([7] * 120, 8), ([7] * 127, 1)):
        plain, output = (decoder.generate([prompt], SamplingParams(max_tokens=100), m)[0] for m in ("plain", method))
        assert len(output.token_ids) == room and output.finish_reason == "length"
        assert output.token_ids == plain.token_ids
    with pytest.raises(ParameterError, match="128"):
        decoder.generate([[7] * 128], method=method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("limit", [2, 12, 17])
def test_behind_the_drafters_position_limit_decoding_goes_on_plain(monkeypatch, method, limit):
    decoder, text = informed(0.0)
    monkeypatch.setattr(decoder.drafter, "max_positions", limit)
    output = check(decoder, params(0.0), method, text[:24], letters(text[:24]), "length")
    for one in output.trace:  # the block's last input stands one place before the last token that it drafts
        anchor = len(PROMPT) + one.start - 1
        assert one.candidates is None or anchor + len(one.candidates) <= limit
        assert one.committed == 1 or anchor < limit
    drafted = [one for one in output.trace if one.candidates is not None and len(one.candidates)]
    assert bool(drafted) == (method != "plain" and limit > len(PROMPT))


def test_a_published_drafter_with_fewer_positions_than_its_target():
    decoder = tiny_decoder("qwen3", eos_ids=[])
    config = DFlashConfig.for_target(decoder.target, 2, (0, 3), 4)
    config.backbone.max_position_embeddings = 16
    torch.manual_seed(1)
    drafter = DFlashDrafter(decoder.target, replace(config, predicts="same"))
    drafter.initialise()
    decoder.drafter, decoder.corrector = drafter.prepare(), None
    given = [[5] * 3, [6] * 15, [7] * 30]
    outputs, plain = (decoder.generate(given, SamplingParams(max_tokens=20), m) for m in ("top1", "plain"))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    first, _, last = (output.stats for output in outputs)
    assert first.draft_tokens > 0 == last.draft_tokens
    assert first.rounds > first.drafts > 0 == last.drafts


def test_a_row_at_the_position_limit_beside_a_short_one():
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32}
    target = Target(GPT2LMHeadModel(GPT2Config(**shape)))
    drafter = BlockDiffusionDrafter(target, BlockDiffusionConfig((1, 3), (0, 3), 4, 6))
    drafter.initialise(scale=1.0)
    decoder = DCOCODecoder(target, LetterTokenizer(), drafter.prepare())
    given = [[5] * 28, [7, 8, 9]]
    outputs = decoder.generate(given, SamplingParams(max_tokens=20))
    alone = [decoder.generate([prompt], SamplingParams(max_tokens=20), "plain")[0] for prompt in given]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
    assert [len(output.token_ids) for output in outputs] == [4, 20]
