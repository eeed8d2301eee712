"""`dcoco serve`: the app under uvicorn, from the address it gets to an orderly end."""

import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import torch
import uvicorn

from dcoco.decoder import DCOCODecoder
from dcoco.engine import Engine
from dcoco.server.address import address_error
from dcoco.server.app import create_app
from dcoco.server.options import DEFAULT_MODEL_LEN, Options

LAST_WORDS = 5  # seconds that connections have after the grace period, to read what became of their requests


def serve(options: Options, listener: socket.socket) -> None:
    """Serve at a bound socket until SIGTERM or SIGINT. Raises the errors of loading, and ConfigError as `bind` does."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    decoder = DCOCODecoder.from_pretrained(
        options.target,
        drafter=options.drafter,
        device=options.device,
        dtype=options.dtype,
        max_rows=options.max_num_seqs,
    )
    length = options.max_model_len or min(DEFAULT_MODEL_LEN, decoder.target.max_positions)
    engine = Engine(
        decoder,
        options.method,  # type: ignore[arg-type]
        options.max_num_seqs,
        length,
        options.max_waiting,
    )
    name = options.served_model_name or options.target
    app = create_app(engine, name, options.api_key, options.max_body_bytes)
    host, port = listener.getsockname()[:2]
    dtype = str(decoder.target.dtype).removeprefix("torch.")
    greeting = (
        f"{name} ({dtype}, method {options.method}) at http://{f'[{host}]' if ':' in host else host}:{port}\n"
        f"{engine.max_num_seqs} rows of {engine.max_model_len} tokens: up to {engine.memory_bytes / 2**30:.2f} GiB"
    )
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=int(options.grace) + LAST_WORDS
    )
    try:
        listener.listen(config.backlog)  # somebody else may have been faster
    except OSError as error:
        raise address_error(options.host, options.port, error) from error
    Server(config, lambda: print(greeting, flush=True), options.grace).run([listener])


class Server(uvicorn.Server):
    """Calls `ready` when it listens; at the end running requests have `grace` seconds, and the exit code is 0."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], grace: float = 0.0):
        super().__init__(config)
        self.ready = ready
        self.grace = grace

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, and `ready`."""
        await super().startup(sockets)
        self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's; what has not finished when the grace period is over fails."""
        self.config.app.state.service.engine_loop.close(self.grace)  # type: ignore[union-attr]
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; a second Ctrl-C doesn't wait. uvicorn's would raise the signal again when all is done."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        elif not self.should_exit:
            self.should_exit = True
            print("ending: running requests may finish", file=sys.stderr, flush=True)
