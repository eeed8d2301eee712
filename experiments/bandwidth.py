"""The ceiling of plain decoding: each step reads all weights once, and memory gives only so many bytes a second."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from verifier.linear import PackedLinear
from verifier.target import Target

REPEATS = 5  # the fastest one counts: what else the machine does only slows it down


def linears(target: Target) -> list[Any]:
    """All matrices that a step multiplies with, the head among them, each once."""
    found = [module for module in target.model.modules() if isinstance(module, nn.Linear | PackedLinear)]
    return found if any(module is target.head for module in found) else [*found, target.head]


def step_bytes(target: Target) -> int:
    """Bytes of the weights that a step of plain decoding reads: matrices and norms, of the embedding one row."""
    size = target.dtype.itemsize
    matrices = sum(
        module.in_features * module.out_features * (module.itemsize if isinstance(module, PackedLinear) else size)
        for module in linears(target)
    )
    return matrices + size * sum(weight.numel() for weight in target.model.parameters() if weight.dim() == 1)


def read_bandwidth(mib: int, device: torch.device | str) -> float:
    """Bytes a second of summing a tensor of so many MiB with all threads."""
    tensor = torch.ones(mib << 18, dtype=torch.float32, device=device)
    return tensor.nbytes / _fastest(lambda: tensor.sum().item())


@torch.inference_mode()
def linear_bandwidth(target: Target) -> float:
    """Bytes a second of the weights, multiplying one token with each of the target's matrices in turn."""
    modules = linears(target)
    widths = {module.in_features for module in modules}
    inputs = {width: torch.ones(1, width, dtype=target.dtype, device=target.device) for width in widths}
    pairs = [(module, inputs[module.in_features]) for module in modules]

    def multiply() -> None:
        for module, x in pairs:
            last = module(x)
        last.sum().item()  # waits for the device

    return step_bytes(target) / _fastest(multiply)


def ceiling(target: Target, mib: int) -> dict[str, float]:
    """What memory allows plain decoding of one text: bytes/s, by reading `mib` MiB, bytes a step, and tokens/s."""
    size, read, multiplied = step_bytes(target), read_bandwidth(mib, target.device), linear_bandwidth(target)
    return {
        "bytes_per_step": size,
        "read_bytes_per_second": read,
        "linear_bytes_per_second": multiplied,
        "tokens_per_second": read / size,
        "linear_tokens_per_second": multiplied / size,
    }


def _fastest(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 1):  # the first one touches the memory
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times[1:])
