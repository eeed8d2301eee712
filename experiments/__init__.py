"""Hydra entry points: training, measuring, demonstrating. They run from a clone."""
