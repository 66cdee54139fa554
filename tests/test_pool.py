"""The server's conversations: which one a request goes on with, and which requests wait."""

from __future__ import annotations

import concurrent.futures
import threading
from unittest import mock

import pytest
from helpers import text

from edgekv import Session
from edgekv.server.engine import SessionPool
from edgekv.vision.model import Prompt


def test_the_pool_keeps_within_its_bytes(demo: Session) -> None:
    each = demo.plan.cache_bytes
    pool = SessionPool(demo.fork(), 2 * each + each // 2)
    for i in range(5):
        session, new = pool.acquire([i, 1, 2])
        assert new == [i, 1, 2]
        list(session.generate(new, max_new_tokens=2))
        pool.release(session)
    assert (pool.n_sessions, pool.nbytes) == (2, 2 * each)


def test_a_session_that_fails_stays_in_the_pool(demo: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SessionPool(demo.fork(), 2 * demo.plan.cache_bytes, slots=2)
    session, new = pool.acquire(list(range(100, 150)))
    session.prefill(new)
    pool.release(session)
    beginning = list(range(100, 145))
    for method in ("align", "copy_from"):
        with monkeypatch.context() as patch:
            patch.setattr(Session, method, mock.Mock(side_effect=MemoryError))
            with pytest.raises(MemoryError):
                pool.acquire([*beginning, 7])
    sessions = [pool.acquire([*beginning, i])[0] for i in (7, 8)]
    assert (pool.n_sessions, [len(each.tokens) for each in sessions]) == (2, [45, 45])


class HeldCopy:
    """A pool with a conversation of 50 tokens, which is copied; the copy waits for `go_on`."""

    def __init__(self, demo: Session, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool = SessionPool(demo.fork(), 0, slots)
        self.source, _ = self.pool.acquire([1])
        self.source.prefill(self.source.align(self.prompt(50)))
        self.pool.release(self.source)
        self._begun, self.go_on, copy = threading.Event(), threading.Event(), Session.copy_from

        def hold(session: Session, other: Session) -> None:
            if not self._begun.is_set():
                self._begun.set()
                assert self.go_on.wait(60)
            copy(session, other)

        monkeypatch.setattr(Session, "copy_from", hold)
        self.threads = concurrent.futures.ThreadPoolExecutor(2)
        self.copied = self.threads.submit(self.pool.acquire, [*self.prompt(45), 7])
        assert self._begun.wait(60)

    def prompt(self, n: int) -> list[int]:
        return list(range(100, 100 + n))

    def __enter__(self) -> HeldCopy:
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        self.threads.shutdown()


def test_a_copy_holds_up_no_other_request(demo: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    with HeldCopy(demo, 3, monkeypatch) as held:
        other, rest = held.threads.submit(held.pool.acquire, [1, 2, 3]).result(60)
        assert not held.copied.done()
        assert rest == [1, 2, 3]
        held.pool.release(other)
        assert held.threads.submit(held.pool.borrow, None).result(60) is other
        assert not held.copied.done()
        held.go_on.set()
        copy, rest = held.copied.result(60)
        assert len({id(session) for session in (held.source, other, copy)}) == 3
        assert (copy.tokens, rest) == (held.prompt(45), [7])
        assert held.source.tokens == held.prompt(50)


@pytest.mark.parametrize(
    "case",  # slots, ids, how many of them are read already, whether the conversation itself is taken
    [
        (3, [*range(100, 150), 8], 50, True),  # goes on with it
        (3, [*range(100, 140), 8], 40, False),  # copies it as well
        (2, [1, 2, 3], 0, True),  # finds no other
    ],
)
def test_what_needs_a_conversation_that_is_copied_waits(
    demo: Session, monkeypatch: pytest.MonkeyPatch, case: tuple[int, list[int], int, bool]
) -> None:
    slots, ids, n_read, takes_source = case
    with HeldCopy(demo, slots, monkeypatch) as held:
        choosing, shared = threading.Event(), held.source.shared_prefix

        def told(prompt: Prompt) -> int:
            choosing.set()
            return shared(prompt)

        monkeypatch.setattr(held.source, "shared_prefix", told)
        later = held.threads.submit(held.pool.acquire, ids)
        assert choosing.wait(60)  # with the pool's lock, which the copy's end needs as well
        assert not concurrent.futures.wait([later], timeout=0.2).done
        held.go_on.set()
        session, rest = later.result(60)
        assert (session.tokens, rest) == (ids[:n_read], ids[n_read:])
        assert (session is held.source) == takes_source
        copy, _ = held.copied.result(60)
        assert copy.tokens == held.prompt(45)


@pytest.mark.parametrize("kv", ["h1b", "onebit"])
def test_one_clients_prompt_does_not_change_anothers_answer(demo: Session, kv: str) -> None:
    """The pool held another's prompt that begins alike, an equal one, or one with nothing in common."""
    common, asked, answers = list(range(100, 160)), [7, 8, 9], []
    for others in ([*common, *range(300, 400)], [*common, *range(500, 600)], [*common, *asked], [1, 2, 3]):
        base = demo.fork(kv=kv)
        pool = SessionPool(base, base.plan.cache_bytes)
        for ids in (others, [*common, *asked]):
            session, new = pool.acquire(ids)
            answer = text(session, new, 8)
            pool.release(session)
        answers.append((answer, [cache.extra_state().get("tau") for cache in session.caches]))
    assert all(answer == answers[0] for answer in answers)
