"""What has been measured so far, in a folder that a stopped run can be taken up from."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from dcoco.errors import ConfigError


class Records:
    """JSON lines, one a measurement, written as they come; a line that a dying run left unfinished is dropped."""

    def __init__(self, file: Path):
        self.file = file
        content = file.read_bytes() if file.is_file() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            file.write_bytes(whole)
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]

    def append(self, row: dict[str, Any]) -> None:
        """Keep a measurement."""
        with self.file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        self.rows.append(row)


def check_resumed(config: DictConfig, file: Path, free: Collection[str]) -> None:
    """Refuse to go on with other settings than those noted in `file`, if it is there.

    `free` ones may change; where systems are free, more may be named, but none may mean something else than before.

    Raises ConfigError, also where there is no such folder.
    """
    if not file.parent.is_dir():
        raise ConfigError(f"{file.parent} is no folder of a run: name the one that the run has printed")
    if file.is_file():
        before = json.loads(file.read_text())["config"]
        changed = [str(name) for name in config if name not in free and config[name] != before.get(name)]
        if "systems" in free:
            known = {system["name"]: system for system in before["systems"]}
            changed += [f"system {one.name!r}" for one in config.systems if known.get(one.name, one) != one]
        if changed:
            raise ConfigError(f"{file.parent} holds a run with other {', '.join(changed)}: start one in another folder")
