"""Which drafter a checkpoint holds."""

from pathlib import Path
from typing import Any

from drafters.block_diffusion import BlockDiffusionDrafter
from drafters.checkpoint import check_identity, read_config
from drafters.dflash import DFlashDrafter
from drafters.dspark import DSparkDrafter
from drafters.eagle import EagleDrafter
from verifier.errors import DrafterError
from verifier.target import Target

DRAFTERS: dict[str, Any] = {"block_diffusion": BlockDiffusionDrafter, "dflash": DFlashDrafter, "eagle": EagleDrafter}
HEADS: dict[str, Any] = {"dspark": DSparkDrafter}  # they stand on the drafter of another folder


def load_drafter(folder: Path, target: Target, tokenizer: Any) -> Any:
    """The drafter in `folder`, ready to draft for `target`.

    Ours name themselves and their target; published DFlash checkpoints do neither and are known by `dflash_config`.
    A folder whose configuration is only {"base": another folder, relative to it} holds something that goes with that
    folder's drafter (a corrector, say). Heads name theirs among other keys.

    Raises:
        DrafterError: files missing or truncated, unknown keys, tensors that don't fit, or another target's drafter.
    """
    config = read_config(folder)
    if set(config) == {"base"}:
        return load_drafter(_base(config, folder), target, tokenizer)
    name = config.get("drafter", "dflash" if "dflash_config" in config else None)
    if not isinstance(name, str) or name not in DRAFTERS | HEADS:
        known = ", ".join(DRAFTERS | HEADS)
        raise DrafterError(f"{folder / 'config.json'}: drafter={name!r} is unknown; known are {known}")
    if "drafter" in config:
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
