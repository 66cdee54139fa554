"""Arguments of the public API: a wrong one is an EdgeKVError before anything has changed."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import n_cached, raises, text, text_of

from edgekv import Chat, EdgeKVError, Embeddings, Sampler, SamplingParams, Session
from edgekv.engine.loading import Options
from edgekv.text.template import ChatTemplate

HUGE = 10**5000
NO_TEXT: tuple[Any, ...] = (None, 5, 1.5, b"x", object())
NO_COUNT: tuple[Any, ...] = ("2", 2.0, math.nan, math.inf, -1, True, np.float32(2), np.bool_(True), [2], HUGE, 1j)
NO_NUMBER: tuple[Any, ...] = ("1", math.nan, -math.inf, -1, True, np.bool_(True), [1], 10**400, np.float64("nan"))
NO_LIST: tuple[Any, ...] = (5, [5], [None], {"a"}, b"x", iter(()))
NO_PROMPT: tuple[Any, ...] = (
    None, 5, 2.5, b"x", [1.0], ["a"], [None], [True], [[1]], [-1], [10**9], [HUGE], {1}, np.ones(2),
    np.ones((1, 2), int), "\ud800",
    [1, Embeddings(np.zeros((1, 3), np.float32))], [Embeddings(np.full((1, 64), np.nan, np.float32))],
)  # fmt: skip
NO_PATH: tuple[Any, ...] = (None, 5, b"x", "", "a\0b", "no/such/folder/file")
SHARED: dict[str, tuple[Any, ...]] = {
    "max_new_tokens": (*NO_COUNT, 0, None),
    "sampling": (5, "greedy", {"temperature": 1}, SamplingParams, np.zeros((2, 2))),
    "stop": (*NO_LIST, "", ["a", ""], None),
    "progress": (5, "x", True),
}
SETTINGS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("temperature", "repetition_penalty"), (*NO_NUMBER, None, 1e301)),
    **dict.fromkeys(("top_p", "min_p"), (*NO_NUMBER, None, 1.1)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (*NO_NUMBER[:3], True, None, 2.1)),
    **dict.fromkeys(("top_k", "repetition_window", "seed"), NO_COUNT),
    "logit_bias": (5, [5], {"x": 1}, {1: "x"}, {1: math.nan}, {1: True}, {-1: 1}, {1.5: 1}, {1: 101}, {HUGE: 1}),
}
OPTIONS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("kv_budget", "threads", "slots"), (*NO_COUNT, 0)),
    "ctx": ("0", "2.5k", "k", "", *NO_COUNT[1:], 0),
    "kv": (5, b"dense", True, "", "nope"),
    **dict.fromkeys(("weights", "overflow", "device", "draft"), (*NO_TEXT, "nope")),
    **dict.fromkeys(("config", "tokenizer", "adapter", "lora"), (5, b"x", True, "no/such/file", "a\0b")),
    "loras": (5, ["x"], {"a b": "x"}, {5: "x"}, {"a": 5}, {"a": "no/such/file"}, None),
}
METHODS: dict[str, dict[str, tuple[Any, ...]]] = {
    "encode": {"text": (*NO_TEXT, "\ud800")},
    "encode_prompt": {"prompt": NO_PROMPT[:9], "images": (*NO_LIST, "a.png", None)},
    "prefill": {"prompt": (*NO_PROMPT, []), "images": NO_LIST, "progress": SHARED["progress"]},
    "logits": {"prompt": (*NO_PROMPT, []), "images": NO_LIST},
    "align": {"prompt": (*NO_PROMPT, [])},
    "embed": {"text": (*NO_PROMPT, [], [1] * 1000)},
    "rewind": {"n_tokens": (*NO_COUNT, None)},
    "use_lora": {"name": (5, b"x", True, "nope")},
    "fork": {"kv": OPTIONS["kv"], "ctx": (*OPTIONS["ctx"], 1 << 40, "1k")},
    "save": {"path": NO_PATH},
    "load_state": {"path": NO_PATH},
    "copy_from": {"other": (None, 5, "x", Session)},
    "generate": {
        **SHARED,
        "prompt": NO_PROMPT,
        "images": NO_LIST,
        "temperature": NO_NUMBER,
        "seed": NO_COUNT,
        "json_schema": (5, "{}", [{}], True),
        "constraint": (5, "x", object()),
    },
}
GIVEN: dict[str, dict[str, Any]] = {
    **{name: {"prompt": [5]} for name in ("generate", "prefill", "logits")},
    **{"save": {"path": "never"}, "encode_prompt": {"prompt": "a"}},
}


def cases(table: dict[str, dict[str, tuple[Any, ...]]]) -> list[Any]:
    found = [(method, name, values) for method, given in table.items() for name, values in given.items()]
    return [pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in found]


@pytest.fixture(scope="module")
def session(stories: pathlib.Path) -> Session:
    session = Session.load(stories, ctx=64, device="numpy", weights="f32")
    session.prefill("Once upon a time")
    session.memo["kept"] = [1]
    return session


def snapshot(session: Session) -> tuple[Any, ...]:
    arrays = [array.tobytes() for cache in session.caches for array in cache.arrays.values()]
    text = list(session.tokens), n_cached(session), session.last_sampler, dict(session.memo)
    return *text, session.lora, session.nbytes, arrays


def refuses(session: Session, call: Callable[..., Any], name: str, values: tuple[Any, ...], given: Any) -> None:
    before = snapshot(session)
    for value in values:
        with raises(EdgeKVError) as caught:
            call(**{**given, name: value})
        assert len(str(caught.value)) < 6000
        assert snapshot(session) == before, value


@pytest.mark.parametrize(("method", "name", "values"), cases(METHODS))
def test_wrong_arguments_change_nothing(session: Session, method: str, name: str, values: tuple[Any, ...]) -> None:
    """Bytes of the caches and all: what follows is what would have followed."""
    refuses(session, getattr(session, method), name, values, GIVEN.get(method, {}))


OF_CHAT = SHARED | {"max_new_tokens": (*NO_COUNT, 0)}


@pytest.mark.parametrize(
    ("method", "name", "values"), cases({"ask": {**OF_CHAT, "text": NO_TEXT}, "retry": OF_CHAT})
)
def test_a_wrong_argument_of_a_chat(session: Session, method: str, name: str, values: tuple[Any, ...]) -> None:
    session = session.fork()
    chat = Chat(session, ChatTemplate.plain(session.require_tokenizer()), "Be brief.")
    list(chat.ask("Tom", max_new_tokens=2))
    refuses(session, getattr(chat, method), name, values, {"text": "Lily"} if method == "ask" else {})
    refuses(session, chat.set_system, "text", NO_TEXT, {})
    refuses(session, chat.ask, "images", (*NO_LIST, "a.png", ["a.png"]), {"text": "Lily"})


@pytest.mark.parametrize(("_", "name", "values"), cases({"params": SETTINGS}))
def test_a_wrong_setting_is_named(_: str, name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with raises(EdgeKVError, field=name):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(("_", "name", "values"), cases({"options": OPTIONS}))
def test_a_wrong_option_is_named(stories: pathlib.Path, _: str, name: str, values: tuple[Any, ...]) -> None:
    """The error has the option's name, or the file that it names."""
    for value in values:
        with pytest.raises(EdgeKVError) as caught:
            Session.load(stories, **{"device": "numpy", name: value})
        said, files = str(caught.value), value.values() if isinstance(value, dict) else [value]
        names_file = any(isinstance(file, str) and len(file) > 3 and file in said for file in files)
        assert caught.value.field == name or names_file, (value, said)


def test_what_is_no_setting_at_all(stories: pathlib.Path, session: Session) -> None:
    calls: list[tuple[Callable[..., Any], Any]] = [(Sampler, {"params": SamplingParams(), "vocab_size": -1})]
    for path in NO_PATH:
        calls += [(Session.load, {"path": path}), (Session.restore, {"path": path, "model": session})]
    for wrong in (5, "x", {"ctx": 5}):
        calls += [
            (Session.load, {"path": stories, "progress": wrong}),
            (Session.restore, {"path": "a", "model": stories, "progress": wrong}),
            (Sampler, {"params": wrong, "vocab_size": 5}),
            (Chat, {"session": wrong, "template": ChatTemplate.plain(session.require_tokenizer())}),
            (Chat, {"session": session, "template": wrong}),
        ]
    for call, given in calls:
        with pytest.raises(EdgeKVError):
            call(**given)


def test_what_is_named_wrong_is_named_in_the_error(session: Session) -> None:
    session = session.fork()
    chat = Chat(session, ChatTemplate.plain(session.require_tokenizer()), "Be brief.")
    before = snapshot(session)
    for call, name, said in (
        (lambda: session.generate("a", top_kk=3), "top_kk", "`Session.generate` .*; did you mean top_k"),
        (lambda: chat.ask("a", max_tokens=3), "max_tokens", "`Chat.ask` .*; did you mean max_new_tokens"),
        (lambda: chat.ask("a", constraint=None), "constraint", "has no argument constraint; accepted: text, "),
        (lambda: Chat(session, sistem="x"), "sistem", "`Chat` .*; did you mean system"),
        (lambda: Session.load("demo", ctxx=3), "ctxx", "did you mean ctx"),
        (lambda: session.rewind(1000), "n_tokens", f"n_tokens=1000: accepted: 0 to {len(session.tokens)}"),
        (lambda: chat.ask([{"role": "usr", "content": "a"}]), "text", "a list only for results .* has none$"),
    ):  # fmt: skip
        with raises(EdgeKVError, field=name, match=said):
            call()
    assert snapshot(session) == before
    error = EdgeKVError("full", advice="or set {overflow:slide}")
    assert (error.advice, str(error)) == ("or set overflow='slide'", "full; or set overflow='slide'")


def test_settings_by_name_are_those_of_the_parameters(session: Session) -> None:
    session = session.fork()
    chat = Chat(session, ChatTemplate.plain(session.require_tokenizer()))
    settings = {"temperature": 2.0, "top_k": 90, "top_p": 1.0, "min_p": 0.0, "seed": 4, "presence_penalty": 1.0}
    by_name = text_of(chat.ask("Tom", max_new_tokens=8, **settings))
    for how in ({"sampling": SamplingParams(**settings)}, settings):
        assert by_name == text_of(chat.retry(max_new_tokens=8, **how))
    assert by_name != text_of(chat.retry(max_new_tokens=8, **settings | {"temperature": 0.0}))


def test_numbers_of_numpy_are_numbers(session: Session) -> None:
    ids = np.asarray(session.encode("Once upon a time"))
    one, other = session.fork(ctx=np.int32(64)), session.fork()
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(9), top_p=np.float64(0.9), seed=np.uint8(3),
        logit_bias={np.int64(5): np.float32(1)},
    )  # fmt: skip
    assert {type(value) for value in params.as_dict().values()} == {int, float, dict}
    assert text(one, ids, np.int16(6), sampling=params) == text(other, list(map(int, ids)), 6, sampling=params)
    one.rewind(np.uint8(4))
    assert one.tokens == other.tokens[:4]
    assert one.align(list(ids)) == other.align(ids.tolist())
    one.memo["report"] = one.report().as_dict()
    assert type(Options(threads=np.int64(2)).threads) is int
