"""Linear layers for a few tokens on the CPU, which is what speculative decoding multiplies.

A plain `nn.Linear` is slow there in both precisions: oneDNN reads a bf16 weight through a slow path when only a few
tokens are multiplied, and MKL takes twice as long for four float32 tokens as for one. Packed once, a block of 9 tokens
of SmolLM2 costs about what a single one costs. Both kinds are kernels that torch brings:

    PackedBFloat16   bf16 inputs and weights, oneDNN's, as torch's compiler uses it when it freezes a model
    PackedHalf       float32 inputs and float16 weights, FBGEMM's, computing in float32: half the bytes to read

Elsewhere (CUDA, other builds) the layers stay as they are.
"""

import torch
from torch import Tensor, nn

HIGHEST = 15  # float16 ends below 2^16: scaled to below 2^15, weights leave room for rounding


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on the CPU: x [..., in] -> [..., out], in x's dtype."""

    itemsize: int  # bytes of a weight in memory

    def __init__(self, weight: Tensor):
        super().__init__()
        self.out_features, self.in_features = weight.shape

    def unpack(self) -> Tensor:
        """The weight [out, in] as it was before packing."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class PackedBFloat16(PackedLinear):
    """Weights in bf16 for inputs in bf16."""

    itemsize = 2

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__(weight)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 1)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @staticmethod
    def serves(weight: Tensor) -> bool:
        """Whether there is a fast kernel for this weight here."""
        return (
            weight.device.type == "cpu"
            and weight.dtype == torch.bfloat16
            and torch.backends.mkldnn.is_available()
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def unpack(self) -> Tensor:
        return self.packed.to_dense()


class PackedHalf(PackedLinear):
    """Weights in float16 for inputs in float32, where float16 holds them exactly.

    bf16 has eight significant bits and float16 eleven, but fewer exponents. Where a matrix has smaller weights than
    those, a power of two moves its largest to the top of float16's range: checkpoints in bf16 lose nothing.
    """

    itemsize = 2

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__(weight)
        self.scale = 1.0 if _holds(weight) else _largest_scale(weight)
        bias = None if bias is None else bias.detach() * self.scale
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight.detach() * self.scale, bias)

    @staticmethod
    def serves(weight: Tensor) -> bool:
        """Whether there is a fast kernel for this weight here, and float16 holds it exactly."""
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            return False
        if torch.backends.quantized.engine not in ("x86", "fbgemm"):
            return False
        return _holds(weight) or _holds(weight * _largest_scale(weight))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.quantized.linear_dynamic_fp16(x if x.dim() > 1 else x[None], self.packed)
        if self.scale != 1.0:
            y.mul_(1 / self.scale)
        return y if x.dim() > 1 else y[0]

    def unpack(self) -> Tensor:
        return torch.ops.quantized.linear_unpack_fp16(self.packed)[0] / self.scale


def _holds(weight: Tensor) -> bool:
    """Whether float16 holds every one of these numbers exactly."""
    return torch.equal(weight.half().float(), weight)


def _largest_scale(weight: Tensor) -> float:
    """The power of two that takes the largest weight to between 2^14 and 2^15."""
    return 2.0 ** (HIGHEST - int(torch.frexp(weight.abs().max())[1]))


def packed_kind(linear: nn.Module) -> type[PackedBFloat16] | type[PackedHalf] | None:
    """The kind that serves a layer, if it is a plain `nn.Linear` and there is one."""
    if type(linear) is not nn.Linear:
        return None
    return next((kind for kind in (PackedBFloat16, PackedHalf) if kind.serves(linear.weight)), None)


def pack_linears(module: nn.Module) -> None:
    """Replace every `nn.Linear` below `module` that a packed kind serves, in place."""
    for name, child in module.named_children():
        kind = packed_kind(child)
        if kind is None:
            pack_linears(child)
        else:
            setattr(module, name, kind(child.weight, child.bias))  # type: ignore[arg-type]
