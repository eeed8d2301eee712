"""A load of requests on an engine in this process or on a server, and when each request got its tokens.

    timelines = drive(engine, prompts, SamplingParams(max_tokens=128), Load(concurrency=8))
    timelines = asyncio.run(drive_server(url, model, prompts, SamplingParams(max_tokens=128), Load(rate=2.0)))

Both give the same requests in the same order under the same rules, so that an engine and a server can be compared.
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import httpx

from dcoco import SamplingParams
from dcoco.engine import Engine, Request
from dcoco.errors import EngineError

TIMEOUT = 600.0  # seconds without a byte from a server

logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of every request


@dataclass(frozen=True)
class Load:
    """How requests come: so many always in flight (a closed loop), or at random times (an open one, Poisson)."""

    concurrency: int | None = None
    rate: float | None = None  # requests a second

    def arrivals(self, count: int, seed: int = 0) -> list[float]:
        """Seconds at which requests come; all at once in a closed loop, where they wait for their turn."""
        if self.rate is None:
            return [0.0] * count
        chance = random.Random(seed)
        return list(accumulate(chance.expovariate(self.rate) for _ in range(count)))

    def __str__(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g}/s"


@dataclass
class Timeline:
    """What one request got, and when, in seconds since the load began."""

    input_tokens: int
    begun: float  # when it was sent or, in an open loop, should have been
    ended: float = 0.0
    pieces: list[tuple[float, int]] = field(default_factory=list)  # time and number of the tokens that came together
    stats: dict[str, Any] | None = None  # of drafting, with the names of `dcoco.Stats`; None where nobody tells
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        return sum(tokens for _, tokens in self.pieces)


def drive(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, load: Load, seed: int = 0
) -> list[Timeline]:
    """Put the load on an engine of this process, each prompt once and in order; `seed` is of the arrivals."""
    due, room = load.arrivals(len(prompts), seed), load.concurrency or len(prompts)
    timelines: list[Timeline] = []
    flying: dict[Request, Timeline] = {}
    start = time.perf_counter()
    while flying or len(timelines) < len(prompts):
        now = time.perf_counter() - start
        while (index := len(timelines)) < len(prompts) and len(flying) < room and due[index] <= now:
            # One that came during a step has waited for its end.
            timelines.append(Timeline(len(prompts[index]), now if load.rate is None else due[index]))
            flying[engine.submit(prompts[index], params)] = timelines[index]
        if not flying:
            time.sleep(due[index] - now)
            continue
        touched = engine.step()
        now = time.perf_counter() - start
        for request in dict.fromkeys(touched):
            timeline = flying[request]
            if tokens := len(request.take().token_ids):
                timeline.pieces.append((now, tokens))
            if request.done:
                timeline.ended, timeline.stats = now, asdict(request.stats)
                timeline.error = None if request.error is None else str(request.error)
                del flying[request]
    return timelines


async def drive_server(
    url: str,
    model: str,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    load: Load,
    seed: int = 0,
    stream_options: dict[str, Any] | None = None,
) -> list[Timeline]:
    """Put the load on an OpenAI-compatible server, each prompt once and in order; `seed` is of the arrivals.

    Where `stream_options` make the server tell the usage in each chunk, tokens are counted by that.
    """
    due = load.arrivals(len(prompts), seed)
    turn = asyncio.Semaphore(load.concurrency or len(prompts))  # first come, first served
    body = {
        "model": model,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "ignore_eos": params.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True} | (stream_options or {}),
    }
    start = time.perf_counter()

    async def ask(client: httpx.AsyncClient, index: int) -> Timeline:
        await asyncio.sleep(due[index] - (time.perf_counter() - start))
        async with turn:
            timeline = Timeline(len(prompts[index]), time.perf_counter() - start if load.rate is None else due[index])
            times, characters, counts, total = [], [], [], 0
            try:
                async for event in stream(client, body | {"prompt": prompts[index]}):
                    now, usage = time.perf_counter() - start, event.get("usage") or {}
                    total = usage.get("completion_tokens", total)
                    if event.get("choices"):
                        times.append(now)
                        characters.append(len(event["choices"][0].get("text") or ""))
                        counts.append(usage.get("completion_tokens"))
                    if "speculation" in usage:
                        timeline.stats = stats_of(usage["speculation"])
            except (httpx.HTTPError, EngineError, ValueError) as error:
                timeline.error = str(error) or type(error).__name__
            timeline.ended = time.perf_counter() - start
            timeline.pieces = list(zip(times, pieces_of(total, counts, characters), strict=True))
            return timeline

    async with connect(url) as client:
        return list(await asyncio.gather(*(ask(client, index) for index in range(len(prompts)))))


def connect(url: str) -> httpx.AsyncClient:
    """A client with as many connections as there are requests."""
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=httpx.Limits(max_connections=None))


async def stream(client: httpx.AsyncClient, body: dict[str, Any], path: str = "/v1/completions") -> AsyncIterator[Any]:
    """The events of a streamed answer; raises EngineError where the server reports an error, before it or inside it."""
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise EngineError(f"status {response.status_code}: {(await response.aread()).decode(errors='replace')}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if line.startswith("data:") and data != "[DONE]":
                event = json.loads(data)
                if "error" in event:
                    raise EngineError(str(event["error"]))
                yield event


def stats_of(speculation: dict[str, Any]) -> dict[str, Any]:
    """The counts behind what our server tells of drafting, under the names of `dcoco.Stats`."""
    rounds = speculation["rounds"]
    return {
        "rounds": rounds,
        "drafts": speculation["drafts"],
        "draft_tokens": speculation["draft_tokens"],
        "accepted_tokens": speculation["accepted_tokens"],
        "committed_tokens": round(speculation["mean_acceptance_length"] * rounds),
        "accepted_at": [round(share * rounds) for share in speculation["acceptance_per_position"]],
    }


def pieces_of(total: int, counts: list[int | None], characters: list[int]) -> list[int]:
    """Tokens in each chunk of a stream: as the server counts them, else by each chunk's share of the text."""
    so_far = [count for count in counts if count is not None]
    if len(so_far) < len(counts):
        written = list(accumulate(characters))
        so_far = [round(total * part / max(1, written[-1])) for part in written[:-1]] + [total]
    return [after - before for before, after in pairwise([0, *so_far])]
