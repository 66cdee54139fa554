"""What several test files use to look at errors, and at all schemes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from edgekv import CACHES, EdgeKVError
from edgekv.kvcache import CacheSpec

SESSION_KV = {name: "steps:budget=67108864" if name == "steps" else name for name in CACHES}
"""Every scheme's name -> as ``kv`` of a session: with the budget that a scheme must be given."""
UNBOUND = [name for name in CACHES if CacheSpec.parse(name).own_budget is None]


@contextlib.contextmanager
def raises(
    kind: type[EdgeKVError], *, field: str, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[EdgeKVError]]:
    """An error of just this kind that blames the parameter ``field``; what it says is its own affair."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert caught.type is kind
    assert caught.value.field == field, caught.value
