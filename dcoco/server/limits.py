"""What is refused before a body is read: a wrong key, and more bytes than a call may have."""

import hmac
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from dcoco.server.errors import ApiError

DRAINED = 16  # so many times the limit of a body that is too large is still read, so that its sender reads the answer


class Limits:
    """ASGI middleware: `api_key` (if any) opens /v1, and no body is longer than `max_body_bytes`."""

    def __init__(self, app: Any, api_key: str | None, max_body_bytes: int):
        self.app = app
        self.api_key = api_key
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._check_key(scope["path"], headers)
        length = headers.get("content-length", "")
        if refusal is None and length.isdecimal() and int(length) > self.max_body_bytes:
            refusal = ApiError(413, self._too_large)
        if refusal is not None:
            await self._drain(receive)
            await refusal.response(scope, receive, send)
            return
        size = 0

        async def counted() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.max_body_bytes:
                await self._drain(receive, message)
                raise HTTPException(413, self._too_large)  # the only kind that FastAPI lets through
            return message

        await self.app(scope, counted, send)

    def _check_key(self, path: str, headers: Headers) -> ApiError | None:
        if self.api_key is None or not path.startswith("/v1/"):
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self.api_key.encode()):
            return None
        problem = "this key is not the server's" if key else "a key is needed: Authorization: Bearer KEY"
        return ApiError(401, problem, code="invalid_api_key")

    @property
    def _too_large(self) -> str:
        return f"the body is larger than the {self.max_body_bytes} bytes that a call may have"

    async def _drain(self, receive: Any, message: Any = None) -> None:
        """Read what comes after `message`, within reason."""
        size = 0
        while message is None or (message.get("more_body", False) and size <= DRAINED * self.max_body_bytes):
            message = await receive()
            size += len(message.get("body", b""))
