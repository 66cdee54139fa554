"""Helpers for several texts at once: a decoder that records its passes, and threads that begin together."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from edgekv import Session

SLOTS = 3


class Recorded:
    """The passes of a session's decoder, by the number of conversations in each."""

    def __init__(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        decoder = session._runner.decoder
        together = decoder.step_batch

        def several(tokens: Sequence[int], caches: Any) -> Any:
            self.rows.append(len(tokens))
            return together(tokens, caches)

        monkeypatch.setattr(decoder, "step_batch", several)


def at_once(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs each work in a thread of its own, begun together."""
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> Any:
        barrier.wait()
        return work()

    with concurrent.futures.ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))
