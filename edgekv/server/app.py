"""The HTTP application: access control, the endpoints, and the chat page."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import pathlib
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

from prometheus_client import Counter, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edgekv.checkpoint.hub import shipped_note
from edgekv.errors import EdgeKVError
from edgekv.machine import __version__
from edgekv.server.answers import ChatFormat, CompletionFormat, EmbeddingFormat, EventStream, whole_answer
from edgekv.server.engine import Channel, Engine
from edgekv.server.limits import BodyMemory, BodyShare, ServerLimits, read_body
from edgekv.server.requests import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    RequestError,
    bad_field,
    logprob_bytes,
    parse_json,
    parse_request,
    request_error,
)

MAX_ENCODING = 2  # prompts tokenized at a time: a long one takes a second of a core
STOPPING_S = 0.3  # for the threads to end; then they end with the process
PAGE = pathlib.Path(__file__).with_name("page")
PAGE_FILES = sorted(
    path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*.*") if path.suffix in (".css", ".js")
)
PAGE_PATHS = {"/": "index.html", **{f"/{name}": name for name in PAGE_FILES}}
OPEN_PATHS = {"/health", *PAGE_PATHS}  # need no key
PAGE_HEADERS = {  # only its own scripts and style run
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
ENDPOINTS: dict[str, tuple[type[Any], type[Any]]] = {
    "/v1/chat/completions": (ChatRequest, ChatFormat),
    "/v1/completions": (CompletionRequest, CompletionFormat),
    "/v1/embeddings": (EmbeddingRequest, EmbeddingFormat),
}
SERVED = f"POST {', '.join(ENDPOINTS)}; GET /v1/models, /props, /health, /metrics"


def build_app(
    engine: Engine,
    name: str,
    *,
    api_key: str | None,
    hosts: list[str] | None,
    limits: ServerLimits,
    origins: Sequence[str] = (),
) -> ASGIApp:
    """Builds the application of an engine.

    name: the model's name in answers. hosts: the accepted host names (None: any), so that no web page reaches the
    server under a name of its own. origins: the web pages elsewhere that may call it.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        engine.stop()
        await run_in_threadpool(engine.join, STOPPING_S)

    server = _Server(engine, name, limits)
    routes = [
        *(Route(path, functools.partial(page, file)) for path, file in PAGE_PATHS.items()),
        Route("/health", server.health),
        Route("/metrics", server.metrics),
        Route("/props", server.props),
        Route("/v1/models", server.models),
        Route("/v1/models/{model:path}", server.model),
        *(
            Route(path, functools.partial(server.answer, kind, form), methods=["POST"])
            for path, (kind, form) in ENDPOINTS.items()
        ),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers=dict.fromkeys((RequestError, HTTPException, EdgeKVError, Exception), _as_json),
    )
    guarded = Guard(app, engine.metrics.requests, api_key, hosts, {route.path for route in routes})
    if not origins:
        return guarded
    return CORSMiddleware(
        guarded,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["Retry-After"],
    )


class Guard:
    """The access control in front of all endpoints: host names and the API key; it also counts the answers.

    hosts: the accepted host names; None: any. requests: the counter, by endpoint (one of ``paths``) and status.
    """

    def __init__(
        self,
        app: ASGIApp,
        requests: Counter,
        api_key: str | None,
        hosts: list[str] | None,
        paths: Collection[str] = (),
    ) -> None:
        self._app, self._requests, self._paths = app, requests, paths
        self._hosts = None if hosts is None else [host.lower() for host in hosts]
        self._key = None if api_key is None else api_key.encode(errors="surrogateescape")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                known = scope["path"] if scope["path"] in self._paths else "other"
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
        if self._hosts is not None and name not in self._hosts:  # a web page whose name resolves to this machine
            return RequestError(403, f"this server is not called {name[:60]!r}", "forbidden_host")
        if self._key is None or scope["path"] in OPEN_PATHS:
            return None
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._key):
            return None
        return RequestError(401, "give this server's key: Authorization: Bearer KEY", "invalid_api_key")


class _Server:
    """The endpoints."""

    def __init__(self, engine: Engine, name: str, limits: ServerLimits) -> None:
        self._engine, self._name, self._limits = engine, name, limits
        self._plan, self._loras = engine.session.plan, tuple(engine.session.model.loras)
        self._encoders, self._bodies = asyncio.Semaphore(MAX_ENCODING), BodyMemory(limits.max_bodies)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self._name, "edgekv": __version__})

    async def metrics(self, request: Request) -> Response:
        text = generate_latest(self._engine.metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def props(self, request: Request) -> Response:
        """Returns the properties that clients of llama.cpp's server read, and those of this server."""
        session, prompts = self._engine.session, self._engine.prompts
        settings = {**self._engine.sampling.as_dict(), "max_tokens": self._engine.max_new_tokens}
        note, examples = shipped_note(session.model.path)
        return JSONResponse(
            {
                "default_generation_settings": {"n_ctx": self._plan.ctx, "params": settings},
                "total_slots": self._engine.slots,
                "model_alias": self._name,
                "loras": list(self._loras),
                "model": session.model.summary(),
                "note": note,
                "examples": examples,
                "chat_template": prompts.template.source,
                "modalities": {"vision": session.model.image_token is not None, "audio": False},
                "kv": self._plan.kv.short,
                "weights": self._plan.weights,
                "ctx": self._plan.ctx,
                "power_meter": self._engine.meter,
            }
        )

    async def models(self, request: Request) -> Response:
        cards = [self._card(name) for name in (self._name, *self._loras)]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in (names := (self._name, *self._loras)):
            message = f"the model {name[:60]!r} does not exist; here are: {', '.join(names)}"
            raise RequestError(404, message, "model_not_found", "model")
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        parent = {} if name == self._name else {"parent": self._name}
        return {"id": name, "object": "model", "created": 0, "owned_by": "edgekv", **parent}

    async def answer(self, kind: type[Any], form: type[Any], request: Request) -> Response:
        """Answers a POST request, in one piece or as a stream."""
        engine = self._engine

        def encode(data: bytearray) -> Any:
            parsed, size = parse_request(parse_json(data), kind), engine.session.config.hidden_size
            if isinstance(parsed, EmbeddingRequest) and parsed.dimensions not in (None, size):
                raise bad_field("dimensions", parsed.dimensions, f"{size}, what this model has")
            return parsed, engine.prompts.encode(parsed)

        with contextlib.ExitStack() as resources:
            body = resources.enter_context(contextlib.closing(BodyShare(self._bodies)))
            data = await read_body(request, self._limits, body)
            async with self._encoders:  # parsed bodies take more memory than their bytes
                body.parse(data)
                parsed, prompts = await run_in_threadpool(encode, data)
            lora = parsed.model if parsed.model in self._loras else None  # any other name means the model itself
            lengths = [len(prompt.ids) for prompt in prompts]
            nbytes = logprob_bytes(parsed, lengths, self._plan.ctx, engine.max_new_tokens)
            body.keep_parsed(sum(lengths), nbytes + sum(len(file) for prompt in prompts for file in prompt.images))
            channel, answers = Channel(), form(lora or self._name, parsed, prompts, engine.prompts)
            engine.submit(channel, parsed, prompts, lora)
            if parsed.stream:
                return EventStream(channel, answers, resources.pop_all().close)
            result = await whole_answer(request.receive, channel, answers)
            return Response(status_code=499) if result is None else JSONResponse(result)


async def page(file: str, request: Request) -> Response:
    """Returns a file of the chat page, which loads nothing from elsewhere. Libraries' names have versions."""
    kept = {"Cache-Control": "max-age=31536000, immutable"} if file.startswith("vendor/") else {}
    return FileResponse(PAGE / file, headers={**PAGE_HEADERS, **kept})


async def _as_json(request: Request, error: Exception) -> Response:
    """Returns OpenAI's error object. Starlette also logs exceptions that are no EdgeKVError: faults of edgekv."""
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path[:60]}: {error.detail}; here are: {SERVED}"
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        error = RequestError(error.status_code, message, code)
    refusal = request_error(error)
    return JSONResponse(refusal.as_json(), refusal.status, headers=refusal.headers)
