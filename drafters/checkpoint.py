"""What checkpoints of all drafters share: `config.json` and `model.safetensors` in a folder, read strictly.

A checkpoint states which target it was trained for; anything missing, unexpected or of another shape is an error that
lists it.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer

from verifier.errors import DrafterError
from verifier.linear import PackedLinear
from verifier.loading import quiet_transformers
from verifier.target import Target

LARGEST = 1 << 16  # no size of a drafter is larger: a slip in a configuration must not ask for terabytes
LARGEST_VOCABULARY = 1 << 20


def target_identity(target: Target, tokenizer: Any) -> dict[str, Any]:
    """What a checkpoint records of its target: another model of the same shape still has another tokenizer."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return {
        "model_type": target.config.model_type,
        "hidden_size": target.hidden_size,
        "num_hidden_layers": len(target.layers),
        "vocab_size": target.vocab_size,
        "tokenizer_sha256": hashlib.sha256(vocabulary.encode()).hexdigest(),
    }


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """A JSON object in a checkpoint folder."""
    file = folder / name
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise DrafterError(f"{folder} holds no {name}: not a drafter checkpoint") from None
    except OSError as error:
        raise DrafterError(f"{file} can't be read ({error}): make it a readable file") from None
    except (ValueError, RecursionError) as error:
        raise DrafterError(f"{file} is not JSON ({error}): download or train the checkpoint again") from None
    if not isinstance(config, dict):
        raise DrafterError(f"{file} holds a {type(config).__name__}, not an object: not a drafter checkpoint")
    return config


def whole_number(config: dict[str, Any], key: str, file: Path) -> int:
    """A positive integer of a configuration."""
    value, largest = config[key], LARGEST_VOCABULARY if key == "draft_vocab_size" else LARGEST
    if type(value) is not int or not 1 <= value <= largest:
        raise DrafterError(f"{file}: {key}={value!r} must be an integer from 1 to {largest}")
    return value


def whole_numbers(config: dict[str, Any], key: str, file: Path) -> tuple[int, ...]:
    """A list of integers of a configuration."""
    value = config[key]
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise DrafterError(f"{file}: {key}={value!r} must be a list of integers")
    return tuple(value)


def check_keys(config: dict[str, Any], known: set[str], file: Path) -> None:
    """Refuse a configuration of ours with unknown keys, or without one that it needs (all but "training")."""
    if unknown := sorted(set(config) - known):
        raise DrafterError(f"{file} has unknown keys {unknown}; known are {sorted(known)}: remove them")
    if missing := sorted(known - {"training"} - set(config)):
        raise DrafterError(f"{file} lacks the keys {missing}: get the checkpoint again")


def check_draft_ids(config: dict[str, Any], draft_ids: Tensor, file: Path) -> None:
    """Refuse draft ids (int64 [W]) that aren't as many as the configuration says."""
    if len(draft_ids) != config["draft_vocab_size"]:
        raise DrafterError(
            f"{file}: draft_vocab_size={config['draft_vocab_size']!r}, but there are {len(draft_ids)} "
            "draft_ids: get configuration and weights from the same place"
        )


def refuse_packed(drafter: nn.Module) -> None:
    """Refuse to save a drafter whose weights no longer have their shapes and names; the head isn't saved."""
    if any(isinstance(module, PackedLinear) for name, module in drafter.named_modules() if name != "head"):
        raise DrafterError("the drafter's weights are packed for inference; save() it before prepare()")


def write_checkpoint(drafter: nn.Module, folder: Path, config: dict[str, Any]) -> None:
    """Write a configuration and the drafter's weights, in bfloat16 and without the head, which is the target's.

    Raises:
        DrafterError: `prepare` has packed the weights.
    """
    refuse_packed(drafter)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.cpu() for name, tensor in drafter.state_dict().items() if not name.startswith("head.")}
    for name, tensor in state.items():
        state[name] = tensor.to(torch.bfloat16 if tensor.is_floating_point() else torch.int32).contiguous()
    save_file(state, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def read_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU."""
    try:
        return load_file(str(file))
    except FileNotFoundError:
        raise DrafterError(f"{file} is missing: the checkpoint is incomplete") from None
    except (SafetensorError, OSError) as error:
        raise DrafterError(f"{file} can't be read ({error}): it is truncated or damaged; get it again") from None


def load_strictly(module: nn.Module, state: dict[str, Tensor], where: Path) -> None:
    """Load a state dict; DrafterError lists what is missing, unexpected, of another shape or kind of number.

    Floating-point weights may have any precision; integers in their place are quantised or broken.
    """
    expected = module.state_dict()
    problems = [f"missing {name}" for name in sorted(expected.keys() - state.keys())]
    problems += [f"unexpected {name}" for name in sorted(state.keys() - expected.keys())]
    problems += [
        f"{name} has shape {list(state[name].shape)}, expected {list(expected[name].shape)}"
        for name in sorted(expected.keys() & state.keys())
        if state[name].shape != expected[name].shape
    ]
    problems += [
        f"{name} holds {state[name].dtype}, expected {'floating-point' if floating else 'whole'} numbers"
        for name in sorted(expected.keys() & state.keys())
        if state[name].is_floating_point() != (floating := expected[name].is_floating_point())
    ]
    if problems:
        raise DrafterError(
            f"{where}: the weights don't fit the configuration: {'; '.join(problems)}. Get both from the same place"
        )
    module.load_state_dict(state)


def check_identity(config: dict[str, Any], target: Target, tokenizer: Any, folder: Path) -> None:
    """Refuse a checkpoint that was trained for another target."""
    recorded, actual = config.get("target"), target_identity(target, tokenizer)
    if not isinstance(recorded, dict):
        raise DrafterError(
            f"{folder / 'config.json'} doesn't say which target it was trained for (key 'target'): get it again"
        )
    wrong = [
        f"{key} {recorded.get(key)!r} instead of {value!r}"
        for key, value in actual.items()
        if recorded.get(key) != value
    ]
    if wrong:
        raise DrafterError(f"the drafter in {folder} was trained for another target: {', '.join(wrong)}; take its own")


def check_tokenizer(config: dict[str, Any], tokenizer: Any, folder: Path) -> None:
    """Refuse a plain language model as a drafter that has another tokenizer than the target, as far as it says.

    A draft of such a model would never be accepted. Its vocabulary may have padding, or lack the target's padding.
    """
    theirs = tokenizer.get_vocab()
    inner, needed = config.get("text_config") or {}, max(theirs.values()) + 1
    size = config.get("vocab_size", inner.get("vocab_size"))
    if type(size) is not int or size < needed:
        raise DrafterError(
            f"{folder / 'config.json'}: vocab_size={size!r}, but the target's tokenizer has {needed} ids: "
            "a draft model must share it; choose one of the target's family"
        )
    if not (folder / "tokenizer.json").exists():
        return
    try:
        with quiet_transformers():
            mine = AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab()
    except Exception as error:  # transformers raises anything from OSError to RuntimeError for a bad file
        raise DrafterError(f"the tokenizer in {folder} can't be loaded: {error}. Get its files again") from error
    if wrong := [token for token, index in theirs.items() if mine.get(token, index) != index]:
        raise DrafterError(
            f"the draft model in {folder} has another tokenizer than the target: {wrong[0]!r} is {mine[wrong[0]]} "
            f"there and {theirs[wrong[0]]} here ({len(wrong)} tokens differ); choose one of the target's family"
        )
