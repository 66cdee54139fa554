"""Kinds of damaged input from a client, a program or a model: requests, schemas, templates, options, answers."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import numpy as np

from edgekv import child
from edgekv.engine.grammar import Grammar, JsonSchema
from edgekv.engine.tools import TOOL_FORMATS, AnswerParser, tools_grammar
from edgekv.kvcache import CacheSpec, schemes
from edgekv.server.prompts import RequestEncoder
from edgekv.server.requests import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Request,
    parse_json,
    parse_request,
    prompt_list,
)
from edgekv.text.template import ChatTemplate

from .material import CTX, Material
from .mutate import as_json, damaged, kind, mutated

SNIPPETS = (
    "{{ messages[0].content }}", "{% for m in messages %}{{ m.role }}{% endfor %}", "{{ 'x' * 10**10 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    "{{ 'a'.ljust(10**11) }}", "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}", "{{ lipsum(9**9) }}",
    "{{ [].__class__ }}", "{% set x = namespace(y=1) %}{% set x.y = x %}{{ x.y.y }}",
    "{{ messages | tojson(indent=10**10) }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 9**(9**9) }}", "{{ raise_exception(messages) }}", "{{ strftime_now('%' * 1000) }}",
    "{% generation %}x{% endgeneration %}", "{% include 'x' %}", "{{ messages | batch(10**9, 0) | list }}",
    "{{ undefined.x.y }}", "{% if true %}", "{% else %}", "{{", "(" * 300,
)  # fmt: skip


@kind
def template(m: Material, folder: pathlib.Path, rng: Random) -> None:
    source = "".join(rng.choice(SNIPPETS) for _ in range(rng.randrange(1, 5)))
    if rng.random() < 0.5:
        source = damaged(source.encode(), rng).decode(errors="replace")
    messages = mutated([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], rng)
    with mock.patch.object(child, "SECONDS", 2.0):  # a case may take 10
        ChatTemplate(source, m.tokenizer).render(messages if isinstance(messages, list) else [])


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^[a-z]{1,5}$", "maxLength": 10},
        "b": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1, "maxItems": 3},
        "c": {"anyOf": [{"enum": ["x", 1]}, {"type": "number", "minimum": 0, "multipleOf": 0.5}]},
    },
    "required": ["a"],
    "$defs": {"n": {"type": "integer", "maximum": 100}},
}


@kind
def schema(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Generates a few tokens of a text that follows a damaged schema."""
    vocabulary = m.tokenizer.vocab_size
    constraint = JsonSchema(mutated(SCHEMA, rng) or {}, m.tokenizer, vocabulary)
    for _ in range(3):
        allowed = constraint.allowed(np.zeros(vocabulary, np.float32))
        if constraint.accept(int(allowed.argmax())):
            break


REQUEST: dict[str, Any] = {
    "model": "m", "temperature": 0.5, "top_p": 1, "top_k": 3, "seed": 1, "stop": ["x"], "max_tokens": 3,
    "stream": True, "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
    "logit_bias": {"5": 1}, "presence_penalty": 1, "n": 1,
}  # fmt: skip
CHAT: dict[str, Any] = {
    **REQUEST,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"b": 1}'}}]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "logprobs": True,
    "top_logprobs": 2,
}
EMBEDDINGS: dict[str, Any] = {"model": "m", "input": ["x", "y"], "encoding_format": "base64", "dimensions": 3}


@kind
def request(m: Material, folder: pathlib.Path, rng: Random) -> None:
    kinds: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
        "chat": (CHAT, lambda body: parse_request(body, ChatRequest)),
        "completion": (
            {**REQUEST, "prompt": [1, 2], "logprobs": 2},
            lambda body: parse_request(body, CompletionRequest),
        ),
        "embeddings": (EMBEDDINGS, lambda body: prompt_list(parse_request(body, EmbeddingRequest).input, "input")),
    }
    body, asked = kinds[rng.choice(sorted(kinds))]
    ask = asked(parse_json(as_json(mutated(body, rng), rng)))
    if isinstance(ask, Request):
        prompts = RequestEncoder(ChatTemplate.plain(m.tokenizer), m.tokenizer, 256, m.tokenizer.vocab_size)
        prompts.encode(ask)
        if ask.tools_allowed is not None and ask.tools_allowed.callable:
            grammar = tools_grammar(ask.tools_allowed, prompts.form, {}, ask.schema)
            Grammar(grammar, m.tokenizer, m.tokenizer.vocab_size)


@kind
def answer(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Reads an answer of a model gone astray, in pieces of any length."""
    text = damaged(ANSWER.encode(), rng, len(ANSWER)).decode(errors="replace")
    reader = AnswerParser(thinks=rng.random() < 0.3, form=rng.choice(list(TOOL_FORMATS.values())))
    while text:
        n = rng.randint(1, 9)
        reader.push(text[:n])
        text = text[n:]
    reader.end()


ANSWER = """<think>
Which one?</think>

See: <tool_call>
{"name": "f", "arguments": {"a": "}\\"", "b": [1, {"c": null}]}}
</tool_call>
[TOOL_CALLS][{"name": "f", "arguments": {}}, {"arguments": {}, "name": "g"}]"""


# Of a program

VALUES = (
    *("-1", "0", "1", "2", "3", "7", "16", "64", "100", "319", "1000000000", str(1 << 40), str(1 << 63), "1" * 30),
    *(
        "nan", "inf", "-inf", "-0.0", "0.5", "1e-9", "1.5", "1e300", "true", "x", "", " 1", "1_0", "0x10",
        "\x1b[2J",
    ),
)  # fmt: skip


@kind
def options(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Gives a scheme odd values of its options: they are refused, or it holds a text."""
    name = rng.choice(list(schemes()))
    fields = dataclasses.fields(schemes()[name].Config)
    words = [f"v{value}" for value in ("min", "max", "mad", "minmax", "layer", "head", "token")]
    chosen = rng.sample(fields, min(len(fields), rng.choice((1, 1, 2, 3))))
    given = [f"{field.name}={rng.choice((*VALUES, *words, str(field.default)))}" for field in chosen]
    spec = CacheSpec.parse(f"{name}:{','.join(given)}")
    CacheSpec.parse(str(spec))
    with m.compiled.fork(kv=spec, ctx=rng.choice((1, 2, 63, 200, CTX))) as session:
        n = min(session.plan.ctx, 150)
        list(session.generate([i % 90 for i in range(n)], max_new_tokens=20, temperature=0.0))
        session.rewind(n // 2)
        session.prefill([1])
