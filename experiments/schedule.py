"""What trainers share: the learning rate, and which sequences a step sees. Both are functions of the step alone."""

import torch
from omegaconf import DictConfig


def learning_rate(config: DictConfig, step: int) -> float:
    """Linear warm-up, constant, linear decay to zero."""
    left = (config.steps - step) / max(1.0, config.steps * config.decay)
    return config.lr * min(1.0, (step + 1) / config.warmup, left)


def batches_of_epoch(lengths: list[int], size: int, seed: int, epoch: int) -> list[list[int]]:
    """A shuffled epoch over sequences of these lengths, cut into batches of similar length to save padding."""
    random = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=random).tolist()
    batches = []
    for start in range(0, len(order), 32 * size):
        pool = sorted(order[start : start + 32 * size], key=lambda index: lengths[index])
        batches += [pool[i : i + size] for i in range(0, len(pool) - size + 1, size)]
    return [batches[index] for index in torch.randperm(len(batches), generator=random).tolist()]
