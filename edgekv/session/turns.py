"""Whose turn it is to compute: one conversation with a decoder, or several, each in a thread of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from edgekv.decoder.decoder import Decoder
from edgekv.kvcache.base import KVCache
from edgekv.machine import blas_threads
from edgekv.types import F32

PATIENCE_S = 0.02  # that a token waits for those of the other texts
SHARED_CHUNK = 128  # tokens of a prompt between two tokens of others

Pause = Callable[[], None]


class Turns(Protocol):
    """The way to a decoder, which computes one thing at a time with all its cores."""

    decoder: Decoder

    def step(self, token: int, caches: Sequence[KVCache]) -> F32:
        """`Decoder.step`: logits (vocab,) after one more token of a text."""
        ...

    def steps(self, tokens: Sequence[int], caches: Sequence[KVCache]) -> F32:
        """`Decoder.steps`: logits (n, vocab) after each of a few."""
        ...

    def alone(self) -> contextlib.AbstractContextManager[Pause]:
        """For a prompt, or whatever else needs all cores; the pause lets tokens of others go first."""
        ...

    def leave(self) -> None:
        """The text of this thread has ended: no token waits for it."""
        ...


class OneAtATime:
    """Whoever calls computes: the caller sees to it that conversations take turns."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def step(self, token: int, caches: Sequence[KVCache]) -> F32:
        """See `Turns`."""
        with blas_threads(1):
            return self.decoder.step(token, caches)

    def steps(self, tokens: Sequence[int], caches: Sequence[KVCache]) -> F32:
        """See `Turns`."""
        with blas_threads(1):
            return self.decoder.steps(tokens, caches)

    @contextlib.contextmanager
    def alone(self) -> Iterator[Pause]:
        """See `Turns`; nobody waits."""
        with blas_threads(self.decoder.threads):
            yield lambda: None

    def leave(self) -> None:
        """Nobody waits."""


@dataclasses.dataclass(eq=False)
class _Asked:
    """A token that waits for a pass, and what came of it."""

    token: int
    caches: Sequence[KVCache]
    thread: int = dataclasses.field(default_factory=threading.get_ident)
    since_s: float = dataclasses.field(default_factory=time.monotonic)
    logits: F32 | None = None
    error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self.logits is not None or self.error is not None


class Together:
    """Conversations of several threads: tokens share passes of the linear layers, prompts are read one by one.

    A pass begins when every text that is being written has asked for its next token, or one has waited for
    PATIENCE_S. Whoever finds it so computes it; the others wait.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        decoder.chunk = min(decoder.chunk, SHARED_CHUNK)
        self._prompt = threading.Lock()  # scratch of a prompt lives on while it pauses
        self._changed = threading.Condition()
        self._busy = self._prompt_waits = False
        self._writing: set[int] = set()  # threads whose text goes on
        self._asked: list[_Asked] = []

    def step(self, token: int, caches: Sequence[KVCache]) -> F32:
        """See `Turns`. Raises what the pass raised: then no conversation of it has its token."""
        asked = _Asked(token, caches)
        with self._changed:
            self._writing.add(asked.thread)
            self._asked.append(asked)
            self._changed.notify_all()
            while not asked.is_done and not (asked in self._asked and self._may_begin()):
                self._changed.wait(PATIENCE_S)
            batch = [] if asked.is_done else self._begin_pass()
        if batch:
            self._compute(batch)
        if asked.error is not None:
            raise asked.error
        assert asked.logits is not None
        return asked.logits

    def steps(self, tokens: Sequence[int], caches: Sequence[KVCache]) -> F32:
        """See `Turns`; by itself, as drafts don't wait for others."""
        with self._changed:
            self._take_turn(lambda: not self._busy)
        try:
            with blas_threads(1):
                return np.array(self.decoder.steps(tokens, caches))
        finally:
            self._give_turn()

    @contextlib.contextmanager
    def alone(self) -> Iterator[Pause]:
        """See `Turns`."""
        self.leave()
        with self._prompt:
            with self._changed:
                self._prompt_waits = True  # else texts that are quick to ask again would keep it out
                self._take_turn(lambda: not self._busy)
                self._prompt_waits = False
            try:
                with blas_threads(self.decoder.threads):
                    yield self._pause
            finally:
                self._give_turn()

    def leave(self) -> None:
        """See `Turns`."""
        with self._changed:
            self._writing.discard(threading.get_ident())
            self._changed.notify_all()

    def _pause(self) -> None:
        with self._changed:
            if self._is_due():
                self._busy = False
                self._changed.notify_all()
                self._take_turn(lambda: not self._busy and not self._asked)

    def _may_begin(self) -> bool:
        """Whether it is the turn of a pass."""
        return not self._busy and not self._prompt_waits and self._is_due()

    def _is_due(self) -> bool:
        """Whether a pass should begin."""
        if not self._asked:
            return False
        overdue = time.monotonic() - self._asked[0].since_s > PATIENCE_S
        return overdue or len(self._asked) >= len(self._writing)

    def _begin_pass(self) -> list[_Asked]:
        """Takes the turn and all that have asked; a text that was waited for in vain is not waited for again."""
        batch, self._asked, self._busy = self._asked, [], True
        self._writing = {asked.thread for asked in batch}
        return batch

    def _take_turn(self, is_free: Callable[[], bool]) -> None:
        """Within `_changed`."""
        self._changed.wait_for(is_free)
        self._busy = True

    def _give_turn(self) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _compute(self, batch: Sequence[_Asked]) -> None:
        """One pass for all of them, in the turn that was taken."""
        try:
            with blas_threads(1):
                if len(batch) == 1:
                    rows = self.decoder.step(batch[0].token, batch[0].caches)[None]
                else:
                    rows = self.decoder.step_together([a.token for a in batch], [a.caches for a in batch])
            for asked, row in zip(batch, np.array(rows), strict=True):
                asked.logits = row
        except BaseException as error:
            for asked in batch:
                asked.error = error
        finally:
            self._give_turn()
