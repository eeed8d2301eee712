"""Errors in OpenAI's shape, {"error": {"message", "type", "param", "code"}}, and with the status that fits."""

import json
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from dcoco.errors import DcocoError, ParameterError, QueueFullError, StoppedError

REFUSED = ("not_served", "extra_forbidden", "json_invalid", "missing")  # 400; a value of the wrong type is 422
RETRY_SECONDS = "1"


class ApiError(DcocoError):
    """A call that is answered with an error."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """What the client reads."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> Response:
        """The response."""
        headers = {429: {"Retry-After": RETRY_SECONDS}, 401: {"WWW-Authenticate": "Bearer"}}.get(self.status)
        return json_response(self.body, self.status, headers)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(to_json(content), status, headers, media_type="application/json")


def to_json(content: Any) -> bytes:
    """Compact JSON. What a client sent as half of a surrogate pair and gets told of becomes a question mark."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ParameterError):
        named = re.match(r"(\w+)[=\[]", str(error))  # SamplingParams says "top_p=2.0: must be ..."
        return ApiError(400, str(error), named[1] if named else None)
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, StoppedError):
        return ApiError(503, str(error), code="unavailable")
    return ApiError(500, str(error) if isinstance(error, DcocoError) else f"internal error: {error!r}")


def install(app: FastAPI) -> None:
    """Make every error of an app one of OpenAI's shape."""

    @app.exception_handler(DcocoError)
    @app.exception_handler(Exception)
    async def named(_: Request, error: Exception) -> Response:
        return as_api_error(error).response

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return from_validation(error).response

    @app.exception_handler(HTTPException)
    async def by_status(request: Request, error: HTTPException) -> Response:
        place = f"{request.method} {request.url.path}"
        message = {404: f"there is no {place}", 405: f"{place}: this path has other methods"}
        response = ApiError(error.status_code, message.get(error.status_code, str(error.detail))).response
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it


def from_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    found = error.errors()
    first = next((item for item in found if item["type"] in REFUSED), found[0])
    place = ".".join(str(part) for part in first["loc"][1:])
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']} at character {place}")
    message = {"extra_forbidden": "there is no such field", "missing": "is required"}.get(first["type"], first["msg"])
    status = 400 if first["type"] in REFUSED else 422
    return ApiError(status, f"{place or 'the body'}: {message}", place.split(".")[0] or None)
