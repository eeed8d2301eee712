"""Which corrector lies beside a drafter's checkpoint: ours or one of its rivals, saved and loaded alike.

`corrector.json` holds the kind and the sizes, `corrector.safetensors` the weights. A corrector of another drafter's
lattices stands in a folder of its own, whose config.json is {"base": that drafter's folder} (`drafters/registry.py`).
"""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dcoco.corrector import Corrector
from dcoco.errors import DrafterError
from dcoco.lilicorr import LiLiCorr
from dcoco.selector import Selector
from drafters.checkpoint import load_strictly, read_config, read_tensors, whole_number
from verifier.linear import pack_linears
from verifier.target import Target

AnyCorrector = Corrector | Selector | LiLiCorr
CORRECTORS: dict[str, Any] = {"contextual": Corrector, "selector": Selector, "lilicorr": LiLiCorr}


def save_corrector(folder: Path, corrector: AnyCorrector, training: dict[str, Any]) -> None:
    """Write `corrector.json` and `corrector.safetensors` (bfloat16) beside the drafter that it belongs to."""
    state = {name: tensor.detach().cpu() for name, tensor in corrector.state_dict().items()}
    for name, tensor in state.items():
        state[name] = tensor.to(torch.bfloat16 if tensor.is_floating_point() else torch.int32).contiguous()
    save_file(state, str(folder / "corrector.safetensors"))
    kind = next(name for name, known in CORRECTORS.items() if isinstance(corrector, known))
    config = {"kind": kind, **asdict(corrector.config), "training": training}
    (folder / "corrector.json").write_text(json.dumps(config, indent=1) + "\n")


def load_corrector(folder: Path, target: Target) -> AnyCorrector | None:
    """The corrector beside a drafter's checkpoint, ready to run; None where there is none.

    Raises DrafterError where its configuration or its tensors don't fit.
    """
    file = folder / "corrector.json"
    if not file.exists():
        return None
    config = read_config(folder, file.name)
    config.pop("training", None)
    kind = config.pop("kind", "contextual")  # the first ones didn't say
    if not isinstance(kind, str) or kind not in CORRECTORS:
        raise DrafterError(f"{file}: kind={kind!r} is unknown; known are {', '.join(CORRECTORS)}")
    made = CORRECTORS[kind]
    names = {field.name for field in fields(made.settings)}
    if set(config) != names:
        raise DrafterError(f"{file} has the keys {sorted(config)}; expected {sorted(names)}")
    for name in names:
        whole_number(config, name, file)
    if config["hidden_size"] != target.hidden_size:
        raise DrafterError(f"{file}: hidden_size={config['hidden_size']}, but the target's is {target.hidden_size}")
    corrector = made(made.settings(**config))
    load_strictly(corrector, read_tensors(folder / "corrector.safetensors"), folder)
    corrector.eval().requires_grad_(False).to(device=target.device, dtype=target.dtype)
    pack_linears(corrector)
    return corrector
