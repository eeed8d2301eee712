"""What training multiplies in: bfloat16 where the target does, as a machine that only emulates it is slower for it."""

import torch


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Mixed precision on this device where `dtype`, the target's, is bfloat16; else float32 throughout."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)
