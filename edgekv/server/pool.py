"""Recent conversations kept with their caches: a request goes on where one of them has the same beginning."""

from __future__ import annotations

import contextlib
import threading

from edgekv.engine.session import Session
from edgekv.errors import MemoryBudgetError
from edgekv.vision.prompt import Prompt

WORTH_COPYING = 32  # tokens in common from which on another conversation's cache is copied


class SessionPool:
    """At most ``budget_bytes`` of caches, least recently used first to go; for any thread.

    base: a loaded session, the first of the pool; the others share its weights. slots: how many may be acquired at
    once: there are always so many. Raises MemoryBudgetError where their caches don't fit.
    """

    def __init__(self, base: Session, budget_bytes: int, slots: int = 1) -> None:
        self.base = base
        self.capacity = max(slots, budget_bytes // max(1, base.nbytes))
        self._all: list[Session] = [base, *(base.fork() for _ in range(slots - 1))]
        self._idle = list(self._all)  # least recently used first
        self._sources: list[Session] = []  # idle, and being copied: not to be taken meanwhile
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(session.nbytes for session in self._all)

    @property
    def n_sessions(self) -> int:
        """Conversations that are kept."""
        return len(self._all)

    def acquire(self, prompt: Prompt, lora: str | None = None) -> tuple[Session, Prompt]:
        """A session rewound to the longest beginning of a prompt that is cached, and what it still has to read.

        Of those with this LoRA alone: what another has read are other keys and values. One whose conversation goes
        on is taken itself. One that only begins alike is copied, so that it can go on too; who needs that one, or
        finds no other, waits for the end of the copy. Give the session back with `release`.
        """
        with self._changed:
            while (choice := self._choose(prompt, lora)) is None:
                self._changed.wait()
            session, source = choice
            self._take(session, lora)
            if source:
                self._sources.append(source)
        try:
            if source:
                with contextlib.suppress(MemoryBudgetError):  # it is read again instead
                    session.copy_from(source)
            return session, session.align(prompt)
        except BaseException:
            self.release(session)
            raise
        finally:
            if source:
                with self._changed:
                    self._sources.remove(source)
                    self._changed.notify_all()

    def borrow(self, lora: str | None) -> Session:
        """A session with this LoRA for work apart from its conversation, which stays; to `release`."""
        with self._changed:
            while (session := self._latest(lora) or self._spare()) is None:
                self._changed.wait()
            self._take(session, lora)
            return session

    def release(self, session: Session) -> None:
        """Gives a session of `acquire` back; it is then the most recently used one."""
        with self._changed:
            self._idle.append(session)
            self._changed.notify_all()

    def _choose(self, prompt: Prompt, lora: str | None) -> tuple[Session, Session | None] | None:
        """The session to take, and the one to copy into it; None: what it needs is being copied for another one.

        Reading again what a copy holds would take longer than waiting for it.
        """
        alike = [session for session in reversed(self._idle) if session.lora == lora]
        alike.sort(key=lambda session: session in self._sources)  # of equal ones one that can be taken now
        closest = max(alike, key=lambda session: session.shared_prefix(prompt), default=None)
        shared = closest.shared_prefix(prompt) if closest else 0
        goes_on = closest is not None and shared == len(closest.tokens)
        if closest in self._sources and (goes_on or shared >= WORTH_COPYING):
            return None
        if closest and goes_on:
            return closest, None
        spare = self._spare()
        if spare is None:
            return None
        return spare, closest if closest is not spare and shared >= WORTH_COPYING else None

    def _take(self, session: Session, lora: str | None) -> None:
        if session.lora != lora:
            session.use_lora(lora)
        self._idle.remove(session)  # last: what fails before leaves it in the pool

    def _latest(self, lora: str | None) -> Session | None:
        """The most recently used session with this LoRA that can be taken now."""
        free = (session for session in reversed(self._idle) if session not in self._sources)
        return next((session for session in free if session.lora == lora), None)

    def _spare(self) -> Session | None:
        """A session to overwrite: a new one while there is room, else the least recently used; None: none now."""
        if len(self._all) < self.capacity:
            try:
                session = self.base.fork()
            except MemoryBudgetError:
                self.capacity = len(self._all)
            else:
                self._all.append(session)
                self._idle.insert(0, session)
                return session
        return next((session for session in self._idle if session not in self._sources), None)
