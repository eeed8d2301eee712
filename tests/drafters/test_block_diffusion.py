"""The default drafter: training sees what drafting sees, rows don't mix, checkpoints load strictly."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.base import TrainingBatch
from drafters.block_diffusion import BlockDiffusionConfig, BlockDiffusionDrafter
from drafters.checkpoint import target_identity, whole_number
from drafters.registry import load_drafter
from tests.models import FAMILIES, VOCABULARY, LetterTokenizer, prompts, tiny_decoder, tiny_drafter
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
    """A decoder whose drafter is saved in `tmp_path`."""
    decoder = tiny_decoder()
    drafter = tiny_drafter(decoder.target)
    drafter.save(tmp_path, target_identity(decoder.target, LetterTokenizer()), {})
    decoder.drafter = drafter.prepare()
    return decoder


def change(tmp_path, **changes):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_checkpoint_drafts_the_same(tmp_path):
    decoder, other = saved(tmp_path), tiny_decoder(seed=1).drafter
    again = load_drafter(tmp_path, decoder.target, LetterTokenizer())
    text, hidden = torch.tensor([prompts(1, seed=3)[0]]), []
    for drafter in (decoder.drafter, again, other):
        decoder.drafter = drafter
        cache, state, _ = run_prompt(decoder, text[:, :-1])
        hidden.append(drafter.draft(state, text[:, -1], cache, 4).hidden)
    first, *rest = hidden
    same, different = (((found - first).norm() / first.norm()).item() for found in rest)
    assert same < 0.02 < 0.5 < different  # bfloat16 on disk


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
        ({"draft_vocab_size": 7}, "draft_vocab_size=7, but there are 61"),
        ({"draft_vocab_size": "61"}, "draft_vocab_size='61'"),
        ({"taps": [-2, 3]}, r"taps=\[-2, 3\] must name layers -1..3"),
        ({"taps": [True, 3]}, "list of integers"),
        ({"block_size": 4.0}, "block_size=4.0"),
        ({"block_size": 10**12}, "1 to 65536"),
        ({"predicts": None}, "predicts=None"),
        ({"drafter": "magic"}, "drafter='magic' is unknown; known are block_diffusion"),
        ({"drafter": ["dflash"]}, "is unknown"),
        ({"drafter": None}, "drafter=None"),
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


def cast(dtype, *names):
    """Turn tensors (all floating-point ones by default) of a state dict into another type."""
    return lambda state: {
        name: tensor.to(dtype) if name in names or (not names and tensor.is_floating_point()) else tensor
        for name, tensor in state.items()
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_weights_of_any_precision_load(tmp_path, dtype):
    decoder = saved(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(cast(dtype)(load_file(file)), file)
    again = load_drafter(tmp_path, decoder.target, LetterTokenizer())
    assert again.slots.dtype == decoder.target.dtype
    torch.testing.assert_close(again.slots, decoder.drafter.slots, atol=0.02, rtol=0.01)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cast(torch.int8), "slots holds torch.int8, expected floating-point"),
        (cast(torch.int64, "slots"), "configuration: slots holds torch.int64"),
        (cast(torch.bool, "scale"), "scale holds torch.bool"),
        (cast(torch.float32, "draft_ids"), "draft_ids must be ascending token ids"),
        (lambda state: state | {"draft_ids": state["draft_ids"].flip(0)}, "draft_ids must be ascending"),
        (lambda state: state | {"draft_ids": state["draft_ids"].clamp(min=1)}, "draft_ids must be ascending"),
        (lambda state: state | {"draft_ids": state["draft_ids"] + 4}, "below the vocabulary's 64"),
        (lambda state: state | {"draft_ids": state["draft_ids"][:0]}, "draft_ids"),
        (lambda state: state | {"draft_ids": state["draft_ids"][None]}, "draft_ids"),
        (lambda state: {name: state[name] for name in state if name != "draft_ids"}, "missing draft_ids"),
    ],
)
def test_wrong_numbers_are_named(tmp_path, change, words):
    decoder = saved(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(DrafterError, match=words):
        load_drafter(tmp_path, decoder.target, LetterTokenizer())


@pytest.mark.parametrize("key", ["drafter", "format", "predicts", "block_size", "candidates", "taps", "target"])
def test_a_missing_key_is_named(tmp_path, key):
    decoder = saved(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({name: value for name, value in json.loads(file.read_text()).items() if name != key}))
    with pytest.raises(DrafterError, match=key):
        load_drafter(tmp_path, decoder.target, LetterTokenizer())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_in_a_files_place_is_named(tmp_path, name):
    decoder = saved(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(DrafterError, match=f"{name} can't be read"):
        load_drafter(tmp_path, decoder.target, LetterTokenizer())


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "\xff"])
def test_what_is_not_json_is_named(tmp_path, text):
    decoder = saved(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DrafterError, match="is not JSON"):
        load_drafter(tmp_path, decoder.target, LetterTokenizer())


def test_a_shape_that_drafts_nothing_is_named():
    target = tiny_decoder().target
    for shape in ({"block_size": 0}, {"candidates": 0}):
        with pytest.raises(DrafterError, match="must be at least 1"):
            BlockDiffusionDrafter(target, BlockDiffusionConfig((1,), (0,), **shape))


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


def test_only_a_vocabulary_may_be_larger_than_any_size():
    config = {"draft_vocab_size": 151_936, "rank": 151_936}
    assert whole_number(config, "draft_vocab_size", Path("config.json")) == 151_936
    with pytest.raises(DrafterError, match="rank=151936 must be an integer from 1 to 65536"):
        whole_number(config, "rank", Path("config.json"))
