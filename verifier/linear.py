"""Linear layers whose bfloat16 weights are packed once for the CPU's matrix kernels.

oneDNN reads a plain bf16 weight through a slow path when only a few tokens are multiplied: packed, a block of 9 tokens
of SmolLM2 costs what a single token costs, which is what speculative decoding lives on. torch's own compiler uses the
same two operators when it freezes a model; elsewhere (CUDA, float32, other builds) the layers stay as they are.
"""

import torch
from torch import Tensor, nn


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


def pack_linears(module: nn.Module) -> None:
    """Replace every bf16 `nn.Linear` on the CPU below `module` by a `PackedLinear`, in place."""
    for name, child in module.named_children():
        if type(child) is nn.Linear and can_pack(child.weight.device, child.weight.dtype):
            setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            pack_linears(child)
