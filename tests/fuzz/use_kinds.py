"""Kinds of input that a client, a program or a model gives: requests, schemas, templates, arguments, answers."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import numpy as np

from edgekv import EdgeKVError, SamplingParams, Session, child
from edgekv.engine.chat import Chat
from edgekv.engine.grammar import Grammar, JsonSchema
from edgekv.engine.loading import Options
from edgekv.kvcache import CacheSpec, schemes
from edgekv.server.answers import AnswerParser
from edgekv.server.prompts import TOOL_FORMATS, RequestEncoder, tools_grammar
from edgekv.server.requests import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Request,
    listed,
    parse_json,
    read,
)
from edgekv.text.template import ChatTemplate

from .material import CTX, Material
from .mutate import ODD, as_json, damaged, kind, mutated

SNIPPETS = (
    "{{ messages[0].content }}",
    "{% for m in messages %}{{ m.role }}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ messages * 10**9 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    "{{ 'a'.ljust(10**11) }}",
    "{{ 'a' | center(10**11) }}",
    "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "{{ lipsum(9**9) }}",
    "{{ cycler | list }}",
    "{{ [].__class__ }}",
    "{% set x = namespace(y=1) %}{% set x.y = x %}{{ x.y.y }}",
    "{{ messages | tojson(indent=10**10) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 9**(9**9) }}",
    "{{ raise_exception(messages) }}",
    "{{ strftime_now('%' * 1000) }}",
    "{% generation %}x{% endgeneration %}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{{ messages | batch(10**9, 0) | list }}",
    "{{ undefined.x.y }}",
    "{% if true %}",
    "{% else %}",
    "{{",
    "(" * 300,
)


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
    followed(m, mutated(SCHEMA, rng) or {})


def followed(m: Material, asked: Any) -> None:
    """A few tokens of a text that follows the schema."""
    vocabulary = m.tokenizer.vocab_size
    constraint = JsonSchema(asked, m.tokenizer, vocabulary)
    for _ in range(3):
        allowed = constraint.allowed(np.zeros(vocabulary, np.float32))
        if constraint.accept(int(allowed.argmax())):
            break


@kind
def deep_schema(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Schemas that nest, refer to themselves and each other, or double, as far as a request's bytes go."""
    n = rng.choice((2, 10, 30, 100, 1000, 3000))
    inner: Any = rng.choice(({"type": "integer"}, {}, True, {"type": "string", "pattern": "^(a|b){1,50}$"}))
    key = rng.choice(("properties", "items", "allOf", "anyOf", "oneOf", "not", "additionalProperties"))

    def within(part: Any, times: int = 1) -> Any:
        if key in ("allOf", "anyOf", "oneOf"):
            return {key: [part] * times}
        if key == "properties":
            return {
                "type": "object",
                key: dict.fromkeys([f"k{i}" for i in range(times)], part),
                "required": ["k0"],
            }
        return {"type": "array" if key == "items" else "object", key: part}

    what, times = rng.randrange(4), rng.choice((1, 1, 2, 3))
    if what == 0:  # depth
        for _ in range(n):
            inner = within(inner)
        asked = inner
    elif what == 1:  # a chain of references, each some times in the next
        last = rng.choice((inner, {"$ref": "#/$defs/d0"}))
        beside = rng.choice(({}, {"$ref": f"#/$defs/d{n}"}))
        parts = {f"d{i}": within({"$ref": f"#/$defs/d{i + 1}"}, times) | beside for i in range(n)}
        asked = {"$ref": "#/$defs/d0", "$defs": parts | {f"d{n}": last}}
    elif what == 2:  # many at one level
        asked = within(inner, 10 * n) if rng.random() < 0.5 else {"enum": [f"v{i}" * 5 for i in range(10 * n)]}
    else:  # numbers that are expanded
        bounds = {"minItems": n, "maxItems": n * n, "minLength": n, "maxLength": n**3, "minProperties": n}
        asked = within({"type": rng.choice(("array", "string", "object")), **bounds, "pattern": f"a{{{n}}}"})
    followed(m, mutated(asked, rng) if n <= 100 and rng.random() < 0.3 else asked)


REQUEST: dict[str, Any] = {
    "model": "m",
    "temperature": 0.5,
    "top_p": 1,
    "top_k": 3,
    "seed": 1,
    "stop": ["x"],
    "max_tokens": 3,
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
    "logit_bias": {"5": 1},
    "presence_penalty": 1,
    "n": 1,
}
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
        "chat": (CHAT, lambda body: read(body, ChatRequest)),
        "completion": (
            {**REQUEST, "prompt": [1, 2], "logprobs": 2},
            lambda body: read(body, CompletionRequest),
        ),
        "embeddings": (EMBEDDINGS, lambda body: listed(read(body, EmbeddingRequest).input, "input")),
    }
    body, asked = kinds[rng.choice(sorted(kinds))]
    ask = asked(parse_json(as_json(mutated(body, rng), rng)))
    if isinstance(ask, Request):
        prompts = RequestEncoder(ChatTemplate.plain(m.tokenizer), m.tokenizer, 256, m.tokenizer.vocab_size)
        prompts.encode(ask)
        if ask.tools_allowed is not None and ask.tools_allowed.callable:
            Grammar(
                tools_grammar(ask.tools_allowed, prompts.form, {}, ask.schema), m.tokenizer, m.tokenizer.vocab_size
            )


@kind
def answer(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """An answer of a model gone astray, in pieces of any length."""
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
        "nan",
        "inf",
        "-inf",
        "-0.0",
        "0.5",
        "1e-9",
        "1.5",
        "1e300",
        "true",
        "x",
        "",
        " 1",
        "1_0",
        "0x10",
        "\x1b[2J",
    ),
)


@kind
def options(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """A scheme with odd values of its options: refused, or it holds a text."""
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


SURROGATE = tuple(value for value in ODD if value != 10**30 and value != 10**400)
ARGUMENTS = (
    *SURROGATE,
    *(b"x", np.int64(2), np.float32(1.5), np.bool_(True), np.array([1, 2]), np.array([]), np.zeros((2, 2))),
    *([1.5], ["a", 1], [True], [-1], [1 << 40], (1, 2), {1: 2}, {"x"}, range(3), 2.0, 3, 5, object(), ...),
    *("demo", "dense", "onebit", "numpy", "\0", [None], [[1]], [b"x"], pathlib.Path("x"), lambda: 1, Session),
)
RIGHT: dict[str, tuple[Any, ...]] = {
    "prompt": ([1, 2, 3], "Once upon", [np.int64(1), 2]),
    "text": ("Once", [1, 2]),
    "max_new_tokens": (3, np.int32(3)),
    "temperature": (1.0, np.float32(0.5)),
    "seed": (1, np.int64(1)),
    "stop": (["x"], ("a", "b"), ()),
    "n_tokens": (1, np.int64(2), 0),
    "kv": ("dense", "onebit", None),
    "ctx": (64, np.int64(64), None),
    "images": ((),),
    "name": (None,),
    "path": ("saved", pathlib.Path("saved")),
    "compress": (False, True),
    "system": ("Be brief.", None, ""),
}
NOT_ODD = {"progress", "constraint", "self", "other", "changes", "options"}  # what only a program can get wrong
SESSION_CALLS = (
    "generate",
    "prefill",
    "logits",
    "embed",
    "encode",
    "prompt",
    "rewind",
    "align",
    "fork",
    "use_lora",
)
CHAT_CALLS = ("ask", "retry", "set_system", "clear")


@kind
def arguments(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Arguments of wrong types and values: one that is refused has changed nothing, and the session goes on."""
    what = rng.randrange(8)
    session = m.talking
    if what == 0:
        declared = rng.choice((SamplingParams, Options))
        names = [field.name for field in dataclasses.fields(declared)]
        given = {name: rng.choice(ARGUMENTS) for name in rng.sample(names, rng.choice((1, 1, 2)))}
        if declared is SamplingParams or rng.random() < 0.9:
            declared(**given)
        else:
            Session.load(m.talker, **given).close()
        return
    session.reset()
    if what < 5:
        session.prefill([1, 2, 3])
        target: Any = session
        name = rng.choice(SESSION_CALLS)
    else:
        system = rng.choice((None, "x", *ARGUMENTS)) if what == 5 else "Be brief."
        target = Chat(session, m.template, system)
        if what == 7:
            list(target.ask("Who?", max_new_tokens=2))
        name = rng.choice(CHAT_CALLS)
    before, n_cached = list(session.tokens), session._state.n_cached
    messages = [dict(message) for message in target.messages] if isinstance(target, Chat) else []
    try:
        called(getattr(target, name), rng)
    except EdgeKVError:
        assert (session.tokens, session._state.n_cached) == (before, n_cached), (name, session.tokens, before)
        assert not isinstance(target, Chat) or target.messages == messages
        raise
    finally:
        session.reset()
        assert len(list(session.generate([1, 2, 3], max_new_tokens=2, stop=["never"], temperature=0.0))) == 2


def called(method: Callable[..., Any], rng: Random) -> None:
    """Called with right values of what it needs, and one or two odd ones."""
    parameters = inspect.signature(method).parameters.values()
    asked = [each for each in parameters if each.name not in NOT_ODD]
    given = {each.name: rng.choice(RIGHT[each.name]) for each in asked if each.default is each.empty}
    given |= {"max_new_tokens": 3} if any(each.name == "max_new_tokens" for each in asked) else {}
    for each in rng.sample(asked, min(len(asked), rng.choice((1, 1, 2)))):
        given[each.name] = rng.choice((*RIGHT.get(each.name, ()), *ARGUMENTS))
    result = method(**given)
    if inspect.isgenerator(result):
        for _, _ in zip(range(40), result, strict=False):
            pass
        result.close()
    elif isinstance(result, Session):
        result.close()
