"""Errors that dcoco raises on purpose; each text says what is wrong, the value, the limit and the remedy."""

from verifier.errors import (
    ConfigError,
    DcocoError,
    DrafterError,
    EngineError,
    FetchError,
    ParameterError,
    QueueFullError,
    StoppedError,
    TargetError,
)

__all__ = [
    "ConfigError",
    "DcocoError",
    "DrafterError",
    "EngineError",
    "FetchError",
    "ParameterError",
    "QueueFullError",
    "StoppedError",
    "TargetError",
]
