"""EAGLE: training sees what drafting sees, rows come and go as if alone, the text stays the target's."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from dcoco import SamplingParams
from dcoco.engine import Engine
from drafters.base import Context, Pick, TrainingBatch
from drafters.checkpoint import target_identity
from drafters.eagle import EagleConfig, EagleDrafter
from drafters.registry import load_drafter
from tests.dcoco.test_law import SETTINGS, answers, combined_pvalue, decoder_of
from tests.models import FAMILIES, VOCABULARY, LetterTokenizer, llama, prompts, tiny_decoder
from verifier.cache import RaggedCache
from verifier.errors import DrafterError
from verifier.linear import PackedBFloat16
from verifier.sampling import SamplingBatch
from verifier.target import Target

RIVALS = ("llama", "qwen3", "gemma3")


def with_eagle(decoder, block=4):
    """The decoder with an EAGLE drafter that has learnt nothing but what its target's layer knows."""
    torch.manual_seed(0)
    target = decoder.target
    drafter = EagleDrafter(target, EagleConfig((0, 2, 3), block), torch.arange(target.vocab_size - 1))
    drafter.initialise(scale=4.0)
    for linear in (drafter.fuse, drafter.fc):
        linear.weight.data += 0.05 * torch.randn_like(linear.weight)
    decoder.drafter, decoder.corrector, decoder.token_table = drafter.prepare(), None, None
    return decoder


@cache
def eagle_decoder(family="llama"):
    return with_eagle(tiny_decoder(family))


def knowing(patch, outputs):
    """Let drafts be right three times of four, so that all lengths are accepted; what the drafter itself would pick is
    noted by the text up to the anchor and the slot."""
    seen, texts = {}, [tuple(output.prompt_token_ids + output.token_ids) for output in outputs]

    def pick(context, logits, slot, ids):
        columns = logits.argmax(-1)
        for row, start in enumerate(context.positions[:, 0].tolist()):
            text, position = tuple(context.text[row, :start].tolist()), start + slot
            seen[text, slot] = int(columns[row])
            truth = next((known for known in texts if known[:start] == text), ())
            if position % 4 and position < len(truth):
                columns[row] = min(truth[position], len(ids) - 1)
        return Pick(columns, torch.zeros(len(columns)), None)

    patch.setattr(Context, "pick", pick)
    return seen


class Session:
    """A target and its drafter over rows of text, as an engine drives them."""

    def __init__(self, decoder, rows, room=64):
        self.target, self.drafter = decoder.target, decoder.drafter
        self.cache, self.state = RaggedCache(rows, room), decoder.drafter.start(rows, room)

    def feed(self, texts, first=0):
        """Run tokens of rows `first ..`, of different lengths: padding is run too, but isn't committed."""
        counts = torch.tensor([len(text) for text in texts])
        ids = torch.zeros(len(texts), int(counts.max()), dtype=torch.int64)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
        result = self.target.forward(ids, self.cache, self.drafter.taps, first)
        self.drafter.observe(self.state, first, result.taps, counts)
        for row, text in enumerate(texts, first):
            self.cache.lengths[row] += len(text)

    def draft(self, anchors, slots, forced=None):
        """Hidden states [R, n, H] of a draft, of the tokens forced [R, n] or else the best ones, and the tokens."""
        rows, hidden = len(anchors), []
        sampling = SamplingBatch.stack([SamplingParams()] * rows, [0] * rows, torch.device("cpu"))
        context = Context(torch.zeros(rows, 1), torch.zeros(rows, slots, dtype=torch.int64), sampling, False)
        if forced is not None:
            context.pick = lambda logits, slot, ids: Pick(forced[:, slot], torch.zeros(rows), None)
        hook = self.drafter.head.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
        draft = self.drafter.draft(self.state, torch.tensor(anchors), self.cache, slots, context)
        hook.remove()
        return torch.stack(hidden, dim=1), draft.tokens


def close(mine, theirs):
    torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_training_computes_what_drafting_computes(family):
    decoder = eagle_decoder(family)
    drafter = decoder.drafter
    ids = torch.randint(3, VOCABULARY - 1, (2, 18), generator=torch.Generator().manual_seed(0))
    taps = decoder.target.forward(ids, RaggedCache(2, 18), drafter.config.taps).taps
    anchors = torch.tensor([[1, 6, 13], [13, 2, 9]])
    hidden = drafter.forward_blocks(TrainingBatch(ids, anchors, taps, {}, {}), 4)
    for row in range(2):
        for index, anchor in enumerate(anchors[row].tolist()):
            session = Session(decoder, 1)
            session.feed([ids[row, : anchor // 2].tolist() or [int(ids[row, 0])]])
            session.feed([ids[row, session.cache.lengths[0] : anchor].tolist()]) if anchor > 1 else None
            forced = ids[row : row + 1, anchor + 1 : anchor + 5]
            drafted, _ = session.draft([int(ids[row, anchor])], 4, forced)
            close(hidden[row, index], drafted[0])


@pytest.mark.parametrize("family", RIVALS)
@torch.inference_mode()
def test_rows_come_and_go_as_if_alone(family):
    """Ragged chunks, a row that moves, one that is taken over: drafts are those of a fresh state."""
    decoder = eagle_decoder(family)
    texts = [prompt * 2 for prompt in prompts(4, longest=16, seed=8)]
    session = Session(decoder, 4)
    session.feed([texts[3][:3], [5, 6], texts[2][:1]])
    session.feed([texts[3][3:], [], texts[2][1:]])
    session.state.move(2, 1)
    session.cache.move(2, 1)
    session.state.move(0, 3)
    session.cache.move(0, 3)
    for row in (0, 2):
        session.state.reset(row)
        session.cache.lengths[row] = 0
    session.feed([texts[0]])
    session.feed([texts[1]], first=2)
    order = [0, 2, 1, 3]
    anchors = [7, 8, 9, 10]
    before = list(session.state.cache.lengths)
    together, tokens = session.draft(anchors, 4)
    assert session.state.cache.lengths == before == session.cache.lengths
    again, _ = session.draft(anchors, 4)
    assert torch.equal(together, again)
    for row, index in enumerate(order):
        alone = Session(decoder, 1)
        alone.feed([texts[index]])
        hidden, chosen = alone.draft([anchors[row]], 4)
        assert torch.equal(chosen[0], tokens[row])
        close(together[row], hidden[0])


def test_a_first_token_has_no_feature_before_it():
    session = Session(eagle_decoder(), 2)
    session.feed([[5, 6]])
    hidden, _ = session.draft([7], 2)
    session.state.reset(0)
    session.cache.lengths[0] = 0
    fresh, _ = session.draft([7], 2)
    alone, _ = Session(session, 1).draft([7], 2)
    assert torch.equal(fresh, alone)
    assert not torch.allclose(hidden, alone, atol=1e-2)


def test_unobserved_tokens_are_an_error():
    session = Session(eagle_decoder(), 1)
    session.feed([[5, 6]])
    session.cache.lengths[0] += 1
    with pytest.raises(DrafterError, match=r"observed \[2\] tokens, the target holds \[3\]"):
        session.draft([7], 2)


@pytest.mark.parametrize("family", RIVALS)
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9, "top_k": 20}])
def test_text_is_plain_decodings_and_drafts_do_not_depend_on_the_batch(family, params, monkeypatch):
    """Prompts of all lengths, in chunks, up to the position limit; more than there are rows."""
    monkeypatch.setattr("dcoco.engine.PREFILL_CHUNK", 7)
    decoder = eagle_decoder(family)
    monkeypatch.setattr(decoder, "max_rows", 3)
    given = [*prompts(5, seed=1), [5], [5, 6] * 55]
    each = [SamplingParams(max_tokens=4 + 5 * (seed % 5), seed=seed, **params) for seed in range(7)]
    plain = decoder.generate(given, each, "plain")
    natural = decoder.generate(given[::-1], each[::-1], "dcoco")[::-1]
    seen = knowing(monkeypatch, plain)
    batched, drafts = decoder.generate(given, each, "top1"), dict(seen)
    seen.clear()
    alone = [decoder.generate([prompt], one, "top1")[0] for prompt, one in zip(given, each, strict=True)]
    for outputs in (natural, batched, alone):
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert seen.items() <= drafts.items()
    for mine, theirs in zip(batched, alone, strict=True):
        assert (mine.stats.rounds, mine.stats.accepted_at) == (theirs.stats.rounds, theirs.stats.accepted_at)
    assert sum(output.stats.accepted_tokens for output in batched) > sum(output.stats.rounds for output in batched)


def test_greedy_and_sampled_rows_side_by_side():
    decoder = eagle_decoder()
    given = prompts(6, seed=3)
    each = [SamplingParams(max_tokens=16, temperature=0.9 * (i % 2), seed=i) for i in range(6)]
    plain = decoder.generate(given, each, "plain")
    for rule in ("match", "one_hot", "sampled"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoder, "rule", rule)
            outputs = decoder.generate(given, each, "top1")
        for index in range(6) if rule == "match" else (0, 2, 4):
            assert outputs[index].token_ids == plain[index].token_ids


@pytest.mark.parametrize("rule", ["match", "sampled"])
def test_committed_tokens_follow_the_targets_law(rule):
    decoder = with_eagle(decoder_of(rule), block=3)
    texts, rounds = answers(decoder, "top1", 2000, **SETTINGS["warm"])
    assert rounds >= 4000
    assert combined_pvalue(decoder, texts, **SETTINGS["warm"]) > 1e-3


@pytest.mark.parametrize("family", RIVALS)
def test_requests_that_come_and_go_leave_no_trace(family, monkeypatch):
    """Rows are cancelled, taken over and moved in mid-flight; what is left drafts as a fresh engine does."""
    monkeypatch.setattr("dcoco.engine.PREFILL_CHUNK", 9)
    monkeypatch.setattr("dcoco.engine.DISORDER", 0.5)  # rows are sorted whenever one begins
    decoder = eagle_decoder(family)
    given, params = [prompt * 3 for prompt in prompts(8, seed=5)], SamplingParams(max_tokens=20, ignore_eos=True)
    seen = knowing(monkeypatch, decoder.generate(given, params, "plain"))
    engine = Engine(decoder, "top1", max_num_seqs=3)
    requests = [engine.submit(prompt, params) for prompt in given]
    while engine.busy:
        engine.step()
        for request in requests[1::3]:
            if len(request.token_ids) > 6:
                engine.cancel(request)
    drafts = dict(seen)
    seen.clear()
    staying = [
        (prompt, request)
        for prompt, request in zip(given, requests, strict=True)
        if request.result().finish_reason == "length"
    ]
    assert len(staying) == 5
    for prompt, request in staying:
        fresh = decoder.generate([prompt], params, "top1")[0]
        assert (request.token_ids, request.stats.accepted_at) == (fresh.token_ids, fresh.stats.accepted_at)
    assert seen.items() <= drafts.items()


def test_a_measured_budget_keeps_the_text(monkeypatch, tmp_path):
    monkeypatch.setenv("DCOCO_CACHE", str(tmp_path))
    decoder = with_eagle(tiny_decoder(adaptive=True, max_rows=4))
    given, params = prompts(4, seed=2), SamplingParams(max_tokens=12)
    adaptive, plain = (decoder.generate(given, params, method) for method in ("top1", "plain"))
    assert [output.token_ids for output in adaptive] == [output.token_ids for output in plain]


def saved(folder):
    decoder = with_eagle(tiny_decoder())
    decoder.drafter.save(folder, target_identity(decoder.target, LetterTokenizer()), {})
    return decoder


def test_drafting_in_bfloat16_on_packed_weights(tmp_path):
    saved(tmp_path)
    decoder = tiny_decoder(eos_ids=[])
    decoder.target, decoder.corrector = Target(llama().to(torch.bfloat16)), None
    decoder.drafter = load_drafter(tmp_path, decoder.target, LetterTokenizer())
    assert isinstance(decoder.drafter.fc, PackedBFloat16) == PackedBFloat16.serves(torch.ones(1, dtype=torch.bfloat16))
    for output in decoder.generate(prompts(5, seed=1), SamplingParams(max_tokens=20), "top1"):
        assert len(output.token_ids) == 20 and output.stats.draft_tokens > 0


def test_a_checkpoint_drafts_the_same(tmp_path):
    decoder = saved(tmp_path)
    again = load_drafter(tmp_path, decoder.target, LetterTokenizer())
    assert again.config == decoder.drafter.config
    asked, rounds = SamplingParams(max_tokens=40), []
    for drafter in (decoder.drafter, again):
        decoder.drafter = drafter
        rounds.append(sum(output.stats.rounds for output in decoder.generate(prompts(5, seed=1), asked, "top1")))
    assert abs(rounds[0] - rounds[1]) < 0.1 * rounds[0] < 0.1 * 5 * 39  # bfloat16 on disk


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "format=2; this version reads format=1"),
        ({"colour": "red"}, "colour"),
        ({"taps": [0, 4, 3]}, r"taps=\[0, 4, 3\] must name layers 0..3"),
        ({"taps": []}, "taps"),
        ({"taps": [0, 3]}, r"fuse.weight has shape \[32, 96\], expected \[32, 64\]"),
        ({"taps": 3}, "must be a list"),
        ({"block_size": 0}, "block_size=0"),
        ({"draft_vocab_size": 7}, "draft_vocab_size=7, but there are 63"),
        ({"target": {"hidden_size": 64}}, "another target"),
    ],
)
def test_a_wrong_checkpoint_is_named(tmp_path, changes, words):
    decoder, file = saved(tmp_path), tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(DrafterError, match=words):
        load_drafter(tmp_path, decoder.target, LetterTokenizer())


def test_missing_keys_and_wrong_tensors_are_named(tmp_path):
    decoder = saved(tmp_path)
    file, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    tensors, config = load_file(weights), json.loads(file.read_text())
    for change, words in (
        ({"fc.weight": tensors["fc.weight"].int()}, "fc.weight holds torch.int32"),
        ({"draft_ids": tensors["draft_ids"] + 5}, "below the vocabulary's 64"),
        ({"more": torch.ones(1)}, "unexpected more"),
    ):
        save_file(tensors | change, weights)
        with pytest.raises(DrafterError, match=words):
            load_drafter(tmp_path, decoder.target, LetterTokenizer())
    file.write_text(json.dumps({key: value for key, value in config.items() if key != "block_size"}))
    with pytest.raises(DrafterError, match=r"lacks the keys \['block_size'\]"):
        load_drafter(tmp_path, decoder.target, LetterTokenizer())


def test_a_shape_that_drafts_nothing_is_named():
    with pytest.raises(DrafterError, match="block_size=0 must be at least 1"):
        EagleDrafter(eagle_decoder().target, replace(EagleConfig((0,)), block_size=0))
