"""Kinds of input that a program gives: knobs of schemes, and arguments of sessions and chats."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from edgekv import EdgeKVError, SamplingParams, Session
from edgekv.engine.chat import Chat
from edgekv.engine.options import Options
from edgekv.kvcache import CacheSpec, schemes

from .material import CTX, Material
from .mutate import ODD

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


def knobs(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """A scheme with odd values of its knobs: refused, or it holds a text."""
    name = rng.choice(list(schemes()))
    fields = dataclasses.fields(schemes()[name].Knobs)
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
        used(getattr(target, name), rng)
    except EdgeKVError:
        assert (session.tokens, session._state.n_cached) == (before, n_cached), (name, session.tokens, before)
        assert not isinstance(target, Chat) or target.messages == messages
        raise
    finally:
        session.reset()
        assert len(list(session.generate([1, 2, 3], max_new_tokens=2, stop=["never"], temperature=0.0))) == 2


def used(method: Callable[..., Any], rng: Random) -> None:
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
