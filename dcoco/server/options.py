"""What `dcoco serve` is told. Light to import, for the command line's help."""

import math
from dataclasses import dataclass

from dcoco.errors import ConfigError

DEFAULT_MODEL_LEN = 2048  # or what the target's positions allow


@dataclass
class Options:
    """A server: what it loads, where it listens, and what it allows. Raises ConfigError."""

    target: str
    host: str = "127.0.0.1"
    port: int = 8000
    drafter: str | None = None
    method: str = "dcoco"
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None
    api_key: str | None = None  # what clients must show to use /v1
    served_model_name: str | None = None  # the target by default
    max_model_len: int | None = None  # tokens of prompt and answer together
    max_num_seqs: int = 32  # requests that run at once
    max_waiting: int = 256  # requests that may wait for a row
    max_body_bytes: int = 4 * 2**20
    grace: float = 30.0  # seconds that running requests have when the server is told to end

    def __post_init__(self) -> None:
        least = {"threads": 1, "max_model_len": 2, "max_num_seqs": 1, "max_waiting": 0, "max_body_bytes": 1}
        ranges = {name: (low, math.inf) for name, low in least.items()} | {"port": (0, 65535), "grace": (0, 86400)}
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                limits = f"at least {low}" if high == math.inf else f"from {low} to {high}"
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be {limits}")
