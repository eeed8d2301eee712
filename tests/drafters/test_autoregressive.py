"""The draft model's cache follows the text and runs nothing twice; checkpoints and plain model folders."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from dcoco import SamplingParams
from drafters.autoregressive import BLOCK, AutoregressiveDrafter, save
from drafters.base import Context
from drafters.checkpoint import target_identity
from drafters.registry import load_drafter
from tests.models import FAMILIES, VOCABULARY, LetterTokenizer, llama, prompts, tiny_decoder
from verifier.cache import RaggedCache
from verifier.errors import DrafterError
from verifier.sampling import SamplingBatch
from verifier.target import Target


def target_of(family="llama", **changes):
    torch.manual_seed(0)
    return Target(FAMILIES[family](**changes))


def small(seed=5, **changes):
    torch.manual_seed(seed)
    return llama(**{"num_hidden_layers": 2, **changes})


class Session:
    """Rows of text with a drafter that follows them; counts the tokens that the draft model runs."""

    def __init__(self, drafter, rows, length=128):
        self.drafter, self.state, self.cache = drafter, drafter.start(rows, length), RaggedCache(rows, length)
        self.ran, forward = [], drafter.model.forward

        def counting(ids, cache, taps=(), first=0, tree=None, packing=None):
            self.ran.append(ids.numel() if packing is None else sum(packing.written))
            return forward(ids, cache, taps, first, tree, packing)

        drafter.model.forward = counting

    def draft(self, texts, slots):
        longest, rows = max(map(len, texts)), len(texts)
        text = torch.tensor([row + [VOCABULARY - 1] * (longest - len(row)) for row in texts])
        self.cache.lengths[:rows] = [len(row) - 1 for row in texts]
        ahead = torch.tensor([len(row) for row in texts])[:, None] + torch.arange(slots)
        context = Context(text, ahead, SamplingBatch.stack([SamplingParams()] * rows, [0] * rows), False)
        anchors = torch.tensor([row[-1] for row in texts])
        self.ran.clear()
        return self.drafter.draft(self.state, anchors, self.cache, slots, context).tokens.tolist()


def greedy(model, text, slots, ids):
    """The same by the bare model, all from the start each time."""
    for _ in range(slots):
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0, -1, ids]
        text = [*text, int(ids[logits.argmax()])]
    return text[-slots:]


@pytest.mark.parametrize("rows", [1, 3])
def test_drafts_are_the_bare_models_whatever_was_accepted(rows):
    ids = torch.arange(5, VOCABULARY - 2)
    session = Session(AutoregressiveDrafter(target_of(), Target(small()), 4, ids), rows)
    random, bare = torch.Generator().manual_seed(1), small()
    texts = prompts(rows, longest=40, seed=3)
    for round_ in range(8):
        drafts = session.draft(texts, slots := 1 + round_ % 4)
        assert drafts == [greedy(bare, text, slots, ids) for text in texts]
        for text, draft in zip(texts, drafts, strict=True):
            text += draft[: int(torch.randint(slots + 1, (1,), generator=random))]
            text.append(int(torch.randint(VOCABULARY, (1,), generator=random)))
        if round_ == 4 and rows > 1:  # a row changes its place, another begins
            session.cache.move(2, 0)
            session.state.move(2, 0)
            session.state.reset(2)
            texts = [texts[2], texts[1], [7, 8]]


def test_only_what_is_new_is_run():
    session = Session(AutoregressiveDrafter(target_of(), Target(small()), 4), 2)
    texts = [[5] * 9, [6] * 80]
    drafts = session.draft(texts, 4)
    assert session.ran == [79, 10, 2, 2, 2]  # the long one alone but for its end; then both, packed; then one by one
    texts = [texts[0] + drafts[0] + [7], texts[1] + drafts[1][:2] + [7]]
    session.draft(texts, 2)
    assert session.ran == [3, 2]  # all accepted: the last draft was not run; two accepted: only what followed
    session.draft(texts, 4)
    assert session.ran == [2, 2, 2, 2]


def test_a_draft_model_with_fewer_positions_stops_there():
    decoder = tiny_decoder(eos_ids=[])
    decoder.drafter = AutoregressiveDrafter(decoder.target, Target(small(max_position_embeddings=40)), 4)
    decoder.corrector = None
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    given = [[5] * 80, [5] * 20]
    outputs = decoder.generate(given, params, trace=True)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in decoder.generate(given, params, "plain")]
    assert outputs[0].stats.draft_tokens == 0 < outputs[1].stats.draft_tokens


def checkpoint(folder, trained_for, **changes):
    ids = torch.arange(3, 60)
    save(folder, small(), 3, ids, target_identity(trained_for, LetterTokenizer()), {"steps": 1})
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def test_a_checkpoint_comes_back(tmp_path):
    target = target_of()
    loaded = load_drafter(checkpoint(tmp_path, target), target, LetterTokenizer())
    assert loaded.block_size == 3 and loaded.draft_ids.tolist() == list(range(3, 60))
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert "lm_head.weight" not in stored and {weight.dtype for weight in stored.values()} == {torch.bfloat16}
    texts = prompts(2)
    bare = small().to(torch.bfloat16).float()
    assert Session(loaded, 2).draft(texts, 3) == [greedy(bare, text, 3, loaded.draft_ids) for text in texts]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"colour": 1}, "unknown keys"),
        ({"block_size": None}, "lacks the keys"),
        ({"block_size": 0}, "block_size=0 must be"),
        ({"format": 9}, "format=9; this version reads format=1"),
        ({"draft_vocab_size": 8}, "expected draft_ids of draft_vocab_size=8"),
        ({"target": {}}, "another target"),
    ],
)
def test_a_wrong_checkpoint_is_named(tmp_path, changes, said):
    target = target_of()
    with pytest.raises(DrafterError, match=said):
        load_drafter(checkpoint(tmp_path, target, **changes), target, LetterTokenizer())


def test_a_damaged_checkpoint_is_named(tmp_path):
    target = target_of()
    weights = checkpoint(tmp_path, target) / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-20])
    with pytest.raises(DrafterError, match="the draft model can't be loaded"):
        load_drafter(tmp_path, target, LetterTokenizer())
    (tmp_path / "draft_ids.safetensors").unlink()
    with pytest.raises(DrafterError, match=r"draft_ids\.safetensors is missing"):
        load_drafter(tmp_path, target, LetterTokenizer())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_any_model_folder_drafts(tmp_path, family):
    """Its vocabulary has padding, or lacks the target's; a head may have other names and the positions be learned."""
    if family == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=90, n_embd=16, n_layer=2, n_head=2))
    else:
        model = small(vocab_size=VOCABULARY + 6) if family == "llama" else FAMILIES[family]()
    model.save_pretrained(tmp_path)
    decoder = tiny_decoder(lambda: llama(vocab_size=VOCABULARY + 3), eos_ids=[])
    decoder.drafter, decoder.corrector = load_drafter(tmp_path, decoder.target, LetterTokenizer()), None
    assert decoder.drafter.block_size == BLOCK
    given, params = [[VOCABULARY + 2, 5], *prompts(2)], SamplingParams(max_tokens=12, temperature=0.8, seed=1)
    for rule in ("match", "sampled"):
        decoder.rule = rule
        outputs = decoder.generate(given, params)
        assert all(len(output.token_ids) == 12 for output in outputs)
    decoder.rule = "match"
    assert [o.token_ids for o in decoder.generate(given, params)] == [
        o.token_ids for o in decoder.generate(given, params, "plain")
    ]


def test_a_model_with_another_vocabulary_is_refused(tmp_path):
    small(vocab_size=32).save_pretrained(tmp_path)
    with pytest.raises(DrafterError, match="vocab_size=32, but the target's tokenizer has 64 ids"):
        load_drafter(tmp_path, target_of(), LetterTokenizer())


def test_a_model_with_another_tokenizer_is_refused(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    small().save_pretrained(tmp_path)
    vocabulary = LetterTokenizer().get_vocab()
    for words, fits in ((vocabulary, True), ({word: 63 - index for word, index in vocabulary.items()}, False)):
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, chr(256)))).save_pretrained(tmp_path)
        if fits:
            assert load_drafter(tmp_path, target_of(), LetterTokenizer()).block_size == BLOCK
            continue
        with pytest.raises(DrafterError, match=r"another tokenizer than the target: .* \(64 tokens differ\)"):
            load_drafter(tmp_path, target_of(), LetterTokenizer())


def test_draft_ids_must_be_of_both_vocabularies():
    with pytest.raises(DrafterError, match="ascending token ids below the vocabulary's 40"):
        AutoregressiveDrafter(target_of(), Target(small(vocab_size=40)), 4, torch.tensor([3, 50]))
