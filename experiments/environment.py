"""What produced a figure: versions and hardware, written beside everything that is measured."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

from dcoco.costs import cpu_model

# A folder of its own: beside conf/target, Hydra would take `target=` for the choice of a config group.
CONF = str(Path(__file__).resolve().parent.parent / "conf" / "experiments")


def describe() -> dict[str, Any]:
    """Versions of what computes, and the machine it ran on."""
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "dcoco": _revision(),
        },
        "hardware": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def _revision() -> str:
    try:
        command = ["git", "-C", CONF, "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
