"""DFlash 2's selector: the documented score, no score where it must have none, and the target's text."""

import json
import re

import pytest
import torch

from dcoco import SamplingParams
from dcoco.corrector import Scores
from dcoco.errors import DrafterError
from dcoco.registry import load_corrector, save_corrector
from dcoco.selector import Selector, SelectorConfig
from tests.dcoco.test_law import SETTINGS, answers, combined_pvalue, decoder_of
from tests.dcoco.test_walk import CANDIDATES, HIDDEN, ROWS, SLOTS, lattice
from tests.models import corrected, prompts, tiny_decoder

WORDS = 15  # of 20: candidates and anchors outside the codebooks occur


def selector(hidden=HIDDEN, ids=None, trained=True):
    """One whose ids have gaps, with a say where it is trained."""
    torch.manual_seed(0)
    ids = torch.arange(2, 2 + WORDS) if ids is None else ids
    made = Selector(SelectorConfig(hidden, len(ids), 6))
    made.draft_ids.copy_(ids)
    if trained:
        for codebook in (made.before, made.after):
            torch.nn.init.normal_(codebook.weight[:-1], std=1.0)
    return made.requires_grad_(False)


def decoder(rule="match", **options):
    of = tiny_decoder(rule=rule, **options)
    return corrected(of, selector(of.target.hidden_size, of.drafter.draft_ids))


def test_scores_are_as_documented():
    made, given = selector(), lattice()
    values = made(given, made.token_table(torch.randn(20, HIDDEN)))
    row_of = {token: row for row, token in enumerate(made.draft_ids.tolist())}

    def pair(before, after, hidden):
        if before not in row_of or after not in row_of:
            return 0.0
        context = made.before.weight[row_of[before]] * (made.hidden_projection.weight @ hidden)
        return (context * made.after.weight[row_of[after]]).sum().item()

    outside = 0
    for row in range(ROWS):
        for slot in range(SLOTS):
            before = given.ids[row, slot - 1].tolist() if slot else [int(given.anchors[row])]
            for i, a in enumerate(before):
                for j, b in enumerate(given.ids[row, slot].tolist()):
                    found = values.rest[row, slot - 1, i, j] if slot else values.first[row, j]
                    expected = given.log_probs[row, slot, j].item() + pair(a, b, given.hidden[row, slot])
                    assert abs(found.item() - expected) < 1e-4
                    outside += a not in row_of or b not in row_of
    assert 0 < outside < ROWS * (CANDIDATES + (SLOTS - 1) * CANDIDATES**2)


def test_an_untrained_selector_changes_no_score():
    made, given = selector(trained=False), lattice()
    values, plain = made(given, made.token_table(torch.randn(20, HIDDEN))), Scores.unary(given)
    assert torch.equal(values.first, plain.first)
    assert torch.equal(values.rest, plain.rest)


@pytest.mark.parametrize("method", ["walk", "dcoco"])
def test_text_is_plain_text_alone_and_in_mixed_batches(method):
    of, given = decoder(), prompts(6, seed=1)
    each = [SamplingParams(max_tokens=20, temperature=0.8 * (seed % 2), seed=seed) for seed in range(6)]
    plain = of.generate(given, each, "plain")
    together = of.generate(given, each, method)
    alone = [of.generate([prompt], one, method)[0] for prompt, one in zip(given, each, strict=True)]
    for outputs in (together, alone):
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert sum(output.stats.accepted_tokens for output in together) > 0


def test_what_is_recalled_has_no_say():
    of, asked = decoder(), SamplingParams(max_tokens=40)
    said = [5, 6, 7, 8] * 5  # a text that would be recalled
    traces = []
    for of.recall in (True, False):
        traces.append(of.generate([said], asked, "walk", trace=True)[0].trace)
    for one, other in zip(*traces, strict=True):
        assert (one.start, one.committed) == (other.start, other.committed)
        assert one.candidates is None or torch.equal(torch.as_tensor(one.candidates), torch.as_tensor(other.candidates))


def test_sampled_walks_follow_the_targets_law():
    of = decoder_of("sampled")
    corrected(of, selector(of.target.hidden_size, of.drafter.draft_ids))
    texts, _ = answers(of, "walk", 3000, **SETTINGS["warm"])
    assert combined_pvalue(of, texts, **SETTINGS["warm"]) > 1e-3


def test_a_selector_is_saved_and_loaded(tmp_path):
    of = decoder()
    save_corrector(tmp_path, of.corrector, {"steps": 0})
    again = load_corrector(tmp_path, of.target)
    assert isinstance(again, Selector)
    assert torch.equal(again.draft_ids, of.corrector.draft_ids)
    for name, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor, of.corrector.state_dict()[name], atol=0.02, rtol=0.01)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank": 7}, "before.weight has shape [62, 6], expected [62, 7]"),
        ({"draft_vocab_size": 60}, "draft_ids has shape [61], expected [60]"),
        ({"hidden_size": 16}, "hidden_size=16, but the target's is 32"),
        ({"width": 8}, "expected ['draft_vocab_size', 'hidden_size', 'rank']"),
        ({"rank": 0}, "rank=0 must be an integer"),
        ({"kind": "contextual"}, "expected ['hidden_size', 'pair_width', 'width']"),
    ],
)
def test_a_wrong_selector_is_named(tmp_path, change, said):
    of = decoder()
    save_corrector(tmp_path, of.corrector, {})
    file = tmp_path / "corrector.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DrafterError, match=re.escape(said)):
        load_corrector(tmp_path, of.target)


def test_ids_outside_the_vocabulary_are_refused():
    made = selector(ids=torch.tensor([3, 5, 20]))
    with pytest.raises(DrafterError, match="below the vocabulary's 20"):
        made.token_table(torch.randn(20, HIDDEN))
