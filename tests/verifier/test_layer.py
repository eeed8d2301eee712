"""Fused layers give what their family's layers give, and other layers stay as they are."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM

from tests.models import SHAPE, gemma3, gpt_neox, llama, qwen2, qwen3
from verifier.cache import RaggedCache
from verifier.layer import FusedLayer
from verifier.linear import PackedBFloat16, PackedHalf
from verifier.packing import Packing
from verifier.target import Target


def mistral() -> Any:
    return MistralForCausalLM(MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=6))


def with_biases() -> Any:
    model = llama(attention_bias=True, mlp_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model


def with_norms_of_heads() -> Any:
    model = qwen3()
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
    return model


KNOWN = {"llama": llama, "biases": with_biases, "mistral": mistral, "qwen2": qwen2, "qwen3": with_norms_of_heads}


def published(build: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose weights bfloat16 holds, as in most checkpoints."""
    torch.manual_seed(0)
    model = build()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().to(dtype)
    return model


def skip_unless_packed(dtype: torch.dtype) -> None:
    weight = torch.ones(4, 4, dtype=dtype)
    if not (PackedBFloat16.serves(weight) or PackedHalf.serves(weight)):
        pytest.skip(f"no packed kernel for {dtype} here")


def said(target: Target) -> list[Tensor]:
    """Logits and taps of prompts of different lengths, of a block behind them, and of a packed ragged block."""
    torch.manual_seed(1)
    cache = RaggedCache(2, 32, target.device)
    out = []
    for counts, packed in [([9, 5], False), ([4, 4], False), ([5, 1], True)]:
        packing = Packing(counts, target.device, cache.lengths) if packed else None
        found = target.forward(torch.randint(0, 64, (2, max(counts))), cache, taps=[0, 2], packing=packing)
        out += [target.logits(found.hidden), *found.taps]
        cache.lengths = [length + count for length, count in zip(cache.lengths, counts, strict=True)]
    return out


@pytest.mark.parametrize("family", KNOWN)
def test_fused_layers_compute_what_the_familys_own_do(family):
    skip_unless_packed(torch.float32)
    model = published(KNOWN[family])
    own, fused = Target(deepcopy(model), pack=False), Target(model)
    assert all(isinstance(layer, FusedLayer) for layer in fused.layers)
    assert not any(isinstance(layer, FusedLayer) for layer in own.layers)
    for ours, theirs in zip(said(fused), said(own), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", KNOWN)
def test_in_bfloat16_they_are_as_near_to_float32(family):
    skip_unless_packed(torch.bfloat16)
    model = published(KNOWN[family])
    exact, own = said(Target(deepcopy(model), pack=False)), said(Target(deepcopy(model).bfloat16(), pack=False))
    fused = said(Target(model.bfloat16()))

    def gap(found: list[Tensor]) -> float:
        return sum(((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in zip(found, exact, strict=True))

    assert gap(fused) < 1.5 * gap(own)


@pytest.mark.parametrize("build", [gemma3, gpt_neox])
def test_other_families_keep_their_layers(build):
    assert not any(isinstance(layer, FusedLayer) for layer in Target(published(build)).layers)


def test_layers_with_other_matrices_stay():
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return super().forward(x)

    model = published(llama)
    projection = model.model.layers[1].self_attn.k_proj
    projection.__class__ = Counting
    target = Target(model)
    assert not isinstance(target.layers[1], FusedLayer)
    assert Counting.calls > 1
