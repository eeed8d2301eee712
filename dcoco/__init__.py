"""dcoco: speculative decoding with a block-diffusion drafter and a contextual corrector, exactly lossless."""

from dcoco.decoder import DCOCODecoder
from dcoco.output import Chunk, RequestOutput, Stats
from verifier.sampling import SamplingParams

__all__ = ["Chunk", "DCOCODecoder", "RequestOutput", "SamplingParams", "Stats"]
