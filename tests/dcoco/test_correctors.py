"""What every rival of the corrector promises: the plain drafter at first, the target's text, and its own file again."""

import json
import re

import pytest
import torch

from dcoco import SamplingParams
from dcoco.corrector import Scores
from dcoco.errors import DrafterError
from dcoco.registry import load_corrector, save_corrector
from tests.dcoco.test_law import SETTINGS, answers, combined_pvalue, decoder_of
from tests.dcoco.test_lilicorr import scorer
from tests.dcoco.test_selector import selector
from tests.dcoco.test_walk import HIDDEN, lattice
from tests.models import corrected, prompts, tiny_decoder

KINDS = {
    "selector": lambda of: selector(of.target.hidden_size, of.drafter.draft_ids),
    "lilicorr": lambda of: scorer(of.target.hidden_size, of.drafter.block_size, 6),
}


@pytest.fixture(params=KINDS)
def decoder(request):
    of = tiny_decoder()
    return corrected(of, KINDS[request.param](of))


@pytest.mark.parametrize("make", [selector, scorer])
def test_an_untrained_one_changes_no_score(make):
    made, given = make(trained=False), lattice()
    values, plain = made(given, made.token_table(torch.randn(20, HIDDEN))), Scores.unary(given)
    assert torch.equal(values.first, plain.first)
    assert torch.equal(values.rest, plain.rest)


@pytest.mark.parametrize("method", ["walk", "dcoco"])
def test_text_is_plain_text_alone_and_in_mixed_batches(decoder, method):
    given = prompts(6, seed=1)
    each = [SamplingParams(max_tokens=20, temperature=0.8 * (seed % 2), seed=seed) for seed in range(6)]
    plain = decoder.generate(given, each, "plain")
    together = decoder.generate(given, each, method)
    alone = [decoder.generate([prompt], one, method)[0] for prompt, one in zip(given, each, strict=True)]
    for outputs in (together, alone):
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert sum(output.stats.accepted_tokens for output in together) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_walks_follow_the_targets_law(kind):
    of = decoder_of("sampled")
    corrected(of, KINDS[kind](of).to(of.target.dtype))
    texts, _ = answers(of, "walk", 3000, **SETTINGS["warm"])
    assert combined_pvalue(of, texts, **SETTINGS["warm"]) > 1e-3


def test_one_is_saved_and_loaded(decoder, tmp_path):
    save_corrector(tmp_path, decoder.corrector, {"steps": 0})
    again = load_corrector(tmp_path, decoder.target)
    assert type(again) is type(decoder.corrector)
    for name, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor, decoder.corrector.state_dict()[name], atol=0.02, rtol=0.01)


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("selector", {"rank": 7}, "before.weight has shape [62, 6], expected [62, 7]"),
        ("selector", {"draft_vocab_size": 60}, "draft_ids has shape [61], expected [60]"),
        ("selector", {"hidden_size": 16}, "hidden_size=16, but the target's is 32"),
        ("selector", {"width": 8}, "expected ['draft_vocab_size', 'hidden_size', 'rank']"),
        ("selector", {"rank": 0}, "rank=0 must be an integer"),
        ("selector", {"kind": "contextual"}, "expected ['hidden_size', 'pair_width', 'width']"),
        ("lilicorr", {"width": 12}, "token.weight has shape [8, 32], expected [12, 32]"),
        ("lilicorr", {"layers": 3}, "missing layers.2.attended.bias"),
        ("lilicorr", {"heads": 3}, "width=8 must be a multiple of heads=3"),
        ("lilicorr", {"hidden_size": 16}, "hidden_size=16, but the target's is 32"),
        ("lilicorr", {"rank": 8}, "expected ['block_size', 'candidates', 'heads', 'hidden_size', 'layers', 'width']"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, kind, change, said):
    of = tiny_decoder()
    save_corrector(tmp_path, KINDS[kind](of), {})
    file = tmp_path / "corrector.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DrafterError, match=re.escape(said)):
        load_corrector(tmp_path, of.target)
