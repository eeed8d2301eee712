"""Tiny random models of several families, and a decoder around them, for tests."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dcoco import DCOCODecoder
from dcoco.corrector import Corrector, CorrectorConfig
from dcoco.costs import Costs
from drafters.block_diffusion import BlockDiffusionConfig, BlockDiffusionDrafter
from verifier.attention import fold_mask
from verifier.target import Target

VOCABULARY = 64
EOS = 2
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,  # peaked, varied distributions: acceptance and rejection both happen
    "bos_token_id": 1,
    "eos_token_id": EOS,
}


def llama(tied: bool = True, **changes: Any) -> Any:
    shape = SHAPE | {"num_key_value_heads": 2, "tie_word_embeddings": tied} | changes
    return LlamaForCausalLM(LlamaConfig(**shape))


def qwen2() -> Any:
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2))


def qwen3() -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16))


def gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        **SHAPE, num_key_value_heads=1, head_dim=16, sliding_window=8, layer_types=kinds, query_pre_attn_scalar=16
    )
    return Gemma3ForCausalLM(config)


def gpt_neox() -> Any:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE))


FAMILIES = {
    "llama": llama,
    "llama_untied": lambda: llama(tied=False),
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma3": gemma3,
    "gpt_neox": gpt_neox,
}


class LetterTokenizer:
    """Id i is one character, so that text and ids are easy to compare."""

    eos_token_id = EOS
    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 256 for letter in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(256 + index) for index in ids)

    def get_vocab(self) -> dict[str, int]:
        return {chr(256 + index): index for index in range(VOCABULARY)}


def tiny_drafter(target: Target, block: int = 4, candidates: int = 6) -> BlockDiffusionDrafter:
    """A drafter that starts from the target; it isn't prepared."""
    config = BlockDiffusionConfig((1, 3), (0, 3), block, candidates)
    drafter = BlockDiffusionDrafter(target, config, torch.arange(0, target.vocab_size - 3))
    drafter.initialise(scale=4.0)
    torch.nn.init.normal_(drafter.slots, std=0.5)
    torch.nn.init.normal_(drafter.anchor_projection.weight, std=0.3)
    return drafter


def tiny_decoder(
    family: str | Callable[[], Any] = "llama",
    seed: int = 0,
    block: int = 4,
    candidates: int = 6,
    trained: bool = True,
    **options: Any,
) -> DCOCODecoder:
    """A decoder with random weights; `trained` gives the corrector a say."""
    torch.manual_seed(seed)
    target = Target(FAMILIES[family]() if isinstance(family, str) else family())
    drafter = tiny_drafter(target, block, candidates).prepare()
    corrector = Corrector(CorrectorConfig(target.hidden_size, 16, 16)).eval().requires_grad_(False)
    if trained:
        torch.nn.init.normal_(corrector.pair_out.weight, std=1.0)
    corrector.to(target.dtype)
    options.setdefault("eos_ids", [EOS])
    return DCOCODecoder(target, LetterTokenizer(), drafter, corrector, **options)


def costs_of(a_token):
    """A machine on which a pass takes 1 and each token in it so much more."""
    return Costs([1], [[1, 2]], [[1.0, 1.0 + a_token]], [[1.0, 1.0 + a_token / 4, 1.0 + a_token]], [1], [[0.1]])


def corrected(decoder: DCOCODecoder, corrector: Any) -> DCOCODecoder:
    """The decoder with another corrector."""
    decoder.corrector = corrector.eval().requires_grad_(False).to(decoder.target.dtype)
    decoder.token_table = corrector.token_table(decoder.target.embedding_weight())
    return decoder


def prompts(count: int, longest: int = 20, seed: int = 0) -> list[list[int]]:
    """Prompts of one to `longest` tokens."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=random).tolist()
    return [torch.randint(3, VOCABULARY, (length,), generator=random).tolist() for length in lengths]


def explicit_mask(target: Target, length: int) -> Any:
    """The causal mask of one sequence run from its start by the bare model, never None."""
    columns = torch.arange(length)
    causal = columns[None, :] <= columns[:, None]
    masks = {}
    for kind, window in target.masks.windows.items():
        inside = True if window is None else columns[None, :] > columns[:, None] - window
        masks[kind] = fold_mask((causal & inside)[None], target.masks.repeats, target.dtype)
    return masks if len(masks) > 1 else next(iter(masks.values()))
