"""DSpark's heads: logits and confidence as documented, the plain drafter at first, and the target's text and law."""

import json
import re
import shutil

import pytest
import torch

from dcoco import SamplingParams
from drafters.base import Context
from drafters.checkpoint import target_identity
from drafters.dspark import DSparkConfig, DSparkDrafter
from drafters.registry import load_drafter
from tests.dcoco.test_law import SETTINGS, answers, combined_pvalue, decoder_of
from tests.models import LetterTokenizer, prompts, tiny_decoder, tiny_drafter
from verifier.errors import DrafterError
from verifier.sampling import SamplingBatch


def with_heads(of, gated=False, trained=True, rank=6):
    """The decoder, its drafter with heads that have a say where they are trained."""
    torch.manual_seed(0)
    drafter = DSparkDrafter(of.drafter, of.target, DSparkConfig(rank, gated))
    if trained:
        torch.nn.init.normal_(drafter.before.weight[:-1])
        torch.nn.init.normal_(drafter.after.weight)
    of.drafter, of.corrector = drafter.prepare(), None
    return of


def greedy(rows):
    return SamplingBatch.stack([SamplingParams()] * rows, range(rows))


@pytest.mark.parametrize("gated", [False, True])
def test_tokens_and_confidence_are_as_documented(gated):
    of = with_heads(tiny_decoder(), gated)
    drafter, rows, slots = of.drafter, 5, 4
    hidden = torch.randn(rows, slots, of.target.hidden_size)
    anchors = torch.tensor([3, 10, 60, 62, 63])  # the last two can't be drafted
    context = Context(anchors[:, None], torch.arange(slots).expand(rows, -1), greedy(rows), sampled=False)
    draft = drafter.choose(anchors, hidden, context)
    ids = drafter.base.draft_ids.tolist()
    for row in range(rows):
        token, said = int(anchors[row]), 0.0
        for slot in range(slots):
            before = drafter.before.weight[ids.index(token)] if token in ids else torch.zeros(6)
            seen = torch.cat([hidden[row, slot], before])
            gate = (drafter.gate.weight @ seen).sigmoid() if gated else 1.0
            logits = drafter.base.logits(hidden[row, slot]) + drafter.after.weight @ (before * gate)
            token = ids[int(logits.argmax())]
            said += drafter.confidence(seen).sigmoid().log().item()
            assert draft.tokens[row, slot] == token
            assert abs(draft.log_probs[row, slot].item() - said) < 1e-4


@pytest.mark.parametrize("gated", [False, True])
def test_untrained_heads_are_the_plain_drafter(gated):
    asked = SamplingParams(max_tokens=30)
    for prompt in prompts(3, seed=4):
        plain = tiny_decoder(eos_ids=[]).generate([prompt], asked, "top1")[0].stats
        stats = with_heads(tiny_decoder(eos_ids=[]), gated, trained=False).generate([prompt], asked, "walk")[0].stats
        assert (stats.rounds, stats.accepted_at) == (plain.rounds, plain.accepted_at)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_text_is_plain_text_alone_and_in_mixed_batches(family, gated):
    of, given = with_heads(tiny_decoder(family), gated), prompts(6, seed=1)
    each = [SamplingParams(max_tokens=20, temperature=0.8 * (seed % 2), seed=seed) for seed in range(6)]
    plain = of.generate(given, each, "plain")
    together = of.generate(given, each, "dcoco")
    alone = [of.generate([prompt], one)[0] for prompt, one in zip(given, each, strict=True)]
    for outputs in (together, alone):
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert sum(output.stats.accepted_tokens for output in together) > 0


def test_q_is_the_law_of_each_slot_over_the_whole_draft_vocabulary():
    of, rows, slots = with_heads(tiny_decoder()), 4000, 2
    drafter = of.drafter
    hidden = torch.randn(1, slots, of.target.hidden_size).expand(rows, -1, -1)
    sampling = SamplingBatch.stack([SamplingParams(temperature=0.8)] * rows, range(rows))
    context = Context(torch.zeros(rows, 1).long(), torch.arange(slots).expand(rows, -1), sampling, sampled=True)
    draft = drafter.choose(torch.full((rows,), 9), hidden, context)
    words = len(drafter.base.draft_ids)
    assert draft.q.shape == draft.candidates.shape == (rows, slots, words)
    torch.testing.assert_close(draft.q.sum(-1), torch.ones(rows, slots))
    for slot, before in enumerate([torch.full((rows,), 9), draft.tokens[:, 0]]):
        correction, _ = drafter.heads(hidden[:, slot], drafter.column_of[before])
        law = ((drafter.base.logits(hidden[:, slot]) + correction) / 0.8).softmax(-1)
        torch.testing.assert_close(draft.q[:, slot], law)
    share = torch.bincount(draft.tokens[:, 0], minlength=words).float() / rows
    torch.testing.assert_close(share, draft.q[0, 0], atol=0.03, rtol=0)


@pytest.mark.parametrize("gated", [False, True])
def test_sampled_drafts_follow_the_targets_law(gated):
    of = with_heads(decoder_of("sampled"), gated)
    texts, _ = answers(of, "walk", 3000, **SETTINGS["warm"])
    assert combined_pvalue(of, texts, **SETTINGS["warm"]) > 1e-3


def test_a_budget_that_goes_by_confidence_changes_no_text(tmp_path, monkeypatch):
    monkeypatch.setenv("DCOCO_CACHE", str(tmp_path / "cache"))
    given, asked = prompts(2, seed=6), SamplingParams(max_tokens=40)
    for bias in (30.0, -30.0):
        of = with_heads(tiny_decoder(adaptive=True, max_rows=2))
        of.drafter.confidence.bias.fill_(bias)
        texts = [[output.token_ids for output in of.generate(given, asked, method)] for method in ("dcoco", "plain")]
        assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A decoder, and a folder that holds its drafter and, beside that, its heads."""
    folder = tmp_path_factory.mktemp("checkpoints")
    of = tiny_decoder()
    identity = target_identity(of.target, LetterTokenizer())
    tiny_drafter(of.target).save(folder / "drafter", identity, {})
    with_heads(of).drafter.save(folder / "heads", "../drafter", identity, {"steps": 0})
    return of, folder


def test_heads_are_saved_and_loaded(saved):
    of, folder = saved
    again = load_drafter(folder / "heads", of.target, LetterTokenizer())
    assert isinstance(again, DSparkDrafter) and again.config == of.drafter.config
    assert (again.block_size, again.taps) == (of.drafter.block_size, of.drafter.taps)
    for name, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor, of.drafter.state_dict()[name], atol=0.02, rtol=0.01)
    assert not any(name.startswith(("base", "body")) for name in again.state_dict())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank": 7}, "after.weight has shape [61, 6], expected [61, 7]"),
        ({"rank": "6"}, "rank='6' must be an integer"),
        ({"gated": 1}, "gated=1 must be true or false"),
        ({"gated": True}, "missing gate.weight"),
        ({"format": 2}, "format=2; this version reads format=1"),
        ({"heads": 2}, "unknown keys ['heads']"),
        ({"base": "."}, "base='.' must be the path"),
        ({"base": None}, "base=None must be the path"),
        ({"base": "../nothing"}, "holds no config.json"),
        ({"base": "../heads"}, "stands on a drafter of blocks, not on a DSparkDrafter"),
        ({"target": None}, "doesn't say which target"),
    ],
)
def test_wrong_heads_are_named(saved, tmp_path, change, said):
    of, folder = saved
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    shutil.copytree(folder / "heads", tmp_path / "wrong")
    file = tmp_path / "wrong" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DrafterError, match=re.escape(said)):
        load_drafter(tmp_path / "wrong", of.target, LetterTokenizer())


def test_a_missing_key_and_a_damaged_file_are_named(saved, tmp_path):
    of, folder = saved
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "heads" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(DrafterError, match="truncated or damaged"):
        load_drafter(tmp_path / "heads", of.target, LetterTokenizer())
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    del config["rank"]
    (tmp_path / "heads" / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterError, match=re.escape("lacks the keys ['rank']")):
        load_drafter(tmp_path / "heads", of.target, LetterTokenizer())
