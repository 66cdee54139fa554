"""The HTTP side: routes and endpoints."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from edgekv.errors import EdgeKVError
from edgekv.server.body import parse_json, read_body
from edgekv.server.checked_request import CheckedRequest, check_chat, check_completion
from edgekv.server.delivery import EventStream, embedding_vectors, unless_gone, whole_answer
from edgekv.server.engine import Engine
from edgekv.server.guard import Guard
from edgekv.server.jobs import Channel, EmbeddingJob, EmbeddingVector, EncodedPrompt, jobs_of
from edgekv.server.limits import BodyMemory, BodyShare, ServerLimits
from edgekv.server.page import page, page_headers
from edgekv.server.protocol import (
    FAILED,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    RequestError,
    listed,
    read,
    request_error,
)
from edgekv.server.response_builders import ChatBuilder, CompletionBuilder, ResponseBuilder
from edgekv.server.responses import ResponsesBuilder
from edgekv.server.responses_request import check_response
from edgekv.version import __version__

ENCODING = 2  # prompts turned into tokens at a time: long ones take a second of a core each
STOPPING_S = 0.3  # for an answer's token or layer; its thread ends with the process
T = TypeVar("T")


def build_app(
    engine: Engine,
    name: str,
    *,
    api_key: str | None,
    hosts: list[str] | None,
    limits: ServerLimits,
    strict_model: bool = False,
    origins: Sequence[str] = (),
) -> ASGIApp:
    """name: the model's, in answers. hosts: names by which the server may be called (None: any).

    strict_model: a request for a model of another name is refused, else answered with a warning.
    origins: of pages elsewhere that may call it from a browser.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        engine.stop()
        await run_in_threadpool(engine.join, STOPPING_S)

    server = _Server(engine, name, limits, strict_model)
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
        Route("/v1/responses", server.responses, methods=["POST"]),
        Route("/v1/embeddings", server.embeddings, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers=dict.fromkeys((RequestError, HTTPException, EdgeKVError, Exception), _as_json),
    )
    guarded = Guard(app, engine.metrics.requests, api_key, hosts)
    if not origins:
        return guarded
    return CORSMiddleware(
        guarded,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["Warning", "Retry-After"],
    )


class _Server:
    """The endpoints."""

    def __init__(self, engine: Engine, name: str, limits: ServerLimits, strict_model: bool) -> None:
        self._engine, self._name, self._limits, self._strict_model = engine, name, limits, strict_model
        self._loras = tuple(engine.session.model.loras)
        self._encoders, self._bodies = asyncio.Semaphore(ENCODING), BodyMemory(limits.max_bodies)

    async def page(self, request: Request) -> Response:
        return HTMLResponse(page(), headers=page_headers())

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self._name, "edgekv": __version__})

    async def metrics(self, request: Request) -> Response:
        return Response(self._engine.metrics.text(), media_type="text/plain; version=0.0.4")

    async def stats(self, request: Request) -> Response:
        plan = self._engine.session.plan
        facts = {"model": self._name, "kv": str(plan.kv), "weights": plan.weights, "ctx": plan.ctx}
        return JSONResponse({**facts, **self._engine.metrics.as_json()})

    async def props(self, request: Request) -> Response:
        """What clients of llama.cpp's server ask for, and what this one has beside."""
        session, prompts = self._engine.session, self._engine.prompts
        plan, tokenizer = session.plan, prompts.tokenizer
        ends = [tokenizer.piece(i) for i in tokenizer.eos_ids]
        return JSONResponse(
            {
                "default_generation_settings": {
                    "n_ctx": plan.ctx,
                    "params": {"max_tokens": self._engine.max_new_tokens, "temperature": 1.0, "top_p": 1.0},
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
        def check(body: Any) -> tuple[str, CheckedRequest]:
            given = read(body, ChatRequest)
            return given.model, check_chat(given)

        form, tokenizer = self._engine.prompts.form, self._engine.prompts.tokenizer
        return await self._answer(request, check, functools.partial(ChatBuilder, tokenizer=tokenizer, form=form))

    async def completion(self, request: Request) -> Response:
        def check(body: Any) -> tuple[str, CheckedRequest]:
            given = read(body, CompletionRequest)
            return given.model, check_completion(given)

        builder = functools.partial(CompletionBuilder, tokenizer=self._engine.prompts.tokenizer)
        return await self._answer(request, check, builder)

    async def responses(self, request: Request) -> Response:
        builder = functools.partial(ResponsesBuilder, form=self._engine.prompts.form)
        return await self._answer(request, check_response, builder)

    async def embeddings(self, request: Request) -> Response:
        def encode(body: Any) -> tuple[EmbeddingRequest, list[list[int]], str | None, dict[str, str]]:
            given, size = read(body, EmbeddingRequest), self._engine.session.config.hidden_size
            if given.dimensions not in (None, size):
                message = f"'dimensions' is {given.dimensions}; accepted: {size}, what this model has"
                raise RequestError(400, message, param="dimensions")
            ids = [self._engine.prompts.ids(text, "input") for text in listed(given.input, "input")]
            lora, headers = self._named(given.model)
            return given, ids, lora, headers

        with self._bodies.open() as body:
            given, texts, lora, headers = await self._encoded(request, body, encode)
            body.hold(sum(map(len, texts)), 0, tree=False)
            channel = Channel()
            self._engine.submit([EmbeddingJob(channel, ids, i, lora) for i, ids in enumerate(texts)])
            vectors = await unless_gone(request.receive, channel, embedding_vectors(channel, len(texts)))
        if vectors is None:
            return Response(status_code=499)
        n_tokens = sum(vector.n_tokens for vector in vectors)
        data = [
            {"object": "embedding", "index": vector.index, "embedding": _vector(vector, given.encoding_format)}
            for vector in vectors
        ]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        answer = {"object": "list", "data": data, "model": lora or self._name, "usage": usage}
        return JSONResponse(answer, headers=headers)

    async def _answer(
        self,
        request: Request,
        check: Callable[[Any], tuple[str, CheckedRequest]],
        builder: Callable[..., ResponseBuilder],
    ) -> Response:
        """An answer, whole or as a stream."""

        def encode(body: Any) -> tuple[CheckedRequest, list[EncodedPrompt], str | None, dict[str, str]]:
            model, checked = check(body)
            lora, headers = self._named(model)
            return checked.encoded(), self._engine.prompts.encode(checked), lora, headers

        with contextlib.ExitStack() as held:
            body = held.enter_context(self._bodies.open())
            checked, prompts, lora, headers = await self._encoded(request, body, encode)
            lengths, engine = [len(each.ids) for each in prompts], self._engine
            nbytes = sum(len(file) for each in prompts for file in each.images)
            nbytes += checked.logprob_bytes(lengths, engine.session.plan.ctx, engine.max_new_tokens)
            body.hold(sum(lengths), nbytes, tree=checked.keeps_objects)
            channel, answers = Channel(), builder(lora or self._name, checked, prompts)
            self._engine.submit(jobs_of(channel, checked, prompts, lora))
            if checked.stream:
                return EventStream(channel, answers, self._limits.client_timeout_s, headers, held.pop_all().close)
            whole = await unless_gone(request.receive, channel, whole_answer(channel, answers))
            return Response(status_code=499) if whole is None else JSONResponse(whole, headers=headers)

    async def _encoded(self, request: Request, body: BodyShare, encode: Callable[[Any], T]) -> T:
        """What ``encode`` makes of the body, in a thread; ENCODING bodies at a time are more than their bytes."""
        data = await read_body(request, self._limits, body)
        async with self._encoders:
            body.parse(data)
            return await run_in_threadpool(lambda: encode(parse_json(data)))

    def _named(self, model: str) -> tuple[str | None, dict[str, str]]:
        """The LoRA that a request's model names, and headers of the answer.

        Raises RequestError where it must be a true name.
        """
        if model in self._loras:
            return model, {}
        if model == self._name:
            return None, {}
        if self._strict_model:
            names = ", ".join(repr(name) for name in (self._name, *self._loras))
            message = f"the model {model[:60]!r} does not exist; this server has {names}"
            raise RequestError(404, message, "model_not_found", "model")
        shown = model[:60].encode("ascii", "replace").decode().translate(_UNQUOTABLE)
        own = self._name.encode("ascii", "replace").decode().translate(_UNQUOTABLE)
        return None, {"Warning": f'299 edgekv "there is no model {shown}: {own} answers"'}


_UNQUOTABLE = dict.fromkeys((*range(32), ord('"'), ord("\\"), 127), "?")


def _vector(vector: EmbeddingVector, form: str) -> Any:
    if form == "float":
        return vector.values
    return base64.b64encode(np.asarray(vector.values, "<f4").tobytes()).decode()


async def _as_json(request: Request, error: Exception) -> Response:
    """OpenAI's error object. What is no EdgeKVError is a fault of edgekv: Starlette passes it on to the log."""
    if isinstance(error, HTTPException):
        error = RequestError(
            error.status_code, f"{request.method} {request.url.path[:60]}: {error.detail}", "not_found"
        )
    told = request_error(error) if isinstance(error, EdgeKVError) else RequestError(500, FAILED, "internal_error")
    return JSONResponse(told.as_json(), told.status, headers=told.headers())
