"""Linear layers for a few tokens on the CPU, which is what speculative decoding multiplies.

oneDNN reads a plain bf16 weight through a slow path when only a few tokens are multiplied: packed, a block of 9 tokens
of SmolLM2 costs what a single token costs. torch's own compiler uses the same two operators when it freezes a model.
MKL takes up to twice as long for tokens times weights in float32 as for the same product with the weights first, and
there longer for 15 tokens than for 16, so these are padded. Elsewhere (CUDA, other builds) the layers stay as they are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 64  # tokens up to which float32 weights come first
TILE = 8  # tokens that MKL multiplies at once then
SMALL = (1, 2, 4, 5)  # tokens that take no longer as they are than as a whole tile


def can_pack(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether packed bf16 kernels exist for this device and dtype."""
    return (
        torch.device(device).type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on the CPU: x [..., in] bf16 -> [..., out] bf16."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 1)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def unpack(self) -> Tensor:
        """The weight [out, in] as it was before packing."""
        return self.packed.to_dense()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def can_turn(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether MKL multiplies this dtype on this device."""
    return torch.device(device).type == "cpu" and dtype == torch.float32 and torch.backends.mkl.is_available()


class TurnedLinear(nn.Linear):
    """`nn.Linear` for inference in float32: a few tokens are multiplied as (weight @ x^T)^T, in whole tiles."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.numel() // self.in_features
        if not 1 < tokens <= FEW:
            return F.linear(x, self.weight, self.bias)
        x_TI, spare = x.reshape(tokens, self.in_features), padded(tokens) - tokens
        if spare:
            x_TI = F.pad(x_TI, (0, 0, 0, spare))
        y_TO = torch.mm(self.weight, x_TI.t()).t()[:tokens].contiguous()
        if self.bias is not None:
            y_TO += self.bias
        return y_TO.view(*x.shape[:-1], self.out_features)


def padded(tokens: int) -> int:
    """How many tokens are multiplied fastest of those that are at least so many."""
    for small in SMALL:
        if tokens <= small:
            return small
    return -(-tokens // TILE) * TILE


def pack_linears(module: nn.Module) -> None:
    """Replace every `nn.Linear` on the CPU below `module` by the kind that its dtype has, if any, in place."""
    for name, child in module.named_children():
        if type(child) is not nn.Linear:
            pack_linears(child)
        elif can_pack(child.weight.device, child.weight.dtype):
            setattr(module, name, PackedLinear(child.weight, child.bias))
        elif can_turn(child.weight.device, child.weight.dtype):
            setattr(module, name, TurnedLinear(child.weight, child.bias))
