"""In front of all endpoints: by which name the server may be called, its key, and the count of answers."""

from __future__ import annotations

import contextlib
import hmac
from typing import Any

from prometheus_client import Counter
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from edgekv.server.protocol import RequestError

OPEN_PATHS = ("/", "/health")  # need no key
COUNTED = (
    "/",
    "/health",
    "/metrics",
    "/stats",
    "/props",
    "/v1/models",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
)


class Guard:
    """hosts: names by which the server may be called; None: any. requests: counts by endpoint and status."""

    def __init__(self, app: ASGIApp, requests: Counter, api_key: str | None, hosts: list[str] | None) -> None:
        self._app, self._requests = app, requests
        self._hosts = None if hosts is None else [host.lower() for host in hosts]
        self._key = None if api_key is None else api_key.encode(errors="surrogateescape")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                known = scope["path"] if scope["path"] in COUNTED else "other"
                self._requests.labels(known, message["status"]).inc()
            await send(message)

        refusal = self._refusal(scope)
        answer = self._app if refusal is None else JSONResponse(refusal.as_json(), refusal.status)
        with contextlib.suppress(ClientDisconnect):
            await answer(scope, receive, counted)

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").rpartition("@")[2].lower()
        name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        if self._hosts is not None and name not in self._hosts:  # a page elsewhere whose name was pointed here
            return RequestError(403, f"this server is not called {name[:60]!r}", "forbidden_host")
        if self._key is None or scope["path"] in OPEN_PATHS:
            return None
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._key):
            return None
        return RequestError(401, "give this server's key: Authorization: Bearer KEY", "invalid_api_key")
