"""Whose turn it is to compute: one conversation with a decoder, or several, each in a thread of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from edgekv.decoder.decoder import Decoder
from edgekv.errors import SessionError
from edgekv.kvcache.layer_state import LayerState
from edgekv.machine import blas_threads
from edgekv.types import F32

PATIENCE_S = 0.02  # that a token waits for those of the other texts
SHARED_CHUNK = 128  # tokens of a prompt between two tokens of others
INTERRUPTED = "the thread that computed the next tokens of several texts was interrupted: go on with prompt=[]"

Pause = Callable[[], None]


class Schedule(Protocol):
    """The way to decoders of the same weights, of which one computes one thing at a time.

    threads: cores for a prompt.
    """

    threads: int

    def step(self, decoder: Decoder, token: int, caches: Sequence[LayerState]) -> F32:
        """`Decoder.step`: logits (vocab,) after one more token of a text."""
        ...

    def steps(self, decoder: Decoder, tokens: Sequence[int], caches: Sequence[LayerState]) -> F32:
        """`Decoder.steps`: logits (n, vocab) after each of a few."""
        ...

    def alone(self) -> contextlib.AbstractContextManager[Pause]:
        """For a prompt, or whatever else needs all cores; the pause lets tokens of others go first."""
        ...

    def leave(self) -> None:
        """The text of this thread has ended: no token waits for it."""
        ...


class OneAtATime:
    """Whoever calls computes, and nobody waits: a call while another one computes raises SessionError."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._lock = threading.Lock()

    def step(self, decoder: Decoder, token: int, caches: Sequence[LayerState]) -> F32:
        """See `Schedule`."""
        with self._turn(1):
            return decoder.step(token, caches)

    def steps(self, decoder: Decoder, tokens: Sequence[int], caches: Sequence[LayerState]) -> F32:
        """See `Schedule`."""
        with self._turn(1):
            return decoder.steps(tokens, caches)

    @contextlib.contextmanager
    def alone(self) -> Iterator[Pause]:
        """See `Schedule`; the pause does nothing."""
        with self._turn(self.threads):
            yield lambda: None

    def leave(self) -> None:
        """Nobody waits."""

    @contextlib.contextmanager
    def _turn(self, threads: int) -> Iterator[None]:
        if self._lock.locked():
            raise SessionError(
                "slots=1: these weights are computing for another conversation; let one wait for the other, or "
                "load with slots=2 or more, one for each thread",
                field="slots",
                value=1,
                accepted=["2 or more"],
            )
        with self._lock, blas_threads(threads):  # an interrupt before or behind it leaves nothing locked
            yield


@dataclasses.dataclass(eq=False)
class _Asked:
    """A token that waits for a pass, and what came of it."""

    decoder: Decoder
    token: int
    caches: Sequence[LayerState]
    thread: int = dataclasses.field(default_factory=threading.get_ident)
    since_s: float = dataclasses.field(default_factory=time.monotonic)
    logits: F32 | None = None
    error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self.logits is not None or self.error is not None


class Together:
    """Conversations of several threads: tokens share passes of the linear layers, prompts are read one by one.

    Only those of one decoder do: with several LoRAs beside the weights a pass is made for each in turn.

    A pass begins when every text that is being written has asked for its next token, or one has waited for
    PATIENCE_S. Whoever finds it so computes it; the others wait. A thread may be interrupted (KeyboardInterrupt)
    anywhere: it leaves neither its turn nor its token behind.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._prompt = threading.Lock()  # scratch of a prompt lives on while it pauses
        self._changed = threading.Condition()
        self._computing: int | None = None  # the thread whose turn it is
        self._has_prompt = False  # while one is read, a pass begins only where the prompt pauses for it
        self._lets_pass = False
        self._writing: set[int] = set()  # threads whose text goes on
        self._asked: list[_Asked] = []
        self._pass: list[_Asked] = []  # what is being computed

    def step(self, decoder: Decoder, token: int, caches: Sequence[LayerState]) -> F32:
        """See `Schedule`. Raises what the pass raised: then no conversation of it has its token.

        SessionError where the thread that computed the pass was interrupted; the others may ask again.
        """
        self._require_outside()
        asked = _Asked(decoder, token, caches)
        try:
            if self._begins_pass(asked):
                self._compute(self._pass)
        finally:
            _to_the_end(functools.partial(self._settle, asked))
        if asked.error is not None:
            raise asked.error
        assert asked.logits is not None
        return asked.logits

    def steps(self, decoder: Decoder, tokens: Sequence[int], caches: Sequence[LayerState]) -> F32:
        """See `Schedule`; by itself, as drafts don't wait for others."""
        self._require_outside()
        try:
            self._take_turn()
            with blas_threads(1):
                return np.array(decoder.steps(tokens, caches))
        finally:
            _to_the_end(self._give_turn)

    @contextlib.contextmanager
    def alone(self) -> Iterator[Pause]:
        """See `Schedule`."""
        self._require_outside()
        self.leave()
        with self._prompt:
            try:
                self._has_prompt = True  # else texts that are quick to ask again would keep it out
                self._take_turn()
                with blas_threads(self.threads):
                    yield self._pause
            finally:
                _to_the_end(self._end_prompt)

    def leave(self) -> None:
        """See `Schedule`."""
        with self._changed:
            self._writing.discard(threading.get_ident())
            self._changed.notify_all()

    def _require_outside(self) -> None:
        """SessionError within `alone` of the same thread, which would wait for itself."""
        if self._computing == threading.get_ident():
            raise SessionError("this thread computes with these weights already: end that first")

    def _pause(self) -> None:
        with self._changed:
            if self._is_due():
                self._lets_pass = True
                self._give_turn()
                self._changed.wait_for(self._has_paused)
                self._lets_pass = False
                self._computing = threading.get_ident()

    def _has_paused(self) -> bool:
        """Whether one pass has come and gone since the prompt let it, or nobody wants one any more."""
        return self._computing is None and not (self._lets_pass and self._asked)

    def _begins_pass(self, asked: _Asked) -> bool:
        """Waits for a pass. True: this thread is to compute it. False: another one has."""
        with self._changed:
            self._writing.add(asked.thread)
            self._asked.append(asked)
            self._changed.notify_all()
            while not asked.is_done:
                if asked in self._asked and self._may_begin():
                    self._computing, self._lets_pass = asked.thread, False
                    self._pass, self._asked = self._asked, []
                    self._writing = {each.thread for each in self._pass}  # who was waited for in vain is out
                    return True
                self._changed.wait(PATIENCE_S)
            return False

    def _settle(self, asked: _Asked) -> None:
        """Afterwards nobody computes with a token's caches, whether or not its thread was interrupted."""
        with self._changed:
            if asked in self._asked:
                self._asked.remove(asked)
                self._writing.discard(asked.thread)
            if self._computing == asked.thread:
                for each in self._pass:
                    if not each.is_done:
                        each.error = SessionError(INTERRUPTED)
                self._pass = []
                self._give_turn()
            self._changed.wait_for(lambda: asked not in self._pass)

    def _may_begin(self) -> bool:
        """Whether it is the turn of a pass."""
        is_free = self._computing is None and (self._lets_pass or not self._has_prompt)
        return is_free and self._is_due()

    def _is_due(self) -> bool:
        """Whether a pass should begin."""
        if not self._asked:
            return False
        overdue = time.monotonic() - self._asked[0].since_s > PATIENCE_S
        return overdue or len(self._asked) >= len(self._writing)

    def _take_turn(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._computing is None)
            self._computing = threading.get_ident()

    def _give_turn(self) -> None:
        """Ends this thread's turn, if it has one."""
        with self._changed:
            if self._computing == threading.get_ident():
                self._computing = None
            self._changed.notify_all()

    def _end_prompt(self) -> None:
        self._has_prompt = self._lets_pass = False
        self._give_turn()

    def _compute(self, batch: Sequence[_Asked]) -> None:
        """One pass for all of them, or for those of each decoder; an interrupt goes to this thread alone."""
        groups: dict[int, list[_Asked]] = {}
        for asked in batch:
            groups.setdefault(id(asked.decoder), []).append(asked)
        for group in groups.values():
            _compute_group(group)


def _compute_group(group: Sequence[_Asked]) -> None:
    decoder = group[0].decoder
    try:
        with blas_threads(1):
            if len(group) == 1:
                rows = decoder.step(group[0].token, group[0].caches)[None]
            else:
                rows = decoder.step_together([a.token for a in group], [a.caches for a in group])
        for asked, row in zip(group, np.array(rows), strict=True):
            asked.logits = row
    except Exception as error:
        for asked in group:
            asked.error = error


def _to_the_end(work: Callable[[], None]) -> None:
    """Calls what may be called again until it comes to its end; an interrupt meanwhile is raised behind it."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            work()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
