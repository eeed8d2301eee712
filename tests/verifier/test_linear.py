"""Linear layers for the CPU give what `nn.Linear` gives, whatever the number of tokens."""

import pytest
import torch
from torch import nn

from verifier.linear import PackedBFloat16, PackedHalf, PackedLinear, pack_linears

SHAPES = [(1,), (2,), (64,), (65,), (3, 5), (1, 7), (0,)]


def as_in_bfloat16(bias: bool, size: float = 1.0) -> nn.Sequential:
    """Layers in float32 whose weights, of about this size, bfloat16 holds too, as in most checkpoints."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 80, bias=bias), nn.Sequential(nn.Linear(80, 16, bias=bias)))
    for parameter in model.parameters():
        parameter.data = (parameter.data * size).bfloat16().float()
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_layers_multiply_like_plain_ones(dtype, bias, shape):
    model = as_in_bfloat16(bias).to(dtype)
    x = torch.randn(*shape, 48, dtype=dtype)
    expected = model(x)
    pack_linears(model)
    found = model(x)
    assert found.shape == expected.shape and found.is_contiguous()
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [1e-9, 1e-3, 1.0, 1e6])
def test_float16_holds_the_weights_of_bfloat16_whatever_their_size(size):
    layer = as_in_bfloat16(bias=True, size=size)[0]
    assert PackedHalf.serves(layer.weight)
    packed = PackedHalf(layer.weight, layer.bias)
    assert torch.equal(packed.unpack(), layer.weight)
    x = torch.randn(5, 48)
    torch.testing.assert_close(packed(x), layer(x), rtol=1e-5, atol=1e-5 * size)


def test_weights_that_float16_would_round_stay_as_they_are():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 80), nn.Linear(80, 16))
    model[1].weight.data = torch.where(torch.rand(16, 80) < 0.5, 1e20, 1e-20)  # each in bfloat16's range, not together
    pack_linears(model)
    assert not any(isinstance(layer, PackedLinear) for layer in model)


def test_zeros_and_the_bfloat16_kind():
    zeros = torch.zeros(8, 4)
    assert torch.equal(PackedHalf(zeros)(torch.ones(3, 4)), torch.zeros(3, 8))
    assert not PackedBFloat16.serves(zeros) and not PackedHalf.serves(zeros.bfloat16())
