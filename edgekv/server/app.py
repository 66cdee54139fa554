"""The HTTP side: routes, bounds on what a client may send, and streams that notice when it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edgekv.errors import EdgeKVError
from edgekv.server.body import read_json
from edgekv.server.engine import Done, Engine, Job, Piece
from edgekv.server.limits import Bodies, Limits
from edgekv.server.protocol import RequestError, parse
from edgekv.server.shapes import Shape
from edgekv.server.stream import EventStream
from edgekv.version import __version__

OPEN_PATHS = ("/", "/health")  # need no key
ENCODING = 2  # prompts turned into tokens at a time: long ones take a second of a core each


def build_app(
    engine: Engine, name: str, *, api_key: str | None, hosts: list[str] | None, limits: Limits
) -> ASGIApp:
    """name: the model's, in requests and answers. hosts: names by which it may be called (None: any)."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        await run_in_threadpool(engine.stop)

    server = _Server(engine, name, limits)
    routes = [
        Route("/", server.page),
        Route("/health", server.health),
        Route("/metrics", server.metrics),
        Route("/stats", server.stats),
        Route("/v1/models", server.models),
        Route("/v1/models/{model:path}", server.model),
        Route("/v1/chat/completions", functools.partial(server.complete, kind="chat"), methods=["POST"]),
        Route("/v1/completions", functools.partial(server.complete, kind="completion"), methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={RequestError: _as_json, HTTPException: _as_json, EdgeKVError: _as_json},
    )
    return Guard(app, engine, api_key, hosts)


class _Server:
    """The endpoints."""

    def __init__(self, engine: Engine, name: str, limits: Limits) -> None:
        self._engine, self._name, self._limits = engine, name, limits
        self._encoders, self._bodies = asyncio.Semaphore(ENCODING), Bodies(limits.max_bodies)

    async def page(self, request: Request) -> Response:
        return HTMLResponse(_page(), headers={"Content-Security-Policy": PAGE_POLICY})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self._name, "edgekv": __version__})

    async def metrics(self, request: Request) -> Response:
        return Response(self._engine.metrics.text(), media_type="text/plain; version=0.0.4")

    async def stats(self, request: Request) -> Response:
        plan = self._engine.session.plan
        facts = {"model": self._name, "kv": str(plan.kv), "weights": plan.weights, "ctx": plan.ctx}
        return JSONResponse({**facts, **self._engine.metrics.as_json()})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        asked = request.path_params["model"]
        if asked != self._name:
            raise RequestError(404, f"the model {asked[:60]!r} does not exist", "model_not_found", "model")
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {"id": self._name, "object": "model", "created": 0, "owned_by": "edgekv"}

    async def complete(self, request: Request, kind: str) -> Response:
        """An answer, whole or as a stream."""
        with self._bodies.open() as body:
            ask = parse(await read_json(request, self._limits, body), kind, self._name)
            async with self._encoders:
                ids = await run_in_threadpool(self._engine.encode, ask)
        job, shape = Job(ask, ids), Shape(kind, self._name)
        self._engine.submit(job)
        if ask.stream:
            return EventStream(job, shape, self._limits.client_timeout_s)
        return await self._whole(request, job, shape)

    async def _whole(self, request: Request, job: Job, shape: Shape) -> Response:
        gone = asyncio.create_task(_disconnected(request))
        collecting = asyncio.create_task(_collected(job))
        try:
            await asyncio.wait((gone, collecting), return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=499)  # nobody reads it
            text, done = collecting.result()
            return JSONResponse(shape.whole(text, done.reason, done.usage))
        finally:
            job.cancelled.set()
            gone.cancel()
            collecting.cancel()


async def _collected(job: Job) -> tuple[str, Done]:
    texts = []
    while True:
        event = await job.events.get()
        if isinstance(event, Piece):
            texts.append(event.text)
        elif isinstance(event, Done):
            return "".join(texts), event
        else:
            raise event


async def _disconnected(request: Request) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(0.2)


class Guard:
    """In front of everything: the name by which it is called, the key, and the count of answers."""

    def __init__(self, app: ASGIApp, engine: Engine, api_key: str | None, hosts: list[str] | None) -> None:
        self._app, self._requests, self._hosts = app, engine.metrics.requests, hosts
        self._key = None if api_key is None else api_key.encode()

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
        host = headers.get(b"host", b"").decode("latin-1").rpartition("@")[2]
        name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        if self._hosts is not None and name not in self._hosts:  # a page elsewhere whose name was pointed here
            return RequestError(403, f"this server is not called {name[:60]!r}", "forbidden_host")
        if self._key is None or scope["path"] in OPEN_PATHS:
            return None
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._key):
            return None
        return RequestError(401, "give this server's key: Authorization: Bearer KEY", "invalid_api_key")


COUNTED = ("/", "/health", "/metrics", "/stats", "/v1/models", "/v1/chat/completions", "/v1/completions")
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


@functools.cache
def _page() -> str:
    return resources.files("edgekv.server").joinpath("page.html").read_text(encoding="utf-8")


async def _as_json(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = RequestError(
            error.status_code, f"{request.method} {request.url.path[:60]}: {error.detail}", "not_found"
        )
    if not isinstance(error, RequestError):
        error = RequestError(400, str(error))
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(error.as_json(), error.status, headers=headers)
