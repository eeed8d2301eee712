"""Drafter checkpoints: `config.json` and `model.safetensors` in a folder, loaded strictly.

A checkpoint states which drafter it is and which target it was trained for; anything missing, unexpected or of another
shape is an error that lists it. Published DFlash checkpoints carry no such statement and are recognised by their keys.
"""

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafters.block_diffusion import BlockDiffusionConfig, BlockDiffusionDrafter
from verifier.errors import DrafterError
from verifier.target import Target

FORMAT = 1


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


def save_block_diffusion(
    folder: Path, drafter: BlockDiffusionDrafter, identity: dict[str, Any], training: dict[str, Any]
) -> None:
    """Write a checkpoint in bfloat16; `training` (recipe and figures) is carried along as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "drafter": "block_diffusion",
        "format": FORMAT,
        "predicts": "next",  # input slot i predicts the token after it: a block of B inputs drafts B tokens
        **asdict(drafter.config),
        "draft_vocab_size": len(drafter.draft_ids),
        "target": identity,
        "training": training,
    }
    state = {name: tensor.cpu() for name, tensor in drafter.state_dict().items() if not name.startswith("head.")}
    state = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor.int()
        for name, tensor in state.items()
    }
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def load_drafter(folder: Path, target: Target, tokenizer: Any) -> Any:
    """The drafter in `folder`, ready to draft for `target`.

    Raises:
        DrafterError: files missing or truncated, unknown keys, tensors that don't fit, or another target's drafter.
    """
    config = read_config(folder)
    if config.get("drafter") != "block_diffusion":
        from drafters.dflash import DFlashDrafter

        return DFlashDrafter.load(folder, target)
    check_identity(config, target, tokenizer, folder)
    names = {field.name for field in fields(BlockDiffusionConfig)}
    known = names | {"drafter", "format", "predicts", "draft_vocab_size", "target", "training"}
    if unknown := sorted(set(config) - known):
        raise DrafterError(f"{folder / 'config.json'} has unknown keys {unknown}; known are {sorted(known)}")
    if missing := sorted(known - {"training"} - set(config)):
        raise DrafterError(f"{folder / 'config.json'} lacks the keys {missing}")
    if config["format"] != FORMAT or config["predicts"] != "next":
        raise DrafterError(
            f"{folder / 'config.json'}: format={config['format']!r}, predicts={config['predicts']!r}; "
            f"this version reads format={FORMAT} with predicts='next'"
        )
    shape: dict[str, Any] = {
        name: tuple(config[name]) if isinstance(config[name], list) else config[name] for name in names
    }
    state = read_tensors(folder / "model.safetensors")
    draft_ids = state.get("draft_ids", torch.arange(target.vocab_size)).long()
    low, high = int(draft_ids.min()), int(draft_ids.max())
    if len(draft_ids) != config["draft_vocab_size"] or low < 0 or high >= target.vocab_size:
        raise DrafterError(
            f"{folder}: expected {config['draft_vocab_size']} draft_ids below the vocabulary size {target.vocab_size}; "
            f"found {len(draft_ids)} from {low} to {high}"
        )
    drafter = BlockDiffusionDrafter(target, BlockDiffusionConfig(**shape), draft_ids)
    load_strictly(drafter, state, folder)
    return drafter.prepare()


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint folder."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise DrafterError(f"{folder} holds no config.json: not a drafter checkpoint") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DrafterError(f"{file} is not JSON ({error}): download or train the checkpoint again") from None
    if not isinstance(config, dict):
        raise DrafterError(f"{file} holds a {type(config).__name__}, not an object")
    return config


def read_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU."""
    try:
        return load_file(str(file))
    except FileNotFoundError:
        raise DrafterError(f"{file} is missing: the checkpoint is incomplete") from None
    except SafetensorError as error:
        raise DrafterError(f"{file} can't be read ({error}): it is truncated or damaged; get it again") from None


def load_strictly(module: nn.Module, state: dict[str, Tensor], where: Path) -> None:
    """Load a state dict; DrafterError lists what is missing, unexpected or of another shape."""
    expected = module.state_dict()
    problems = [f"missing {name}" for name in sorted(expected.keys() - state.keys())]
    problems += [f"unexpected {name}" for name in sorted(state.keys() - expected.keys())]
    problems += [
        f"{name} has shape {list(state[name].shape)}, expected {list(expected[name].shape)}"
        for name in sorted(expected.keys() & state.keys())
        if state[name].shape != expected[name].shape
    ]
    if problems:
        raise DrafterError(f"{where}: the weights don't fit the configuration: {'; '.join(problems)}")
    module.load_state_dict(state)


def check_identity(config: dict[str, Any], target: Target, tokenizer: Any, folder: Path) -> None:
    """Refuse a checkpoint that was trained for another target."""
    recorded, actual = config.get("target"), target_identity(target, tokenizer)
    if not isinstance(recorded, dict):
        raise DrafterError(f"{folder / 'config.json'} doesn't say which target it was trained for (key 'target')")
    wrong = [
        f"{key} {recorded.get(key)!r} instead of {value!r}"
        for key, value in actual.items()
        if recorded.get(key) != value
    ]
    if wrong:
        raise DrafterError(f"the drafter in {folder} was trained for another target: {', '.join(wrong)}; take its own")
