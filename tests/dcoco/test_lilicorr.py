"""LiLiCorr's scorer: the documented scores by a loop over nodes, the plain drafter at first, and the target's text."""

import json
import re

import pytest
import torch
import torch.nn.functional as F

from dcoco import SamplingParams
from dcoco.corrector import Scores
from dcoco.errors import DrafterError
from dcoco.lilicorr import GAIN, LiLiCorr, LiLiCorrConfig
from dcoco.registry import load_corrector, save_corrector
from tests.dcoco.test_law import SETTINGS, answers, combined_pvalue, decoder_of
from tests.dcoco.test_walk import CANDIDATES, HIDDEN, ROWS, SLOTS, lattice
from tests.models import corrected, prompts, tiny_decoder


def scorer(hidden=HIDDEN, block=SLOTS + 1, candidates=CANDIDATES + 2, trained=True):
    """For lattices up to a slot longer and two candidates wider than the given ones."""
    torch.manual_seed(0)
    made = LiLiCorr(LiLiCorrConfig(hidden, block, candidates, 8, 2, 2))
    if trained:
        for parameter in (made.slot_place, made.rank_place, made.apart.weight):
            torch.nn.init.normal_(parameter)
        made.gain.data.fill_(0.2)
    return made.requires_grad_(False)


def decoder(rule="match", **options):
    of = tiny_decoder(rule=rule, **options)
    return corrected(of, scorer(of.target.hidden_size, of.drafter.block_size, 6))


def test_scores_are_as_documented():
    made, given, embedding = scorer(), lattice(), torch.randn(20, HIDDEN)
    values = made(given, made.token_table(embedding))
    row, heads = 1, made.config.heads

    def unit(x):
        return x / (x.pow(2).mean() + torch.finfo(x.dtype).eps).sqrt()

    nodes, slot_of = [], []
    for slot in range(SLOTS):
        for k in range(CANDIDATES):
            log_prob = given.log_probs[row, slot, k]
            gap, rank = log_prob - given.log_probs[row, slot, 0], k / (CANDIDATES - 1)
            features = torch.stack([log_prob, log_prob.exp(), gap, torch.tensor(rank), torch.tensor(float(k == 0))])
            node = made.token(unit(embedding[given.ids[row, slot, k]])) + made.slot(unit(given.hidden[row, slot]))
            nodes.append(node + made.features(features) + made.slot_place[slot, 0] + made.rank_place[k])
            slot_of.append(slot)
    for layer in made.layers:
        q, k, v = ([layer.qkv(unit(node)).chunk(3)[part] for node in nodes] for part in range(3))
        after = []
        for i, node in enumerate(nodes):
            seen = []
            for head in range(heads):
                part = slice(head * 4, head * 4 + 4)
                apart = [made.apart.weight[slot_of[i] - slot_of[j] + SLOTS, head] for j in range(len(nodes))]
                logits = torch.stack([q[i][part] @ k[j][part] / 2 + apart[j] for j in range(len(nodes))])
                seen.append(sum(weight * v[j][part] for j, weight in enumerate(logits.softmax(0))))
            node = node + layer.attended(torch.cat(seen))
            after.append(node + layer.mlp(unit(node)))
        nodes = after
    anchor = unit(made.anchor(unit(given.anchor_hidden[row])))
    joined = []
    for node in nodes:
        node = unit(node)
        joined.append(F.silu(made.join(torch.cat([node, anchor, node * anchor]))))

    def cosine(out, into):
        return GAIN * made.gain * F.cosine_similarity(out, made.into(joined[into]), dim=0)

    for j in range(CANDIDATES):
        expected = given.log_probs[row, 0, j] + cosine(made.anchor_out(anchor), j)
        torch.testing.assert_close(values.first[row, j], expected, atol=1e-4, rtol=1e-4)
        for slot in range(1, SLOTS):
            for i in range(CANDIDATES):
                out = made.out(joined[(slot - 1) * CANDIDATES + i])
                expected = given.log_probs[row, slot, j] + cosine(out, slot * CANDIDATES + j)
                torch.testing.assert_close(values.rest[row, slot - 1, i, j], expected, atol=1e-4, rtol=1e-4)


def test_an_untrained_scorer_changes_no_score():
    made, given = scorer(trained=False), lattice()
    values, plain = made(given, made.token_table(torch.randn(20, HIDDEN))), Scores.unary(given)
    assert torch.equal(values.first, plain.first)
    assert torch.equal(values.rest, plain.rest)


def test_a_row_is_scored_by_itself():
    made, given, embedding = scorer(), lattice(), torch.randn(20, HIDDEN)
    table = made.token_table(embedding)
    together = made(given, table)
    for row in range(ROWS):
        alone = made(type(given)(*(value[row : row + 1] for value in vars(given).values())), table)
        torch.testing.assert_close(alone.first[0], together.first[row])
        torch.testing.assert_close(alone.rest[0], together.rest[row])


@pytest.mark.parametrize(("block", "candidates"), [(SLOTS - 1, CANDIDATES), (SLOTS, CANDIDATES - 1)])
def test_another_drafters_lattice_is_refused(block, candidates):
    made, given = scorer(block=block, candidates=candidates), lattice()
    with pytest.raises(DrafterError, match=f"{SLOTS} slots and {CANDIDATES} candidates is too large"):
        made(given, made.token_table(torch.randn(20, HIDDEN)))


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


def test_sampled_walks_follow_the_targets_law():
    of = decoder_of("sampled")
    corrected(of, scorer(of.target.hidden_size, 3, 6).to(of.target.dtype))
    texts, _ = answers(of, "walk", 3000, **SETTINGS["warm"])
    assert combined_pvalue(of, texts, **SETTINGS["warm"]) > 1e-3


def test_a_scorer_is_saved_and_loaded(tmp_path):
    of = decoder()
    save_corrector(tmp_path, of.corrector, {"steps": 0})
    again = load_corrector(tmp_path, of.target)
    assert isinstance(again, LiLiCorr)
    for name, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor, of.corrector.state_dict()[name], atol=0.02, rtol=0.01)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"width": 12}, "token.weight has shape [8, 32], expected [12, 32]"),
        ({"layers": 3}, "missing layers.2.attended.bias"),
        ({"heads": 3}, "width=8 must be a multiple of heads=3"),
        ({"hidden_size": 16}, "hidden_size=16, but the target's is 32"),
        ({"rank": 8}, "expected ['block_size', 'candidates', 'heads', 'hidden_size', 'layers', 'width']"),
    ],
)
def test_a_wrong_scorer_is_named(tmp_path, change, said):
    of = decoder()
    save_corrector(tmp_path, of.corrector, {})
    file = tmp_path / "corrector.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DrafterError, match=re.escape(said)):
        load_corrector(tmp_path, of.target)
