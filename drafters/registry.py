"""Which drafter a checkpoint holds."""

from pathlib import Path
from typing import Any

from drafters.autoregressive import AutoregressiveDrafter
from drafters.block_diffusion import BlockDiffusionDrafter
from drafters.checkpoint import check_identity, check_tokenizer, read_config
from drafters.dflash import DFlashDrafter
from drafters.dspark import DSparkDrafter
from drafters.eagle import EagleDrafter
from drafters.prompt_lookup import PromptLookupDrafter
from verifier.errors import DrafterError
from verifier.target import Target

DRAFTERS: dict[str, Any] = {
    "block_diffusion": BlockDiffusionDrafter,
    "dflash": DFlashDrafter,
    "eagle": EagleDrafter,
    "autoregressive": AutoregressiveDrafter,
    "prompt_lookup": PromptLookupDrafter,
}
HEADS: dict[str, Any] = {"dspark": DSparkDrafter}  # they stand on the drafter of another folder
ANY_TARGET = ("prompt_lookup",)


def load_drafter(folder: Path, target: Target, tokenizer: Any) -> Any:
    """The drafter in `folder`, ready to draft for `target`.

    Ours name themselves and their target; published DFlash checkpoints do neither and are known by `dflash_config`. Any
    other transformers model drafts token by token.
    A folder whose configuration is only {"base": another folder, relative to it} holds something that goes with that
    folder's drafter (a corrector, say). Heads name theirs among other keys.

    Raises:
        DrafterError: files missing or truncated, unknown keys, tensors that don't fit, or another target's drafter.
    """
    config = read_config(folder)
    if set(config) == {"base"}:
        return load_drafter(_base(config, folder), target, tokenizer)
    plain = not config.keys() & {"drafter", "dflash_config"} and config.keys() & {"architectures", "model_type"}
    name = config.get("drafter", "autoregressive" if plain else "dflash" if "dflash_config" in config else None)
    if not isinstance(name, str) or name not in DRAFTERS | HEADS:
        known = ", ".join(DRAFTERS | HEADS)
        raise DrafterError(f"{folder / 'config.json'}: drafter={name!r} is unknown; known are {known}")
    if plain:
        check_tokenizer(config, tokenizer, folder)
    elif "drafter" in config and name not in ANY_TARGET:
        check_identity(config, target, tokenizer, folder)
    if name in HEADS:
        return HEADS[name].load(folder, target, load_drafter(_base(config, folder), target, tokenizer))
    return DRAFTERS[name].load(folder, target)


def _base(config: dict[str, Any], folder: Path) -> Path:
    """The folder that another one stands on."""
    base = config.get("base")
    if not isinstance(base, str) or (folder / base).resolve() == folder.resolve():
        raise DrafterError(f"{folder / 'config.json'}: base={base!r} must be the path from there to a drafter's folder")
    return folder / base
