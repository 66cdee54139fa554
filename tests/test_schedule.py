"""Scheduling: tokens that share a pass, prompts between them, and interrupts."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import until
from slot_cases import SLOTS, at_once

from edgekv import SessionError
from edgekv.engine.scheduler import BatchScheduler, SerialScheduler, TryLock, _Request


class Slow:
    """A decoder whose passes say when they are made, end when they may, and are one at a time."""

    threads, chunk = 1, 256

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self.fails: BaseException | None = None
        self.may_end, self.n_ended = threading.Event(), 0
        self._computing = threading.Lock()
        self.may_end.set()

    def steps(self, tokens: Sequence[int], caches: Any) -> np.ndarray:
        return self.step_batch(tokens, [caches])

    def step_batch(self, tokens: Sequence[int], caches: Any) -> np.ndarray:
        assert self._computing.acquire(blocking=False)
        try:
            self.passes.append(list(tokens))
            assert self.may_end.wait(60)
            if self.fails:
                raise self.fails
            self.n_ended += 1
        finally:
            self._computing.release()
        return np.repeat(np.float32(tokens)[:, None], 2, 1)


@pytest.fixture
def decoder() -> Slow:
    return Slow()


@pytest.fixture
def schedule() -> BatchScheduler:
    return BatchScheduler(1)


def test_of_many_threads_one_holds_the_lock() -> None:
    lock, refused = TryLock(), list[SessionError]()

    def take() -> bool:
        try:
            with lock.hold(SessionError("taken")):
                until(lambda: len(refused) == 15)
                return True
        except SessionError as error:
            refused.append(error)
            return False

    assert sorted(at_once([take] * 16)) == [False] * 15 + [True]
    assert not lock.holders


def n_waiting(schedule: BatchScheduler) -> int:
    """Returns how many tokens wait for a pass, which no caller is told."""
    return len(schedule._waiting)


def test_texts_share_passes(decoder: Slow, schedule: BatchScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass has a token of every text that goes on."""
    monkeypatch.setattr("edgekv.engine.scheduler.MAX_WAIT_S", 60)

    def write(first: int) -> None:
        for token in range(first, first + 8):
            np.testing.assert_array_equal(schedule.steps(decoder, [token], ())[0], [token, token])
        schedule.finish()

    with concurrent.futures.ThreadPoolExecutor(SLOTS) as threads, schedule.exclusive():
        texts = [threads.submit(write, 100 * i) for i in range(SLOTS)]
        until(lambda: n_waiting(schedule) == SLOTS)
    assert [text.result(60) for text in texts] == [None] * SLOTS
    assert [len(tokens) for tokens in decoder.passes] == [SLOTS] * 8


def test_a_prompt_lets_tokens_go_first(decoder: Slow, schedule: BatchScheduler) -> None:
    """A token that was asked for while a prompt is read gets its logits at the next pause."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread, schedule.exclusive() as pause:
        asked = thread.submit(schedule.steps, decoder, [7], ())
        while not decoder.passes:
            pause()
        assert decoder.passes == [[7]]
        np.testing.assert_array_equal(asked.result(60)[0], [7, 7])


@pytest.mark.parametrize("n", [1, 2])
def test_a_pause_is_one_pass(n: int, decoder: Slow, schedule: BatchScheduler) -> None:
    """Texts ask for their next token as soon as they have one, and keep no prompt out."""
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            schedule.steps(decoder, [1], ())[0]

    with concurrent.futures.ThreadPoolExecutor(n) as threads, contextlib.ExitStack() as at_the_end:
        at_the_end.callback(ended.set)
        for _ in range(n):
            threads.submit(write)
        for _ in range(20):
            with schedule.exclusive() as pause:
                passes = [len(decoder.passes)]
                while passes[-1] <= passes[0]:
                    pause()
                    passes.append(len(decoder.passes))
                assert max(np.diff(passes)) == 1


def test_who_does_not_come_is_not_waited_for(decoder: Slow, schedule: BatchScheduler) -> None:
    """A text whose reader went away without a word holds nobody up for more than a moment."""
    threading.Thread(target=schedule.steps, args=(decoder, [1], ())).start()
    for token in (2, 3):
        np.testing.assert_array_equal(schedule.steps(decoder, [token], ())[0], [token, token])
    assert sorted(itertools.chain.from_iterable(decoder.passes)) == [1, 2, 3]


def test_within_its_own_turn_a_thread_does_not_wait_for_itself(decoder: Slow) -> None:
    for schedule in (BatchScheduler(1), SerialScheduler(1)):
        with schedule.exclusive(), pytest.raises(SessionError):
            schedule.steps(decoder, [1], ())


def test_a_failed_pass_is_told_to_all(decoder: Slow, schedule: BatchScheduler) -> None:
    decoder.fails = MemoryError("no room")

    def fails(token: int) -> str:
        with pytest.raises(MemoryError) as caught:
            schedule.steps(decoder, [token], ())[0]
        return str(caught.value)

    assert at_once([lambda: fails(1), lambda: fails(2)]) == ["no room", "no room"]
    decoder.fails = None
    np.testing.assert_array_equal(schedule.steps(decoder, [5], ())[0], [5, 5])
    with pytest.raises(ValueError, match="too many"):
        schedule.steps(decoder, [5, 6], ())  # drafts


class InterruptedThread:
    """A thread that interrupts the main one once ``is_time``, and then lets a held-up pass end."""

    def __init__(self, is_time: Callable[[], bool], decoder: Slow | None = None) -> None:
        self._is_time, self._decoder = is_time, decoder
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        until(self._is_time)
        time.sleep(0.01)  # so that it waits
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if self._decoder is not None:
            time.sleep(0.05)
            self._decoder.may_end.set()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()


def test_an_interrupted_token_is_not_computed(decoder: Slow, schedule: BatchScheduler) -> None:
    """The token waits while another thread reads a prompt."""
    reading, read = threading.Event(), threading.Event()

    def prompt() -> None:
        with schedule.exclusive():
            reading.set()
            assert read.wait(60)

    interrupted = InterruptedThread(lambda: n_waiting(schedule) == 1)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(prompt)
        assert reading.wait(60)
        with pytest.raises(KeyboardInterrupt), interrupted:
            schedule.steps(decoder, [1], ())[0]
        read.set()
    np.testing.assert_array_equal(schedule.steps(decoder, [2], ())[0], [2, 2])
    assert decoder.passes == [[2]]


def test_a_prompt_goes_on_where_the_token_that_it_let_go_first_is_withdrawn(schedule: BatchScheduler) -> None:
    request = _Request(Slow(), 1, ())  # type: ignore[arg-type]

    def prompt() -> None:
        with schedule.exclusive() as pause:
            schedule._waiting.append(request)
            pause()

    thread = threading.Thread(target=prompt, daemon=True)
    thread.start()
    until(lambda: schedule._decode_allowed)
    schedule._leave(request)
    until(lambda: not thread.is_alive())


def test_an_interrupted_prompt_keeps_nobody_out(decoder: Slow, schedule: BatchScheduler) -> None:
    """The prompt waits for its turn while a token is computed."""
    decoder.may_end.clear()
    thread = threading.Thread(target=schedule.steps, args=(decoder, [1], ()))
    thread.start()
    until(lambda: bool(decoder.passes))
    with pytest.raises(KeyboardInterrupt), InterruptedThread(lambda: schedule._in_prefill, decoder):
        schedule.exclusive().__enter__()
    thread.join()
    np.testing.assert_array_equal(schedule.steps(decoder, [2], ())[0], [2, 2])


@pytest.mark.parametrize("computes", [True, False])
def test_an_interrupt_is_one_threads(
    decoder: Slow, schedule: BatchScheduler, computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a pass that this thread computes the others have no token; one that another computes goes on.

    While it does, it writes into the caches of the thread that was interrupted, which waits for its end.
    """
    monkeypatch.setattr("edgekv.engine.scheduler.MAX_WAIT_S", 60)

    def ask(token: int) -> Any:
        return schedule.steps(decoder, [token], ())[0]

    def last(token: int) -> Any:
        """A token of whoever is waited for, who then computes."""
        until(lambda: n_waiting(schedule) == 1)
        return ask(token)

    mine, the_others = (last, ask) if computes else (ask, last)

    def step() -> None:
        try:
            mine(2)
        finally:
            assert decoder.n_ended == 2 + (not computes)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(ask, 5).result(60)
        other = pool.submit(last, 6)
        ask(7)  # from here on each waits for the other
        other.result(60)
        decoder.may_end.clear()
        other = pool.submit(the_others, 1)
        with pytest.raises(KeyboardInterrupt), InterruptedThread(lambda: len(decoder.passes) == 3, decoder):
            step()
        if computes:
            with pytest.raises(SessionError, match="interrupted"):
                other.result(60)
        else:
            np.testing.assert_array_equal(other.result(60), [1, 1])
        assert decoder.passes == [[5], [7, 6], [1, 2] if computes else [2, 1]]
        decoder.may_end.set()
        monkeypatch.undo()
        np.testing.assert_array_equal(schedule.steps(decoder, [3], ())[0], [3, 3])
