"""Schedulers: let one conversation compute with a decoder, or several, each in a thread of its own, in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from edgekv.engine.decoder import Decoder, Pause
from edgekv.errors import SessionError
from edgekv.kvcache.cache import LayerState
from edgekv.machine import blas_threads
from edgekv.types import F32

MAX_WAIT_S = 0.02  # that a token waits for those of the other texts
SHARED_CHUNK = 128  # tokens of a prompt between two tokens of others
INTERRUPTED = (
    "the thread that computed the next tokens of several texts was interrupted: go on with an empty prompt"
)


class TryLock:
    """A lock that never waits: a second thread gets an error. An interrupt before or after leaves it free."""

    def __init__(self) -> None:
        self.holders: dict[str, object] = {}  # one at most

    @contextlib.contextmanager
    def hold(self, refusal: SessionError) -> Iterator[None]:
        """Takes it for a block. Raises ``refusal`` where it is taken."""
        me = object()
        try:
            if self.holders.setdefault("it", me) is not me:  # in one step, which no other thread comes between
                raise refusal
            yield
        finally:
            if self.holders.get("it") is me:
                del self.holders["it"]


class SerialScheduler:
    """Runs decoders of the same weights in the caller's thread. Raises SessionError when another one computes.

    threads: cores for a prompt.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._compute_lock = TryLock()

    def steps(self, decoder: Decoder, tokens: Sequence[int], caches: Sequence[LayerState]) -> F32:
        """Runs `Decoder.steps`; returns logits (n, vocab) after a text's next token and after each draft."""
        with self._hold(1):
            return decoder.steps(tokens, caches)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[Pause]:
        """Gives a block, for a prompt or other work of all cores, a pause that lets others' tokens go first."""
        with self._hold(self.threads):
            yield lambda: None

    def finish(self) -> None:
        """Ends the text of this thread: other texts' tokens no longer wait for it."""

    @contextlib.contextmanager
    def _hold(self, threads: int) -> Iterator[None]:
        what = "these weights are computing for another conversation"
        refusal = SessionError(what, field="slots", value=1, accepted=["2 or more"])
        with self._compute_lock.hold(refusal), blas_threads(threads):
            yield


@dataclasses.dataclass(eq=False)
class _Request:
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


class BatchScheduler:
    """Runs conversations of several threads: tokens of one decoder share passes, prompts are read one by one.

    A pass begins when every text that is being written has asked for its next token, or one has waited for
    MAX_WAIT_S. The thread that notices it computes the pass; the others wait. A thread that is interrupted
    (KeyboardInterrupt) gives up its turn and withdraws its request.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._prefill_lock = threading.Lock()  # scratch of a prompt lives on while it pauses
        self._changed = threading.Condition()
        self._owner: int | None = None  # the thread that computes
        self._in_prefill = False  # then a pass begins only where the prompt pauses for it
        self._decode_allowed = False
        self._decoding: set[int] = set()  # threads in the middle of a text
        self._waiting: list[_Request] = []
        self._batch: list[_Request] = []  # the requests that are being computed

    def steps(self, decoder: Decoder, tokens: Sequence[int], caches: Sequence[LayerState]) -> F32:
        """Runs one token in a pass with those of other threads; returns logits (1, vocab). Drafts need slots=1.

        Raises the error of the pass, of which then no text has its token; SessionError where the thread that
        computed it was interrupted, after which the others may ask again.
        """
        self._require_outside()
        (token,) = tokens
        request = _Request(decoder, token, caches)
        try:
            if self._wait_or_lead(request):
                self._compute(self._batch)
        finally:
            self._leave(request)
        if request.error is not None:
            raise request.error
        assert request.logits is not None
        return request.logits[None]

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[Pause]:
        """Runs its block as `SerialScheduler.exclusive` does, but waits until no thread computes."""
        self._require_outside()
        self.finish()
        with self._prefill_lock:
            try:
                self._in_prefill = True  # else other threads' next tokens would come first, for ever
                with self._changed:
                    self._changed.wait_for(lambda: self._owner is None)
                    self._owner = threading.get_ident()
                with blas_threads(self.threads):
                    yield self._pause
            finally:
                self._in_prefill = self._decode_allowed = False
                self._release()

    def finish(self) -> None:
        """Ends the text of this thread, for whose tokens those of others wait no longer."""
        with self._changed:
            self._decoding.discard(threading.get_ident())
            self._changed.notify_all()

    def _require_outside(self) -> None:
        """Raises SessionError within `exclusive` of the same thread, which would wait for itself."""
        if self._owner == threading.get_ident():
            raise SessionError("this thread computes with these weights already: end that first")

    def _pause(self) -> None:
        with self._changed:
            if self._is_due():
                self._decode_allowed = True
                self._release()
                self._changed.wait_for(  # one pass has come and gone, or nobody wants one any more
                    lambda: self._owner is None and not (self._decode_allowed and self._waiting)
                )
                self._decode_allowed = False
                self._owner = threading.get_ident()

    def _wait_or_lead(self, request: _Request) -> bool:
        """Waits for a pass; returns whether this thread must compute it, as no other has."""
        with self._changed:
            self._decoding.add(request.thread)
            self._waiting.append(request)
            self._changed.notify_all()
            while not request.is_done:
                is_free = self._owner is None and (self._decode_allowed or not self._in_prefill)
                if request in self._waiting and is_free and self._is_due():
                    self._owner, self._decode_allowed = request.thread, False
                    self._batch, self._waiting = self._waiting, []
                    self._decoding = {other.thread for other in self._batch}  # not those that were late
                    return True
                self._changed.wait(MAX_WAIT_S)
            return False

    def _leave(self, request: _Request) -> None:
        """Withdraws a request, answered or interrupted, and waits until no thread computes with its caches."""
        with self._changed:
            if request in self._waiting:
                self._waiting.remove(request)
                self._decoding.discard(request.thread)
                self._changed.notify_all()
            if self._owner == request.thread:
                for other in self._batch:
                    if not other.is_done:
                        other.error = SessionError(INTERRUPTED)
                self._batch = []
                self._release()
            self._changed.wait_for(lambda: request not in self._batch)

    def _is_due(self) -> bool:
        if not self._waiting:
            return False
        overdue = time.monotonic() - self._waiting[0].since_s > MAX_WAIT_S
        return overdue or len(self._waiting) >= len(self._decoding)

    def _release(self) -> None:
        with self._changed:
            if self._owner == threading.get_ident():
                self._owner = None
            self._changed.notify_all()

    def _compute(self, batch: Sequence[_Request]) -> None:
        """Computes a pass for the requests of each decoder; an interrupt reaches this thread alone."""
        groups: dict[int, list[_Request]] = {}
        for request in batch:
            groups.setdefault(id(request.decoder), []).append(request)
        for group in groups.values():
            decoder = group[0].decoder
            try:
                with blas_threads(1):
                    rows = decoder.step_batch([r.token for r in group], [r.caches for r in group])
                for request, row in zip(group, np.array(rows), strict=True):
                    request.logits = row
            except Exception as error:
                for request in group:
                    request.error = error
