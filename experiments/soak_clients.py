"""How the soak asks: an engine of this process, or a server over HTTP. Both tell the outcome in the same words.

answered  as asked for; the detail is the text
failed    with an error that names the injected fault
refused   as the request deserves
busy      the queue is full
stopped   the server is shutting down
left      the client has gone away
lost      anything else
"""

import asyncio
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from dcoco import SamplingParams
from dcoco.engine import Engine
from dcoco.errors import EngineError, ParameterError, QueueFullError
from experiments.faults import FAULT
from experiments.load import connect, stream

FAR = 1 << 40  # beyond any vocabulary
MOMENT = 0.05  # seconds that a client waits who doesn't read a stream
Outcome = tuple[str, str]  # one of the words above, and more about it

# What a request may get wrong: the fields that make it so, and the status that it deserves.
WRONG: dict[str, tuple[dict[str, Any], int]] = {
    "no prompt": ({"prompt": []}, 400),
    "foreign token": ({"prompt": [FAR]}, 400),
    "too long": ({"prompt": [5] * 20_000}, 400),
    "out of range": ({"top_p": 2.0}, 400),
    "wrong type": ({"temperature": "hot"}, 422),
}
WRONG_OVER_HTTP: dict[str, tuple[dict[str, Any], int]] = {
    "other model": ({"model": "another"}, 404),
    "not served": ({"tools": [{"type": "function"}]}, 400),
    "no such field": ({"temprature": 1.0}, 400),
    "not JSON": ({}, 400),
    "too large": ({}, 413),
}


@dataclass(frozen=True)
class Job:
    """One request, and how its client behaves."""

    kind: str
    prompt: list[int]
    params: dict[str, Any]  # of `SamplingParams`, whose names the server has too
    stream: bool = False
    patience: int | None = None  # pieces after which the client goes away
    wrong: str | None = None  # what is wrong with it
    key: str | None = None  # requests with the same key must get the same text


class Client(Protocol):
    """Whom the soak asks."""

    remote: bool

    async def ask(self, job: Job) -> Outcome:
        """One request, to its end."""

    async def load(self) -> tuple[int, int]:
        """Requests that run, and that wait."""

    def memory(self) -> int | None:
        """Resident bytes; None where the system doesn't tell."""


class EngineClient:
    """An engine of this process, run between the turns of its clients."""

    remote = False

    def __init__(self, engine: Engine):
        self.engine = engine
        self._stepped = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def ask(self, job: Job) -> Outcome:
        wrong, _ = WRONG[job.wrong] if job.wrong else ({}, 0)
        fields = job.params | wrong
        try:
            prompt = fields.pop("prompt", job.prompt)
            requests = self.engine.submit_all(prompt, SamplingParams(**fields))
        except ParameterError as error:
            return ("refused" if job.wrong else "lost"), str(error)
        except QueueFullError as error:
            return "busy", str(error)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        pieces = 0
        while not all(request.done for request in requests):
            if job.patience is not None and pieces >= job.patience:
                for request in requests:
                    self.engine.cancel(request)
                return "left", ""
            await self._stepped.wait()
            pieces += any(request.take().token_ids for request in requests)
        failure = next((request.error for request in requests if request.error is not None), None)
        if failure is not None:
            for request in requests:
                self.engine.cancel(request)
            return ("failed" if FAULT in str(failure) else "lost"), str(failure)
        return "answered", "|".join(request.result().text for request in requests)

    async def load(self) -> tuple[int, int]:
        return self.engine.running, len(self.engine.waiting)

    def memory(self) -> int | None:
        return resident(os.getpid())

    async def _run(self) -> None:
        while self.engine.busy:
            self.engine.step()
            stepped, self._stepped = self._stepped, asyncio.Event()
            stepped.set()
            await asyncio.sleep(0)  # those who got something take it


class ServerClient:
    """A server, asked over HTTP.

    Args:
        pid: its process, whose memory is watched.
        max_body_bytes: how long it lets a body be.
    """

    remote = True

    def __init__(self, url: str, model: str, pid: int, max_body_bytes: int):
        self.model = model
        self.pid = pid
        self.max_body_bytes = max_body_bytes
        self._client = connect(url)

    async def __aenter__(self) -> "ServerClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(self, job: Job) -> Outcome:
        body = {"model": self.model, "prompt": job.prompt, "stream": job.stream, **job.params}
        try:
            if job.wrong:
                return await self._ask_wrongly(job.wrong, body)
            if job.stream:
                return await self._stream(body, job)
            if job.patience is not None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._whole(body), MOMENT * job.patience)
                return "left", ""
            return await self._whole(body)
        except EngineError as error:
            return self._named(str(error)), str(error)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            return "lost", repr(error)

    async def load(self) -> tuple[int, int]:
        text = (await self._client.get("/metrics")).text
        gauges = dict(re.findall(r"^dcoco:num_requests_(\w+)\{.*\} (\S+)$", text, re.M))
        return int(float(gauges["running"])), int(float(gauges["waiting"]))

    def memory(self) -> int | None:
        return resident(self.pid)

    async def _ask_wrongly(self, wrong: str, body: dict[str, Any]) -> Outcome:
        fields, status = (WRONG | WRONG_OVER_HTTP)[wrong]
        content = json.dumps(body | fields)
        if wrong == "not JSON":
            content = content[:-1]
        if wrong == "too large":
            content += " " * self.max_body_bytes
        response = await self._client.post(
            "/v1/completions", content=content, headers={"Content-Type": "application/json"}
        )
        told = response.status_code == status and response.json()["error"]["message"]
        return ("refused" if told else "lost"), f"status {response.status_code}: {response.text}"

    async def _whole(self, body: dict[str, Any]) -> Outcome:
        response = await self._client.post("/v1/completions", json=body)
        if response.status_code != httpx.codes.OK:
            raise EngineError(f"status {response.status_code}: {response.text}")
        answer = response.json()
        return self._complete(
            body, {c["index"]: (c["text"], c["finish_reason"]) for c in answer["choices"]}, answer["usage"]
        )

    async def _stream(self, body: dict[str, Any], job: Job) -> Outcome:
        pieces, usage = 0, dict[str, Any]()
        got: dict[int, tuple[str, str | None]] = {}
        if job.patience is None:
            body = body | {"stream_options": {"include_usage": True}}
        events = stream(self._client, body)
        try:
            async for event in events:
                if job.patience is not None and pieces >= job.patience:
                    return "left", ""
                pieces += 1
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text, reason = got.get(choice["index"], ("", None))
                    got[choice["index"]] = (text + choice["text"], choice["finish_reason"] or reason)
        finally:
            await events.aclose()  # type: ignore[attr-defined]
        return ("left", "") if job.patience is not None else self._complete(body, got, usage)

    def _complete(self, body: dict[str, Any], got: dict[int, tuple[str, str | None]], usage: Any) -> Outcome:
        """Whether it is what was asked for."""
        count = body.get("n", 1)
        whole = sorted(got) == list(range(count)) and all(reason in ("stop", "length") for _, reason in got.values())
        fits = 0 < usage.get("completion_tokens", 0) <= count * body["max_tokens"]
        text = "|".join(got[index][0] for index in sorted(got))
        return ("answered", text) if whole and fits else ("lost", f"incomplete: {got} {usage}")

    def _named(self, message: str) -> str:
        """What an error is about."""
        signs = {"failed": FAULT, "busy": "status 429", "stopped": "shutting down"}
        return next((outcome for outcome, sign in signs.items() if sign in message), "lost")


def resident(pid: int) -> int | None:
    """Bytes of memory that a process holds; None where /proc doesn't tell, or the process has gone."""
    try:
        found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
