"""Loading a transformers model folder, whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from verifier.errors import DcocoError


def load_whole(folder: Path, what: str, error: type[DcocoError], dtype: Any, trust_remote_code: bool = False) -> Any:
    """The causal LM in a local folder; `error`, which begins with `what`, where it can't be loaded or isn't whole.

    Transformers fills what is missing or of another shape with random weights, leaves out what it doesn't expect (the
    layers above num_hidden_layers, say), takes integers for weights and goes on.
    """
    with quiet_transformers():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
            )
        except Exception as cause:  # transformers raises anything from OSError to RuntimeError for a bad folder
            raise error(
                f"{what} can't be loaded from {folder}: {cause}. Get its files again, or choose another"
            ) from cause
    model, report = loaded
    report["integer_keys"] = _integers(folder, {name for name, _ in model.named_parameters()})
    for fault in ("missing_keys", "mismatched_keys", "unexpected_keys", "integer_keys"):
        if report.get(fault):
            some = ", ".join(str(key) for key in sorted(report[fault], key=str)[:3])
            count, kind = len(report[fault]), fault.replace("_keys", "")
            raise error(
                f"{what} in {folder} has {count} {kind} weights: {some} ...; "
                "get weights and config.json from the same place"
            )
    return model


def _integers(folder: Path, names: set[str]) -> set[str]:
    """Which of these weights a folder's safetensors files hold as other than floating-point numbers."""
    found: set[str] = set()
    for file in folder.glob("model*.safetensors"):
        with safe_open(file, "pt") as tensors:
            mine = names & set(tensors.keys())
            found |= {name for name in mine if "F" not in tensors.get_slice(name).get_dtype()}  # F32, BF16, F8_E4M3
    return found


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No weight-loading bar and no warnings while a checked folder is loaded: what matters is raised as an error."""
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
