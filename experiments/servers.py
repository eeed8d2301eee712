"""OpenAI-compatible servers in processes of their own: ours, and others to compare with."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from dcoco.errors import EngineError

PATIENCE = 600.0  # seconds until a server must answer
HOST = "127.0.0.1"


class Server:
    """A server process that answers on `url`, once it has been waited for; what it prints goes to `log`.

    Args:
        command: without the port, which is chosen here and added as `--port`.
        environment: variables beside those of this process.
    """

    def __init__(self, command: Sequence[Any], log: Path, environment: Mapping[str, Any] | None = None):
        with socket.socket() as probe:  # the system names a port that nobody uses
            probe.bind((HOST, 0))
            port = probe.getsockname()[1]
        self.url = f"http://{HOST}:{port}"
        self.log = log
        variables = {name: str(value) for name, value in (environment or {}).items()}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*map(str, command), "--port", str(port)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | variables,
            )

    def wait(self) -> None:
        """Return when /health says so; raises EngineError if it ends before, or takes too long."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                last = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
                raise EngineError(f"the server ended with status {self.process.returncode}: see {self.log}\n{last}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5.0).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise EngineError(f"the server doesn't answer after {PATIENCE:.0f} seconds: see {self.log}")

    def model(self) -> str:
        """The name of the model that it serves."""
        return httpx.get(f"{self.url}/v1/models", timeout=30.0).json()["data"][0]["id"]

    def stop(self) -> int:
        """End it in the ordinary way; returns its exit status."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def serve_command(config: Any, *options: Any) -> list[Any]:
    """`dcoco serve` with the target, drafter, dtype and device of an experiment's settings."""
    named = {"--drafter": config.drafter, "--dtype": config.dtype, "--device": config.device}
    given = [part for name, value in named.items() if value is not None for part in (name, value)]
    threads = [] if config.threads is None else ["--threads", config.threads]
    return [sys.executable, "-m", "dcoco.cli", "serve", "--target", config.target, *given, *threads, *options]
