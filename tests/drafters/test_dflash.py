"""DFlash: the ragged incremental draft against a dense reference, training blocks, checkpoints and their refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drafters.base import Lattice, TrainingBatch
from drafters.dflash import DFlashConfig, DFlashDrafter, DFlashState
from verifier.cache import RaggedCache
from verifier.errors import DrafterError
from verifier.target import Target

VOCAB, HIDDEN, MASK = 40, 32, 39
TAPS = (0, 2)


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=1,
    )
    return Target(LlamaForCausalLM(config).float())


def make(target: Target, **changes: Any) -> DFlashDrafter:
    """A random drafter in which no weight is neutral."""
    config = DFlashConfig.for_target(target, layers=2, taps=TAPS, block_size=4, mask_token_id=MASK)
    draft_ids = changes.pop("draft_ids", None)
    drafter = DFlashDrafter(target, replace(config, **changes), draft_ids)
    torch.manual_seed(1)
    drafter.initialise()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return drafter


class Session:
    """Feeds a drafter and the target's cache with known tokens, as a decoder would."""

    def __init__(self, target: Target, drafter: DFlashDrafter, rows: int):
        self.target, self.drafter = target, drafter
        self.cache = RaggedCache(rows, 64)
        self.state: DFlashState = drafter.start(rows, 48)

    def feed(self, ids_RQ: Tensor, counts: list[int]) -> None:
        out = self.target.forward(ids_RQ, self.cache, TAPS)
        self.drafter.observe(self.state, 0, out.taps, torch.tensor(counts))
        for row, count in enumerate(counts):
            self.cache.lengths[row] += count

    def draft(self, anchors: list[int], slots: int) -> Lattice:
        return self.drafter.draft(self.state, torch.tensor(anchors), self.cache, slots)


def tokens(count: int, seed: int) -> Tensor:
    return torch.randint(2, MASK, (count,), generator=torch.Generator().manual_seed(seed))


def features(target: Target, ids: Tensor) -> list[Tensor]:
    """The taps [1, P, H] of one sequence, run at once."""
    return [tap.clone() for tap in target.forward(ids[None], RaggedCache(1, 64), TAPS).taps]


@torch.no_grad()
def reference(target: Target, drafter: DFlashDrafter, ids: Tensor, anchor: int, inputs: int) -> Tensor:
    """Hidden states [m, H] of all block inputs, from the checkpoint's tensors alone: no cache, no mask, no batch."""
    weights = drafter.state_dict()
    backbone = drafter.config.backbone
    heads, groups, size = backbone.num_attention_heads, backbone.num_key_value_heads, backbone.head_dim

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + backbone.rms_norm_eps).sqrt() * weights[name]

    def rotate(x: Tensor, positions: Tensor) -> Tensor:  # [N, L, D]
        theta = backbone.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        angle = positions[:, None] * theta
        first, second = x.chunk(2, -1)
        return torch.cat(
            [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1
        )

    table = target.model.get_input_embeddings().weight
    mask = weights["mask_embedding"] if "mask_embedding" in weights else table[MASK]
    hidden = torch.stack([table[anchor]] + [mask] * (inputs - 1))
    context = torch.cat(features(target, ids), -1)[0] @ weights["fc.weight"].T
    context = norm(context, "hidden_norm.weight")
    everywhere = torch.arange(len(ids) + inputs)
    for index in range(backbone.num_hidden_layers):
        prefix = f"layers.{index}."
        block = norm(hidden, prefix + "input_layernorm.weight")
        both = torch.cat([context, block])

        def heads_of(x: Tensor, name: str, prefix: str = prefix) -> Tensor:
            return (x @ weights[f"{prefix}self_attn.{name}_proj.weight"].T).view(len(x), -1, size).transpose(0, 1)

        q = rotate(norm(heads_of(block, "q"), prefix + "self_attn.q_norm.weight"), everywhere[len(ids) :])
        k = rotate(norm(heads_of(both, "k"), prefix + "self_attn.k_norm.weight"), everywhere)
        k, v = (x.repeat_interleave(heads // groups, 0) for x in (k, heads_of(both, "v")))
        attended = (q @ k.transpose(1, 2) / size**0.5).softmax(-1) @ v
        attended = attended.transpose(0, 1).reshape(inputs, -1)
        hidden = hidden + attended @ weights[prefix + "self_attn.o_proj.weight"].T
        x = norm(hidden, prefix + "post_attention_layernorm.weight")
        gate, up, down = (weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        hidden = hidden + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    return norm(hidden, "norm.weight")


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4)


def rounds(target: Target, drafter: DFlashDrafter, slots: int = 3) -> tuple[Lattice, list[Tensor], list[int]]:
    """Two ragged rows after a prefill, a round with rejections, and a round in which row 0 commits nothing."""
    texts = [tokens(9, 10), tokens(8, 11)]
    session = Session(target, drafter, 2)
    session.feed(torch.stack([texts[0][:5], F.pad(texts[1][:3], (0, 2))]), [5, 3])
    session.draft([int(texts[0][5]), int(texts[1][3])], 3)
    rejected = tokens(4, 12)
    session.feed(torch.stack([torch.cat([texts[0][5:9]]), torch.cat([texts[1][3:5], rejected[:2]])]), [4, 2])
    session.feed(torch.stack([rejected[:3], texts[1][5:8]]), [0, 3])
    anchors = [7, 8]
    return session.draft(anchors, slots), texts, anchors


@pytest.mark.parametrize("predicts", ["next", "same"])
@pytest.mark.parametrize("mask_token_id", [MASK, None])
def test_draft_equals_dense_reference(target: Target, predicts: str, mask_token_id: int | None) -> None:
    drafter = make(target, predicts=predicts, mask_token_id=mask_token_id)
    weights = make(target, predicts=predicts, mask_token_id=mask_token_id)  # prepare() may pack
    lattice, texts, anchors = rounds(target, drafter.prepare())
    for row, (text, anchor) in enumerate(zip(texts, anchors, strict=True)):
        inputs = 3 if predicts == "next" else 4
        hidden = reference(target, weights, text, anchor, inputs)[-3:]
        close(lattice.hidden[row], hidden)
        log_probs = (hidden @ target.head_weight(torch.arange(VOCAB)).T).log_softmax(-1)
        expected = log_probs.topk(16)
        close(lattice.log_probs[row], expected.values)
        close(log_probs.gather(-1, lattice.ids[row]), expected.values)  # near-ties may come in either order
    close(lattice.anchor_hidden, target.model.get_input_embeddings().weight[torch.tensor(anchors)])
    assert lattice.anchors.tolist() == anchors


def test_conventions_are_one_place_apart(target: Target) -> None:
    ours, _, _ = rounds(target, make(target, predicts="next").prepare(), slots=4)
    published, _, _ = rounds(target, make(target, predicts="same").prepare(), slots=3)
    close(published.hidden, ours.hidden[:, 1:])
    assert make(target, predicts="next").block_size == 4
    assert make(target, predicts="same").block_size == 3


def test_rows_equal_solo_rows_and_move(target: Target) -> None:
    drafter = make(target).prepare()
    lattice, texts, anchors = rounds(target, drafter)
    for row, text in enumerate(texts):
        solo = Session(target, drafter, 1)
        solo.feed(text[None], [len(text)])
        close(solo.draft([anchors[row]], 3).hidden[0], lattice.hidden[row])
    session = Session(target, drafter, 3)
    session.feed(torch.stack([tokens(8, 13), tokens(8, 13), texts[1]]), [2, 8, 8])
    session.state.move(2, 0)
    session.cache.lengths[0] = 8
    close(session.draft([anchors[1]], 3).hidden[0], lattice.hidden[1])


def test_draft_leaves_no_trace_and_shrinks(target: Target) -> None:
    drafter = make(target).prepare()
    weights = make(target)
    session = Session(target, drafter, 1)
    text = tokens(6, 20)
    session.feed(text[None], [6])
    first = session.draft([5], 4)
    for slots in (1, 2, 3):
        close(session.draft([5], slots).hidden[0], reference(target, weights, text, 5, slots))
    close(session.draft([5], 4).hidden, first.hidden)
    assert session.state.cache.lengths == [6]


def test_empty_context(target: Target) -> None:
    session = Session(target, make(target).prepare(), 2)
    session.feed(tokens(6, 21).view(2, 3), [0, 3])
    lattice = session.draft([5, 6], 3)
    alone = Session(target, session.drafter, 1)
    close(alone.draft([5], 3).hidden[0], lattice.hidden[0])


def test_draft_vocabulary(target: Target) -> None:
    draft_ids = torch.tensor([3, 5, 8, 13, 21])
    lattice, _, _ = rounds(target, make(target, draft_ids=draft_ids).prepare())
    whole, _, _ = rounds(target, make(target).prepare())
    assert lattice.ids.shape == (2, 3, 5)
    assert set(lattice.ids.flatten().tolist()) == set(draft_ids.tolist())
    logits = (whole.hidden @ target.head_weight(draft_ids).T).log_softmax(-1)
    close(lattice.log_probs, logits.sort(descending=True).values)


def test_layers_that_do_not_fit_cannot_be_copied(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make(target)
    monkeypatch.delitem(target.layers[1].mlp._modules, "up_proj")
    with pytest.raises(DrafterError, match="layer 1 of the target lacks"):
        drafter.initialise((0, 1))


def test_unobserved_tokens_are_an_error(target: Target) -> None:
    session = Session(target, make(target).prepare(), 1)
    session.feed(tokens(4, 22)[None], [4])
    session.cache.lengths[0] += 1
    with pytest.raises(DrafterError, match="observe"):
        session.draft([5], 2)


def training_batch(target: Target) -> TrainingBatch:
    ids = torch.stack([tokens(12, 30), tokens(12, 31)])
    taps = [torch.cat(pair) for pair in zip(features(target, ids[0]), features(target, ids[1]), strict=True)]
    return TrainingBatch(ids, torch.tensor([[1, 4, 9], [2, 5, 6]]), taps, {}, {})


@pytest.mark.parametrize("predicts", ["next", "same"])
def test_forward_blocks_equals_draft(target: Target, predicts: str) -> None:
    training, drafting = make(target, predicts=predicts), make(target, predicts=predicts).prepare()
    batch = training_batch(target)
    hidden = training.forward_blocks(batch, 3)
    assert hidden.shape == (2, 3, 3, HIDDEN)
    for row in range(2):
        for index, anchor in enumerate(batch.anchors[row].tolist()):
            session = Session(target, drafting, 1)
            session.feed(batch.ids[row : row + 1, :anchor], [anchor])
            lattice = session.draft([int(batch.ids[row, anchor])], 3)
            close(hidden[row, index], lattice.hidden[0])
    whole = drafting.lattice_of_blocks(batch)
    last = session.draft([int(batch.ids[row, anchor])], drafting.block_size)
    for ours, theirs in zip(vars(whole).values(), vars(last).values(), strict=True):
        close(ours[-1:], theirs)


@pytest.mark.parametrize("mask_token_id", [MASK, None])
@pytest.mark.parametrize("target_layers", [(), (1, 2)])
def test_a_gradient_step_lowers_the_loss(
    target: Target, mask_token_id: int | None, target_layers: tuple[int, ...]
) -> None:
    drafter = make(target, mask_token_id=mask_token_id)
    torch.manual_seed(2)
    drafter.initialise(target_layers)
    drafter.head = target.head
    batch = training_batch(target)
    labels = batch.ids.gather(1, (batch.anchors[..., None] + torch.arange(1, 3)).flatten(1)).view(2, 3, 2)

    def loss() -> Tensor:
        return F.cross_entropy(drafter.logits(drafter.forward_blocks(batch, 2)).flatten(0, 2), labels.flatten())

    before = loss()
    before.backward()
    trainable = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    assert "head.weight" not in trainable
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trainable.values())
    with torch.no_grad():
        for parameter in trainable.values():
            parameter -= 0.02 * parameter.grad / parameter.grad.norm()
    assert loss() < before


def test_training_under_autocast(target: Target) -> None:
    drafter = make(target).prepare_training()
    with torch.autocast("cpu", torch.bfloat16):
        hidden = drafter.forward_blocks(training_batch(target), 3)
        assert drafter.logits(hidden).shape == (2, 3, 3, VOCAB)
    exact = drafter.forward_blocks(training_batch(target), 3)
    assert (hidden - exact).abs().max() < 0.1 * exact.abs().max()


def test_initialise_copies_target_layers(target: Target) -> None:
    drafter = make(target)
    drafter.initialise((0, 2))
    assert torch.equal(drafter.layers[1].mlp.up_proj.weight, target.layers[2].mlp.up_proj.weight)
    assert torch.equal(drafter.layers[1].self_attn.k_norm.weight, torch.ones(8))


@pytest.mark.parametrize("draft_ids", [None, [2, 3, 30]])
@pytest.mark.parametrize("mask_token_id", [MASK, None])
def test_save_and_load(target: Target, tmp_path: Path, draft_ids: list[int] | None, mask_token_id: int | None) -> None:
    ids = None if draft_ids is None else torch.tensor(draft_ids)
    drafter = make(target, draft_ids=ids, mask_token_id=mask_token_id)
    drafter.head = target.head  # as while training: not the drafter's to save
    drafter.save(tmp_path)
    again = DFlashDrafter.load(tmp_path, target)
    assert again.config.to_dict() == drafter.config.to_dict()
    close(rounds(target, again)[0].hidden, rounds(target, drafter.prepare())[0].hidden)
    assert torch.equal(again.draft_ids, drafter.draft_ids)


def published(folder: Path, target: Target) -> dict[str, Any]:
    """Write a checkpoint as others publish them; returns its config."""
    drafter = make(target, predicts="same")
    drafter.save(folder)
    path = folder / "model.safetensors"
    save_file(load_file(path), path, {"format": "pt"})
    config = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 4,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
        "dtype": "bfloat16",
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 128,
        "max_window_layers": 5,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_target_layers": 3,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "transformers_version": "4.57.3",
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return config


def test_published_checkpoint(target: Target, tmp_path: Path) -> None:
    config = published(tmp_path, target)
    drafter = DFlashDrafter.load(tmp_path, target)
    assert (drafter.config.predicts, drafter.block_size, drafter.taps, drafter.max_positions) == ("same", 3, TAPS, 127)
    close(rounds(target, drafter)[0].hidden, rounds(target, make(target, predicts="same").prepare())[0].hidden)
    config["dflash_config"]["block_size"] = config.pop("block_size")
    config["rope_scaling"] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config["rope_scaling"]["original_max_position_embeddings"] = 16
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafter = DFlashDrafter.load(tmp_path, target)
    assert drafter.config.block_size == 4
    assert drafter.rotary_emb.rope_type == "llama3"


def inner(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda config: config["dflash_config"].update(changes)


def outer(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda config: config.update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (outer(hidden_size=64), "hidden_size=64"),
        (outer(vocab_size=41), "vocab_size=41"),
        (outer(num_target_layers=36), "num_target_layers=36"),
        (outer(block_size=1), "block_size=1"),
        (outer(layer_types=["full_attention", "sliding_attention"], sliding_window=8), "sliding_attention"),
        (outer(is_causal=True), "is_causal"),
        (outer(hidden_size="many"), "can't be used"),
        (lambda config: config.pop("head_dim"), "head_dim"),
        (lambda config: config.pop("rope_theta"), "rope_theta"),
        (lambda config: config.pop("block_size"), "lacks block_size"),
        (lambda config: config.pop("dflash_config"), "dflash_config"),
        (lambda config: config["dflash_config"].pop("target_layer_ids"), "target_layer_ids"),
        (inner(target_layer_ids=[0, 3]), "0, 3"),
        (inner(target_layer_ids=[]), "target_layer_ids"),
        (inner(target_layer_ids=None), "can't be used"),
        (inner(target_layer_ids="02"), "target_layer_ids='0' must be whole"),
        (inner(target_layer_ids=[0, 2.0]), "target_layer_ids=2.0 must be whole"),
        (outer(block_size="4"), "block_size='4' must be whole"),
        (outer(block_size=4.9), "block_size=4.9"),
        (inner(candidates=True), "candidates=True"),
        (inner(candidates=0), "candidates=0"),
        (inner(mask_token_id=39.5), "mask_token_id=39.5"),
        (inner(predicts=None), "predicts=None"),
        (inner(target_layer_ids=[0, 1, 2]), "fc.weight"),
        (inner(mask_token_id=VOCAB), "mask_token_id=40"),
        (inner(mask_token_id=1), "ends texts"),
        (inner(mask_token_id=None), "mask_embedding"),
        (inner(block_size=8), "block_size"),
        (inner(predicts="previous"), "previous"),
        (inner(shift_label=True, projector_type="domino"), "projector_type, shift_label"),
        (outer(num_hidden_layers=3, layer_types=None), "missing layers.2.input_layernorm.weight"),
        (outer(num_hidden_layers=1, layer_types=None), "unexpected layers.1.input_layernorm.weight"),
    ],
)
def test_config_refusals(
    target: Target, tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    config = published(tmp_path, target)
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterError, match=message):
        DFlashDrafter.load(tmp_path, target)


def test_broken_files(target: Target, tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match=r"config\.json"):
        DFlashDrafter.load(tmp_path, target)
    published(tmp_path, target)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name, change in {
        "unexpected mask_embedding": {"mask_embedding": torch.zeros(HIDDEN)},
        "draft_ids": {"draft_ids": torch.tensor([3, VOCAB])},
        "norm.weight holds torch.int32": {"norm.weight": tensors["norm.weight"].int()},
    }.items():
        save_file({**tensors, **change}, path)
        with pytest.raises(DrafterError, match=name):
            DFlashDrafter.load(tmp_path, target)
    save_file({name: tensor for name, tensor in tensors.items() if name != "norm.weight"}, path)
    with pytest.raises(DrafterError, match=r"missing norm\.weight"):
        DFlashDrafter.load(tmp_path, target)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DrafterError, match="truncated"):
        DFlashDrafter.load(tmp_path, target)
    path.unlink()
    with pytest.raises(DrafterError, match="missing"):
        DFlashDrafter.load(tmp_path, target)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DrafterError, match="JSON"):
        DFlashDrafter.load(tmp_path, target)


def test_convention_mix_up(target: Target, tmp_path: Path) -> None:
    make(target).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dflash_config"]["predicts"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterError, match="one place off"):
        DFlashDrafter.load(tmp_path, target)


def test_bfloat16(tmp_path: Path) -> None:
    """Prepared in bf16 (packed where the CPU can), the rotary table stays exact and weights can't be saved any more."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    half = Target(LlamaForCausalLM(config).to(torch.bfloat16))
    drafter = make(half).prepare()
    assert drafter.rotary_emb.inv_freq.dtype == torch.float32
    lattice, texts, anchors = rounds(half, drafter)
    assert lattice.hidden.dtype == torch.bfloat16
    weights = make(half)
    hidden = reference_bf16(half, weights, texts[0], anchors[0])
    assert (lattice.hidden[0].float() - hidden).abs().max() < 0.1 * hidden.abs().max()
    if any("Packed" in type(module).__name__ for module in drafter.modules()):
        with pytest.raises(DrafterError, match="packed"):
            drafter.save(tmp_path)


def reference_bf16(target: Target, drafter: DFlashDrafter, ids: Tensor, anchor: int) -> Tensor:
    batch = TrainingBatch(
        torch.cat([ids, torch.tensor([anchor])])[None],
        torch.tensor([[len(ids)]]),
        [F.pad(tap.float(), (0, 0, 0, 1)) for tap in features(target, ids)],
        {},
        {},
    )
    with torch.no_grad():
        return drafter.forward_blocks(batch, 3)[0, 0]
