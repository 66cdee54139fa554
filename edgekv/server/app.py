"""The HTTP side: who may ask, the endpoints, and the page."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import hmac
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from importlib import resources
from typing import Any

from prometheus_client import Counter, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edgekv.errors import EdgeKVError
from edgekv.machine import __version__
from edgekv.server.answers import (
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    EmbeddingFormat,
    EventStream,
    whole_answer,
)
from edgekv.server.engine import Channel, Engine, jobs_of
from edgekv.server.limits import BodyMemory, BodyShare, ServerLimits, read_body
from edgekv.server.requests import (
    FAILED,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    RequestError,
    bad_field,
    parse_json,
    read,
    request_error,
)

ENCODING = 2  # prompts turned into tokens at a time: long ones take a second of a core each
STOPPING_S = 0.3  # for an answer's token or layer; its thread ends with the process
OPEN_PATHS = ("/", "/health")  # need no key
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models")
PAGE_SCRIPTS = ("data.js", "view.js", "main.js")


def build_app(
    engine: Engine,
    name: str,
    *,
    api_key: str | None,
    hosts: list[str] | None,
    limits: ServerLimits,
    origins: Sequence[str] = (),
) -> ASGIApp:
    """name: the model's, in answers. hosts: names by which the server may be called (None: any).

    origins: of pages elsewhere that may call it from a browser.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        engine.stop()
        await run_in_threadpool(engine.join, STOPPING_S)

    server = _Server(engine, name, limits)
    routes = [
        Route("/", server.page),
        Route("/health", server.health),
        Route("/metrics", server.metrics),
        Route("/stats", server.stats),
        Route("/props", server.props),
        Route("/v1/models", server.models),
        Route("/v1/models/{model:path}", server.model),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/completions", server.completion, methods=["POST"]),
        Route("/v1/embeddings", server.embeddings, methods=["POST"]),
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
    """In front of all endpoints: by which name the server may be called, its key, and the count of answers.

    hosts: names by which the server may be called; None: any. requests: counts by endpoint (one of ``paths``) and
    status.
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
        if self._hosts is not None and name not in self._hosts:  # a page elsewhere whose name was pointed here
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
        self._loras = tuple(engine.session.model.loras)
        self._encoders, self._bodies = asyncio.Semaphore(ENCODING), BodyMemory(limits.max_bodies)

    async def page(self, request: Request) -> Response:
        text, headers = page()
        return HTMLResponse(text, headers=headers)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self._name, "edgekv": __version__})

    async def metrics(self, request: Request) -> Response:
        text = generate_latest(self._engine.metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def stats(self, request: Request) -> Response:
        plan = self._engine.session.plan
        facts = {"model": self._name, "kv": str(plan.kv), "weights": plan.weights, "ctx": plan.ctx}
        return JSONResponse({**facts, **self._engine.metrics.as_json()})

    async def props(self, request: Request) -> Response:
        """What clients of llama.cpp's server ask for, and what this one has beside."""
        session, prompts, sampling = self._engine.session, self._engine.prompts, self._engine.sampling
        plan, tokenizer = session.plan, prompts.tokenizer
        ends = [tokenizer.piece(i) for i in tokenizer.eos_ids]
        return JSONResponse(
            {
                "default_generation_settings": {
                    "n_ctx": plan.ctx,
                    "params": {
                        "max_tokens": self._engine.max_new_tokens,
                        "temperature": sampling.temperature,
                        "top_p": sampling.top_p,
                    },
                },
                "total_slots": self._engine.slots,
                "model_alias": self._name,
                "loras": list(self._loras),
                "model": session.model.summary(),
                "chat_template": prompts.template.source,
                "chat_template_caps": {"tools": prompts.template.knows_tools},
                "bos_token": None if tokenizer.bos_id is None else tokenizer.piece(tokenizer.bos_id),
                "eos_token": ends[0] if ends else None,
                "modalities": {"vision": session.model.image_token is not None, "audio": False},
                "build_info": f"edgekv {__version__}",
                "kv": str(plan.kv),
                "weights": plan.weights,
                "ctx": plan.ctx,
                "max_request": self._limits.max_request,
            }
        )

    async def models(self, request: Request) -> Response:
        cards = [self._card(name) for name in (self._name, *self._loras)]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        asked = request.path_params["model"]
        if asked not in (self._name, *self._loras):
            raise RequestError(404, f"the model {asked[:60]!r} does not exist", "model_not_found", "model")
        return JSONResponse(self._card(asked))

    def _card(self, name: str) -> dict[str, Any]:
        of = {} if name == self._name else {"parent": self._name}
        return {"id": name, "object": "model", "created": 0, "owned_by": "edgekv", **of}

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, lambda body: read(body, ChatRequest), ChatFormat)

    async def completion(self, request: Request) -> Response:
        return await self._answer(request, lambda body: read(body, CompletionRequest), CompletionFormat)

    async def embeddings(self, request: Request) -> Response:
        def check(body: Any) -> EmbeddingRequest:
            given, size = read(body, EmbeddingRequest), self._engine.session.config.hidden_size
            if given.dimensions not in (None, size):
                raise bad_field("dimensions", given.dimensions, f"{size}, what this model has")
            return given

        return await self._answer(request, check, EmbeddingFormat)

    async def _answer(
        self, request: Request, check: Callable[[Any], Any], form: type[AnswerFormat] | type[EmbeddingFormat]
    ) -> Response:
        """Return an answer, whole or as a stream."""
        engine = self._engine

        def encode(data: bytearray) -> Any:
            given = check(parse_json(data))
            return given, engine.prompts.encode(given)

        with contextlib.ExitStack() as held:
            body = held.enter_context(contextlib.closing(BodyShare(self._bodies)))
            data = await read_body(request, self._limits, body)
            async with self._encoders:  # of bodies in threads, where they are more than their bytes
                body.parse(data)
                given, prompts = await run_in_threadpool(encode, data)
            lora = given.model if given.model in self._loras else None  # any other name is this model's
            lengths, nbytes = [len(each.ids) for each in prompts], 0
            if form is not EmbeddingFormat:
                nbytes = given.logprob_bytes(lengths, engine.session.plan.ctx, engine.max_new_tokens)
            body.hold(sum(lengths), nbytes + sum(len(file) for each in prompts for file in each.images))
            channel, answers = Channel(), form(lora or self._name, given, prompts, engine.prompts)
            engine.submit(jobs_of(channel, given, prompts, lora))
            if isinstance(answers, AnswerFormat) and given.stream:
                return EventStream(channel, answers, held.pop_all().close)
            whole = await whole_answer(request.receive, channel, answers)
            return Response(status_code=499) if whole is None else JSONResponse(whole)


async def _as_json(request: Request, error: Exception) -> Response:
    """OpenAI's error object. What is no EdgeKVError is a fault of edgekv: Starlette passes it on to the log."""
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path[:60]}: {error.detail}; ask one of {', '.join(PATHS)}"
        error = RequestError(error.status_code, message, "not_found")
    fault = RequestError(500, FAILED, "internal_error")
    refusal = request_error(error) if isinstance(error, EdgeKVError) else fault
    return JSONResponse(refusal.as_json(), refusal.status, headers=refusal.headers)


@functools.cache
def page() -> tuple[str, dict[str, str]]:
    """The page to chat on, one file that loads nothing else, and its headers.

    Its own script and style run, by their hashes, and nothing else does.
    """
    folder = resources.files("edgekv.server").joinpath("page")
    parts = {}
    for mark, names in {"STYLES": ("style.css",), "SCRIPTS": PAGE_SCRIPTS}.items():
        parts[mark] = "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)
    text = folder.joinpath("index.html").read_text(encoding="utf-8")
    hashes = {}
    for mark, part in parts.items():
        digest = base64.b64encode(hashlib.sha256(f"\n{part}\n".encode()).digest()).decode()
        text, hashes[mark] = text.replace(f"/* {mark} */", part), f"'sha256-{digest}'"
    policy = (
        f"default-src 'none'; script-src {hashes['SCRIPTS']}; style-src {hashes['STYLES']}; img-src data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
