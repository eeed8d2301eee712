"""Settings of experiments: numbers that make sense, and those that a stopped run must still have when it goes on."""

from numbers import Real
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from dcoco.errors import ConfigError

COUNTS = {
    "steps", "save_every", "limit", "held_out", "sequences_per_step", "slots_per_step", "block_lengths", "blocks",
    "blocks_per_step", "passes", "block_size", "candidates", "width", "pair_width", "rank", "hidden_size", "layers",
    "intermediate_size", "heads", "kv_heads", "draft_vocab_size", "unrolled", "warmup", "prompts", "max_tokens",
    "batch", "repeats", "memory_mib", "threads",
}  # fmt: skip
ABOVE_ZERO = {"gamma", "lr"}
FROM_ZERO = {"weight_decay", "drafter_rate", "decay", "skip", "temperature"}
# What a training run may change when it goes on: how far, where to, and what it is told apart by otherwise.
FREE = {"steps", "save_every", "target", "drafter", "answers", "features", "run", "checkpoint", "init", "device"}
FREE |= {"threads", "store_taps", "store_layers", "prompts", "max_tokens", "cotrained"}


def check_numbers(config: DictConfig) -> None:
    """Raise ConfigError for a number, or an item of a list, that makes no sense; null stands for a default."""
    for name, value in config.items():
        for one in value if isinstance(value, ListConfig) else [value]:
            if one is None:
                continue
            if name in COUNTS and (type(one) is not int or one < 1):
                raise ConfigError(f"{name}={value}: must be an integer, at least 1")
            if name in ABOVE_ZERO and (not _is_number(one) or one <= 0):
                raise ConfigError(f"{name}={value}: must be a number above 0")
            if name in FROM_ZERO and (not _is_number(one) or one < 0):
                raise ConfigError(f"{name}={value}: must be a number, at least 0")


def shaping(config: DictConfig) -> dict[str, Any]:
    """The settings that make a training run what it is."""
    plain: Any = OmegaConf.to_container(config, resolve=True)
    return {name: value for name, value in plain.items() if name not in FREE}


def check_same_run(state: dict[str, Any], config: DictConfig, file: Any) -> None:
    """Raise ConfigError where a saved state is of a run with other settings than these."""
    before, now = state.get("settings", {}), shaping(config)
    if changed := sorted(name for name in {*before, *now} if before.get(name) != now.get(name)):
        raise ConfigError(f"{file} is of a run with other {', '.join(changed)}: name another run")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
