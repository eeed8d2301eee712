"""The FastAPI app: its routes, and how a call goes: check, encode, submit, answer."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from dcoco.engine import Engine
from dcoco.loop import EngineLoop
from dcoco.server import errors
from dcoco.server.errors import ApiError, json_response
from dcoco.server.limits import Limits
from dcoco.server.metrics import Metrics
from dcoco.server.options import Options
from dcoco.server.prompts import Prompts
from dcoco.server.protocol import ChatBody, CompletionBody, GenerationBody
from dcoco.server.replies import ChatReply, CompletionReply, Reply
from dcoco.server.status import render_status

T = TypeVar("T")


class Service:
    """An engine behind HTTP.

    Args:
        engine: what answers; from now on it belongs to the service's thread.
        model: the name that clients give.
    """

    def __init__(self, engine: Engine, model: str):
        self.engine = engine
        self.model = model
        self.created = int(time.time())
        self.tokenizer = engine.decoder.tokenizer
        self.metrics = Metrics(engine, model)
        self.engine_loop = EngineLoop(engine, self.metrics.record)
        self.prompts = Prompts(engine.decoder, engine.max_model_len)

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Runs the engine's thread as long as the app runs."""
        self.engine_loop.start()
        yield
        self.engine_loop.close()
        await self.engine_loop.join()
        self.prompts.close()

    async def answer(self, http: Request, body: GenerationBody, kind: type[Reply]) -> Response:
        """Answer a call, as long as its client is there. Raises what `dcoco/server/errors.py` makes a response of."""
        self.engine_loop.check()
        self.check_model(body.model)
        params = body.sampling(self.engine.max_model_len)
        reply = kind(self.tokenizer, self.model, body.best_logprobs)

        async def start() -> tuple[list[list[int]], Any]:
            prompts = await self.prompts.encode(body)
            most = self.engine.max_num_seqs + (self.engine.max_waiting or 0)
            if self.engine.max_waiting is not None and len(prompts) * params.n > most:
                raise ApiError(400, f"{len(prompts)} x n={params.n}: {most} answers are the most at once", "n")
            return prompts, await self.engine_loop.submit(prompts, params, whole=not body.stream)

        prompts, answers = await while_connected(http.receive, start())
        if body.stream:
            return EventStream(reply.events(answers, prompts, body.include_usage), answers.close)
        try:
            return json_response(await while_connected(http.receive, reply.whole(answers, prompts)))
        finally:
            answers.close()

    def check_model(self, model: str | None) -> None:
        """Raise ApiError for another model than the one served; none means that."""
        if model not in (None, self.model):
            raise ApiError(
                404, f"there is no model {model!r}; this server has {self.model!r}", "model", "model_not_found"
            )

    def describe(self) -> dict[str, Any]:
        """The model, as /v1/models lists it."""
        length = self.engine.max_model_len
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "dcoco",
            "max_model_len": length,
        }


class EventStream(Response):
    """Server-sent events, until the client goes away; `close` is called in any case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], close: Any):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events = events
        self.close = close

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def pump() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with aclosing(self.events) as events:
                async for piece in events:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await while_connected(receive, pump())
        except (ClientDisconnect, OSError):
            pass  # nobody listens any more
        finally:
            self.close()


async def while_connected(receive: Any, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; where the client goes away before, `work` is cancelled. Raises ClientDisconnect then."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def create_app(
    engine: Engine, model: str, api_key: str | None = None, max_body_bytes: int = Options.max_body_bytes
) -> FastAPI:
    """The app around an engine; `app.state.service` is what it serves.

    Args:
        model: the name that clients give.
        api_key: what they must show to use /v1.
        max_body_bytes: how long the body of a call may be.
    """
    service = Service(engine, model)
    # Its interactive documentation would load scripts from elsewhere.
    app = FastAPI(title="dcoco", lifespan=service.lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(Limits, api_key=api_key, max_body_bytes=max_body_bytes)
    errors.install(app)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, http: Request) -> Response:
        return await service.answer(http, body, CompletionReply)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, http: Request) -> Response:
        return await service.answer(http, body, ChatReply)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [service.describe()]})

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str) -> Response:
        service.check_model(model)
        return json_response(service.describe())

    @app.get("/health")
    async def health() -> Response:
        state = service.engine_loop.state
        return json_response({"status": state}, 200 if state == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/status.json")
    async def status() -> Response:
        return json_response(service.metrics.status() | {"state": service.engine_loop.state})

    @app.get("/")
    async def status_page() -> HTMLResponse:
        return HTMLResponse(page)

    page = render_status(engine, model)
    return app
