"""dcoco: speculative decoding with a block-diffusion drafter and a contextual corrector, exactly lossless."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcoco.decoder import DCOCODecoder
    from dcoco.engine import Engine
    from dcoco.output import Chunk, RequestOutput, Stats
    from verifier.sampling import SamplingParams

__all__ = ["Chunk", "DCOCODecoder", "Engine", "RequestOutput", "SamplingParams", "Stats"]

# Loaded when first asked for: torch and transformers take seconds, which `dcoco targets` need not pay.
_HOMES = {
    "DCOCODecoder": "dcoco.decoder",
    "Engine": "dcoco.engine",
    "Chunk": "dcoco.output",
    "RequestOutput": "dcoco.output",
    "Stats": "dcoco.output",
    "SamplingParams": "verifier.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dcoco' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
