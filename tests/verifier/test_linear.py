"""Linear layers for the CPU give what `nn.Linear` gives, whatever the number of tokens."""

import pytest
import torch
from torch import nn

from verifier.linear import FEW, pack_linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (2,), (FEW,), (FEW + 1,), (3, 5), (1, 7), (3,), (0,)])
def test_packed_layers_multiply_like_plain_ones(dtype, bias, shape):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 80, bias=bias), nn.Sequential(nn.Linear(80, 16, bias=bias))).to(dtype)
    x = torch.randn(*shape, 48, dtype=dtype)
    expected = model(x)
    pack_linears(model)
    found = model(x)
    assert found.shape == expected.shape and found.is_contiguous()
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
