"""The default drafter: training sees what drafting sees, rows don't mix, checkpoints load strictly."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.base import TrainingBatch
from drafters.block_diffusion import BlockDiffusionConfig, BlockDiffusionDrafter
from drafters.checkpoint import target_identity
from drafters.registry import load_drafter
from tests.models import FAMILIES, VOCABULARY, LetterTokenizer, prompts, tiny_decoder
from verifier.cache import RaggedCache
from verifier.errors import DrafterError
from verifier.target import Target


def run_prompt(decoder, ids, room=16):
    """A cache, a draft state and the target's pass for a batch of equally long prompts, the last token left out."""
    target, drafter = decoder.target, decoder.drafter
    cache = RaggedCache(len(ids), ids.shape[1] + room)
    result = target.forward(ids[:, :-1], cache, drafter.taps)
    cache.lengths = [ids.shape[1] - 1] * len(ids)
    state = drafter.start(len(ids), ids.shape[1] + room)
    drafter.observe(state, 0, result.taps, torch.full((len(ids),), ids.shape[1] - 1))
    return cache, state, result


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_training_computes_what_drafting_computes(family):
    decoder = tiny_decoder(family)
    drafter = decoder.drafter
    ids = torch.randint(3, VOCABULARY, (2, 12))
    cache, state, result = run_prompt(decoder, ids)
    layers = drafter.config.target_layers
    pairs = {layer: tuple(store.clone() for store in cache.layer(layer)) for layer in layers}
    lattice = drafter.draft(state, ids[:, -1], cache, 3)

    batch = TrainingBatch(
        ids=ids,
        anchors=torch.tensor([[5, 11], [11, 3]]),
        taps=[torch.nn.functional.pad(tap, (0, 0, 0, 1)) for tap in result.taps],
        keys={layer: torch.nn.functional.pad(keys, (0, 0, 0, 1)) for layer, (keys, _) in pairs.items()},
        values={layer: torch.nn.functional.pad(values, (0, 0, 0, 1)) for layer, (_, values) in pairs.items()},
    )
    hidden = drafter.forward_blocks(batch, 3)
    torch.testing.assert_close(hidden[0, 1], lattice.hidden[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(hidden[1, 0], lattice.hidden[1], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(hidden[0, 0], lattice.hidden[0], atol=1e-2)


@torch.inference_mode()
def test_ragged_rows_draft_as_they_do_alone():
    decoder = tiny_decoder()
    target, drafter = decoder.target, decoder.drafter
    given = [prompt for prompt in prompts(5, seed=8) if len(prompt) > 1]
    longest = max(map(len, given))
    padded = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in given])
    cache = RaggedCache(len(given), longest + 8)
    result = target.forward(padded, cache, drafter.taps)
    cache.lengths = [len(prompt) - 1 for prompt in given]
    state = drafter.start(len(given), longest + 8)
    drafter.observe(state, 0, result.taps, torch.tensor(cache.lengths))
    anchors = torch.tensor([prompt[-1] for prompt in given])
    together = drafter.draft(state, anchors, cache, 4)
    for row, prompt in enumerate(given):
        cache, state, _ = run_prompt(decoder, torch.tensor([prompt]))
        alone = drafter.draft(state, torch.tensor(prompt[-1:]), cache, 4)
        assert torch.equal(alone.ids[0], together.ids[row])
        torch.testing.assert_close(alone.log_probs[0], together.log_probs[row], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_lattice_is_ordered_and_keeps_to_the_draft_vocabulary():
    decoder = tiny_decoder()
    cache, state, _ = run_prompt(decoder, torch.tensor([[4, 5, 6]]))
    lattice = decoder.drafter.draft(state, torch.tensor([6]), cache, 4)
    assert lattice.ids.max() < VOCABULARY - 3
    assert (lattice.log_probs.diff(dim=-1) <= 0).all()
    assert (lattice.log_probs.exp().sum(-1) <= 1 + 1e-5).all()
    assert cache.lengths == [2]  # the block left nothing behind


@torch.inference_mode()
def test_nothing_new_leaves_the_features_alone():
    decoder = tiny_decoder()
    _, state, result = run_prompt(decoder, torch.tensor([[4, 5, 6], [7, 8, 9]]))
    before = state.features.clone()
    decoder.drafter.observe(state, 0, result.taps, torch.tensor([0, 1]))
    assert torch.equal(state.features[0], before[0])
    assert not torch.equal(state.features[1], before[1])


def saved(tmp_path):
    decoder = tiny_decoder()
    identity = target_identity(decoder.target, LetterTokenizer())
    decoder.drafter.save(tmp_path, identity, {})
    return decoder


def change(tmp_path, **changes):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_checkpoint_drafts_the_same(tmp_path):
    decoder = saved(tmp_path)
    again = load_drafter(tmp_path, decoder.target, LetterTokenizer())
    for name, tensor in again.state_dict().items():
        original = decoder.drafter.state_dict()[name]
        torch.testing.assert_close(tensor, original, atol=0.02, rtol=0.01)  # bfloat16 on disk


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 9}, "format=9"),
        ({"predicts": "same"}, "predicts='same'"),
        ({"colour": "red"}, "colour"),
        ({"block_size": 5}, r"slots has shape \[4, 32\], expected \[5, 32\]"),
        ({"target_layers": [1, 4]}, "0..3"),
        ({"target_layers": [3, 1]}, "ascend"),
        ({"target_layers": 3}, "target_layers=3 must be a list"),
        ({"taps": ["0", 3]}, "list of integers"),
        ({"block_size": "4"}, "block_size='4' must be an integer"),
        ({"candidates": 0}, "candidates=0"),
        ({"taps": [0]}, "unexpected feature_projections.1"),
        ({"draft_vocab_size": 7}, "expected 7"),
        ({"target": {"hidden_size": 64}}, "another target"),
        ({"target": None}, "which target"),
    ],
)
def test_a_wrong_checkpoint_is_named(tmp_path, changes, words):
    decoder = saved(tmp_path)
    change(tmp_path, **changes)
    with pytest.raises(DrafterError, match=words):
        load_drafter(tmp_path, decoder.target, LetterTokenizer())


def test_missing_unexpected_and_truncated_tensors_are_named(tmp_path):
    decoder = saved(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    tensor = state.pop("slots")
    save_file(state | {"stray": tensor}, file)
    with pytest.raises(DrafterError, match="missing slots; unexpected stray"):
        load_drafter(tmp_path, decoder.target, LetterTokenizer())
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DrafterError, match="truncated"):
        load_drafter(tmp_path, decoder.target, LetterTokenizer())
    file.unlink()
    with pytest.raises(DrafterError, match="missing"):
        load_drafter(tmp_path, decoder.target, LetterTokenizer())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DrafterError, match="not JSON"):
        load_drafter(tmp_path, decoder.target, LetterTokenizer())


def test_another_tokenizer_is_another_target(tmp_path):
    decoder = saved(tmp_path)

    class Other(LetterTokenizer):
        def get_vocab(self):
            return {"a": 0}

    with pytest.raises(DrafterError, match="tokenizer_sha256"):
        load_drafter(tmp_path, decoder.target, Other())


def test_preparing_in_bfloat16_keeps_rotary_frequencies_exact():
    torch.manual_seed(0)
    target = Target(FAMILIES["llama"]())
    exact = target.body.rotary_emb.inv_freq.clone()
    for parameter in target.model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    target.dtype = torch.bfloat16
    drafter = BlockDiffusionDrafter(target, BlockDiffusionConfig((1, 3), (0, 3))).prepare()
    assert drafter.slots.dtype == torch.bfloat16
    assert torch.equal(drafter.body.rotary_emb.inv_freq, exact)


def test_initialised_from_the_target():
    decoder = tiny_decoder()
    drafter = BlockDiffusionDrafter(decoder.target, BlockDiffusionConfig((1, 3), (0, 3)))
    drafter.initialise(scale=4.0)
    for copy, index in zip(drafter.body.layers, (1, 3), strict=True):
        for mine, theirs in zip(copy.parameters(), decoder.target.layers[index].parameters(), strict=True):
            assert torch.equal(mine, theirs)
        assert copy.self_attn.layer_idx == index
