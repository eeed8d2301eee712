"""A real server in a thread, for tests: uvicorn on a free port, around an engine that a test can hold and break."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import uvicorn

from dcoco import DCOCODecoder
from dcoco.engine import Engine
from dcoco.server.address import bind
from dcoco.server.app import create_app
from dcoco.server.run import Server

PATIENCE = 180.0  # seconds until something that must happen is missed


class TestServer:
    """One server: its address, clients for it, and handles on its engine."""

    __test__ = False

    def __init__(self, decoder: DCOCODecoder, grace: float = 0.0, api_key: str | None = None, **sizes: Any):
        body = {"max_body_bytes": sizes.pop("max_body_bytes")} if "max_body_bytes" in sizes else {}
        self.engine = Engine(decoder, **{"max_num_seqs": 4, "max_waiting": 8, **sizes})
        self.app = create_app(self.engine, "tiny", api_key, **body)
        self.service = self.app.state.service
        self.submitted, self.cancelled = threading.Event(), threading.Event()
        self.steps: int | None = None  # how many more steps the engine may make; None: any number
        self._step, self._submit, self._cancel = self.engine.step, self.engine.submit_all, self.engine.cancel
        self.engine.step, self.engine.submit_all, self.engine.cancel = self.step, self.submit, self.cancel  # type: ignore
        listener = bind("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        ready = threading.Event()
        self.uvicorn = Server(uvicorn.Config(self.app, log_level="warning"), ready.set, grace)
        self.thread = threading.Thread(target=self.uvicorn.run, args=([listener],), daemon=True)
        self.thread.start()
        assert ready.wait(PATIENCE)
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def step(self) -> Any:
        if self.steps == 0:
            threading.Event().wait(0.001)  # nothing moves, but commands are obeyed
            return []
        if self.steps is not None:
            self.steps -= 1
        return self._step()

    def submit(self, *arguments: Any) -> Any:
        requests = self._submit(*arguments)
        self.submitted.set()
        return requests

    def cancel(self, request: Any) -> None:
        self._cancel(request)
        self.cancelled.set()

    def stop(self) -> None:
        """End as on SIGTERM, and wait for it."""
        self.uvicorn.should_exit = True
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@contextmanager
def serving(decoder: DCOCODecoder, **options: Any) -> Iterator[TestServer]:
    """A server for as long as the block runs."""
    server = TestServer(decoder, **options)
    try:
        yield server
    finally:
        server.steps = None
        server.http.close()
        server.openai.close()
        server.stop()
