"""What many test files use: the registered schemes, errors that name their field, views into a session."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from edgekv import EdgeKVError, Session
from edgekv.engine.runner import Spans
from edgekv.kvcache import schemes
from edgekv.types import F32

Cli = Callable[..., Any]
"""The fixture `cli`: arguments of a command, and its status if it is not 0, to what it printed."""

HAS_PAPERS = importlib.util.find_spec("edgekv.papers") is not None
needs_papers = pytest.mark.skipif(not HAS_PAPERS, reason="needs the papers' schemes")
SCHEMES = schemes()
"""All that are installed, the papers' too where there are any."""

SESSION_KV = [
    name
    for name, scheme in SCHEMES.items()
    if "papers" not in scheme.__module__.split(".") or name in ("h1b", "h2o")
]
"""Every core scheme's name, and two of papers."""


def n_cached(session: Session) -> int:
    """Returns how many tokens a session's caches hold, drafts with them."""
    return session.caches[0].n_seen


def text(session: Session, prompt: Any, n: int = 12, **options: Any) -> list[int]:
    """Returns the tokens of an answer, greedy unless ``sampling`` is given."""
    options = options if "sampling" in options else {"temperature": 0.0, **options}
    return [step.token for step in session.generate(prompt, max_new_tokens=n, **options)]


def divergence(exact: F32, other: F32) -> float:
    """Returns the mean KL of two sets of logits (rows, vocabulary)."""
    p, q = (x - np.log(np.exp(x.astype(np.float64)).sum(1, keepdims=True)) for x in (exact, other))
    return float((np.exp(p) * (p - q)).sum(1).mean())


def text_of(steps: Iterable[Any]) -> str:
    return "".join(step.text for step in steps)


def until(is_time: Callable[[], bool]) -> None:
    """Waits for what a busy machine may take long for."""
    end = time.monotonic() + 60
    while not is_time():
        assert time.monotonic() < end
        time.sleep(0.001)


def embedding_spans(session: Session) -> Spans:
    """Returns the spans of a session's positions that hold embeddings in place of tokens."""
    return session._state.spans


@contextlib.contextmanager
def raises(
    kind: type[EdgeKVError], *parts: object, field: str | None = None, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[EdgeKVError]]:
    """Asserts that the block raises just this kind of error, or any for EdgeKVError.

    It is one line that has these parts, and blames the parameter ``field`` if one is given.
    """
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert kind in (caught.type, EdgeKVError)
    assert field in (caught.value.field, None), caught.value
    assert "\n" not in str(caught.value)
    for part in parts:
        assert str(part) in str(caught.value)
