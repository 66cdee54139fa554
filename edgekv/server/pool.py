"""Recent conversations kept with their caches: a request goes on where one of them has the same beginning."""

from __future__ import annotations

import threading

from edgekv.errors import MemoryBudgetError
from edgekv.session.session import Session
from edgekv.vision.prompt import Prompt

WORTH_COPYING = 32  # tokens in common from which on another conversation's cache is copied


class SessionPool:
    """At most ``budget_bytes`` of caches, least recently used first to go; for any thread.

    base: a loaded session, the first of the pool; the others share its weights. slots: how many may be acquired at
    once: there are always so many. Raises MemoryBudgetError where their caches don't fit.
    """

    def __init__(self, base: Session, budget_bytes: int, slots: int = 1) -> None:
        self.base = base
        self.capacity = max(slots, budget_bytes // max(1, base.plan.cache_bytes + base.plan.state_bytes))
        self._all: list[Session] = [base, *(base.fork() for _ in range(slots - 1))]
        self._idle = list(self._all)  # least recently used first
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(session.state.nbytes for session in self._all)

    @property
    def n_sessions(self) -> int:
        """Conversations that are kept."""
        return len(self._all)

    def acquire(self, prompt: Prompt, lora: str | None = None) -> tuple[Session, Prompt]:
        """A session rewound to the longest beginning of a prompt that is cached, and what it still has to read.

        Of those with this LoRA alone: what another has read are other keys and values. One whose conversation goes
        on is taken itself. One that only begins alike is copied, so that it can go on too. Give the session back
        with `release`.
        """
        with self._lock:
            alike = [session for session in reversed(self._idle) if session.lora == lora]
            closest = max(alike, key=lambda session: session.state.shared(prompt)[0], default=None)
            shared = closest.state.shared(prompt)[0] if closest else 0
            if closest and shared == len(closest.tokens):
                session = closest
            else:
                session = self._spare()
                if session.lora != lora:
                    session.use_lora(lora)
                if closest and session is not closest and shared >= WORTH_COPYING:
                    session.copy_from(closest)
            rest = session.align(prompt)
            self._idle.remove(session)  # last: what fails before leaves it in the pool
            return session, rest

    def borrow(self, lora: str | None) -> Session:
        """A session with this LoRA for work apart from its conversation, which stays; to `release`."""
        with self._lock:
            session = next((session for session in reversed(self._idle) if session.lora == lora), None)
            if session is None:
                session = self._spare()
                session.use_lora(lora)
            self._idle.remove(session)
            return session

    def release(self, session: Session) -> None:
        """Gives a session of `acquire` back; it is then the most recently used one."""
        with self._lock:
            self._idle.append(session)

    def _spare(self) -> Session:
        """A session to overwrite: a new one while there is room, else the least recently used."""
        if len(self._all) < self.capacity:
            try:
                session = self._idle[0].fork()
            except MemoryBudgetError:
                self.capacity = len(self._all)
            else:
                self._all.append(session)
                self._idle.insert(0, session)
                return session
        return self._idle[0]
