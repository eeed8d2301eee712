"""Prompt lookup: the longest and latest match is drafted; where there is none, nothing is."""

import json
from types import SimpleNamespace

import pytest
import torch

from dcoco import SamplingParams
from dcoco.targets import drafter_folder, resolve_drafter
from drafters.base import Context
from drafters.prompt_lookup import RIGHT, SUFFIX, PromptLookupDrafter, continuation
from drafters.registry import load_drafter
from tests.models import LetterTokenizer, tiny_decoder
from verifier.cache import RaggedCache
from verifier.errors import DrafterError
from verifier.sampling import SamplingBatch


def reference(text, slots):
    """The same by comparing strings: (tokens, length of the match)."""
    anchor = len(text) - 1
    best = (0, 0)
    for place in range(anchor):
        matched = 0
        while matched < SUFFIX and matched <= place and text[place - matched] == text[anchor - matched]:
            matched += 1
        best = max(best, (matched, place))
    matched, place = best
    going_on = list(text)
    for step in range(slots if matched else 0):
        going_on.append(going_on[place + 1 + step])
    return going_on[len(text) :], matched


def test_the_longest_and_latest_match_goes_on():
    random = torch.Generator().manual_seed(0)
    for vocabulary in (1, 2, 3, 30):
        rows = [torch.randint(0, vocabulary, (length,), generator=random).tolist() for length in (1, 2, 5, 17, 40)]
        longest = max(map(len, rows))
        garbage = torch.randint(0, vocabulary, (len(rows), longest), generator=random)  # behind the anchors
        for row, text in enumerate(rows):
            garbage[row, : len(text)] = torch.tensor(text)
        anchors = torch.tensor([len(text) - 1 for text in rows])
        found = continuation(garbage, anchors, 6)
        for row, text in enumerate(rows):
            expected, length = reference(text, 6)
            assert found.matched[row] == length
            if length:
                assert found.tokens[row].tolist() == expected, (vocabulary, text)


def draft(texts, slots, **changes):
    drafter = PromptLookupDrafter(128, **changes)
    longest = max(map(len, texts))
    text = torch.tensor([row + [0] * (longest - len(row)) for row in texts])
    ahead = torch.tensor([len(row) for row in texts])[:, None] + torch.arange(slots)
    sampling = SamplingBatch.stack([SamplingParams()] * len(texts), [0] * len(texts))
    context = Context(text, ahead, sampling, False)
    return drafter.draft(drafter.start(3, 128), text[:, 0], RaggedCache(3, 128), slots, context)


def test_rows_draft_where_enough_matches():
    texts = [[5, 6, 7, 8, 5, 6], [5, 6, 7, 8, 9, 6], [5, 6, 7, 8]]
    found = draft(texts, 3, min_match=2)
    assert found.counts.tolist() == [3, 0, 0] and found.tokens[0].tolist() == [7, 8, 5]
    assert draft(texts, 3).counts.tolist() == [3, 3, 0]
    assert found.q is None and found.candidates is None


def test_probabilities_are_those_measured_for_the_length_of_the_match():
    found = draft([[5, 6, 7, 8, 5, 6], [9] * 20], 4)
    for row, matched in enumerate((2, SUFFIX)):
        rates = [RIGHT[min(matched + slot, len(RIGHT)) - 1] for slot in range(4)]
        expected = torch.tensor(rates).cumprod(0)
        torch.testing.assert_close(found.log_probs[row].exp(), expected)


def test_a_row_without_a_match_is_decoded_plainly():
    decoder = tiny_decoder(eos_ids=[])
    decoder.drafter, decoder.corrector = PromptLookupDrafter(128, 4, min_match=SUFFIX), None
    output = decoder.generate([[5, 6, 7]], SamplingParams(max_tokens=6))[0]
    assert (output.stats.rounds, output.stats.draft_tokens) == (5, 0)


def test_a_text_that_repeats_itself_is_accepted_whole():
    decoder = tiny_decoder(eos_ids=[])
    decoder.drafter, decoder.corrector = PromptLookupDrafter(128, 4), None
    params = SamplingParams(max_tokens=21, logit_bias={9: 100.0})
    output = decoder.generate([[9, 9, 9]], params)[0]
    assert output.token_ids == [9] * 21 and output.stats.mean_acceptance_length == 5.0


def test_the_shipped_configuration_works_for_every_target():
    target = SimpleNamespace(max_positions=77)
    loaded = load_drafter(drafter_folder(resolve_drafter("prompt_lookup")), target, LetterTokenizer())
    assert loaded == PromptLookupDrafter(77, 8, 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colour": 1}, "expected the keys"),
        ({"format": 2}, "format=1"),
        ({"block_size": 0}, "block_size=0 must be"),
        ({"min_match": "two"}, "min_match='two' must be"),
        ({"min_match": 9}, "no more than 8 tokens are compared"),
    ],
)
def test_wrong_settings_are_named(tmp_path, change, said):
    config = {"drafter": "prompt_lookup", "format": 1, "block_size": 8, "min_match": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(DrafterError, match=said):
        load_drafter(tmp_path, SimpleNamespace(max_positions=77), LetterTokenizer())
