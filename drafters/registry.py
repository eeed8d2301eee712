"""Which drafter a checkpoint holds."""

from pathlib import Path
from typing import Any

from drafters.autoregressive import AutoregressiveDrafter
from drafters.block_diffusion import BlockDiffusionDrafter
from drafters.checkpoint import check_identity, check_tokenizer, read_config
from drafters.dflash import DFlashDrafter
from drafters.prompt_lookup import PromptLookupDrafter
from verifier.errors import DrafterError
from verifier.target import Target

DRAFTERS: dict[str, Any] = {
    "block_diffusion": BlockDiffusionDrafter,
    "dflash": DFlashDrafter,
    "autoregressive": AutoregressiveDrafter,
    "prompt_lookup": PromptLookupDrafter,
}
ANY_TARGET = ("prompt_lookup",)


def load_drafter(folder: Path, target: Target, tokenizer: Any) -> Any:
    """The drafter in `folder`, ready to draft for `target`.

    Ours name themselves and their target; published DFlash checkpoints do neither and are known by `dflash_config`. Any
    other transformers model drafts token by token.
    A folder whose configuration is only {"base": another folder, relative to it} holds something that goes with that
    folder's drafter (a corrector, say).

    Raises:
        DrafterError: files missing or truncated, unknown keys, tensors that don't fit, or another target's drafter.
    """
    config = read_config(folder)
    if set(config) == {"base"}:
        return load_drafter(folder / str(config["base"]), target, tokenizer)
    plain = not config.keys() & {"drafter", "dflash_config"} and config.keys() & {"architectures", "model_type"}
    name = config.get("drafter", "autoregressive" if plain else "dflash" if "dflash_config" in config else None)
    if not isinstance(name, str) or name not in DRAFTERS:
        raise DrafterError(f"{folder / 'config.json'}: drafter={name!r} is unknown; known are {', '.join(DRAFTERS)}")
    if plain:
        check_tokenizer(config, tokenizer, folder)
    elif "drafter" in config and name not in ANY_TARGET:
        check_identity(config, target, tokenizer, folder)
    return DRAFTERS[name].load(folder, target)
