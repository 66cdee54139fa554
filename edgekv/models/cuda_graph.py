"""Decode steps without launch gaps: a step is recorded once as a CUDA graph and replayed for later tokens.

A recorded launch keeps its arguments. So the step is recorded with the caches' counters at the last token of a
stretch in which nothing happens but appending (`KVCache.steady_tokens`), and a number on the device, the shift,
takes every position back from there: kernels that append add it to the position, rope and learned positions to
the table's row, attention to the end of what is visible. What lies between that end and the
recorded one is read and weighs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from edgekv.kernels.cuda.program import Array, CannotRecord, Driver, Launch, Program
from edgekv.kvcache.base import KVCache

SHORTEST, LONGEST = 8, 128  # tokens of a stretch worth recording, and recorded at once
INPUTS = Launch(Program(("inputs",)), "set_inputs", (1,), 1)


class StepDecoder(Protocol):
    """A decoder whose steps are replayed; arrays are on the device."""

    driver: Driver

    @property
    def can_replay(self) -> bool: ...
    def embed(self, tokens: Sequence[int], start: int) -> Array: ...
    def embed_ids(self, ids: Array, start: int) -> Array: ...
    def forward(self, x: Array, caches: Sequence[KVCache]) -> Array: ...
    def head(self, x: Array) -> Array: ...
    def buffers(self) -> list[Array]: ...


class Replay:
    """The steps of one decoder; remembers the recording of the conversation that it served last."""

    def __init__(self, decoder: StepDecoder) -> None:
        self._decoder, self._driver = decoder, decoder.driver
        self._ids = self._driver.zeros((1,), np.int32)
        self._is_warm: set[type[KVCache]] = set()  # schemes whose kernels are compiled
        self._unrecordable: set[type[KVCache]] = set()
        self.n_replayed = 0
        self._forget()

    def _forget(self) -> None:
        self._recording: Callable[[], None] | None = None
        self._caches: tuple[KVCache, ...] = ()
        self._held: list[Array] = []
        self._next = self._last = 0

    def step(self, token: int, caches: Sequence[KVCache]) -> Array:
        """Logits (vocab,) after appending one token, valid until the next step."""
        n = caches[0].n_seen
        if self._recording and self._caches == tuple(caches) and self._next == n <= self._last:
            return self._play(token, self._recording)
        self._forget()
        recording = self._record(caches) if self._worth_recording(caches) else None
        if recording:
            return self._play(token, recording)
        self._is_warm.add(type(caches[0]))
        return self._run(self._decoder.embed((token,), n), caches)

    def _worth_recording(self, caches: Sequence[KVCache]) -> bool:
        scheme = type(caches[0])
        ready = self._decoder.can_replay and scheme in self._is_warm and scheme not in self._unrecordable
        return ready and _stretch(caches) >= SHORTEST

    def _run(self, x: Array, caches: Sequence[KVCache]) -> Array:
        return self._decoder.head(self._decoder.forward(x, caches))[0]

    def _record(self, caches: Sequence[KVCache]) -> Callable[[], None] | None:
        self._caches, self._next = tuple(caches), caches[0].n_seen
        self._last = self._next + _stretch(caches) - 1
        self._set(0, 0)  # compiles
        try:
            self._recording = self._driver.record(self._last_step)
        except CannotRecord:
            self._unrecordable.add(type(caches[0]))
            self._forget()
            return None
        self._held = self._decoder.buffers()  # others may ask for larger ones while these are in use
        return self._recording

    def _last_step(self) -> None:
        """The stretch's last step, with the counters as they will be then; the shift is 0 afterwards."""
        before = [cache.n_seen for cache in self._caches]
        for cache in self._caches:
            cache.advance(self._last - cache.n_seen)
        try:
            self._logits = self._run(self._decoder.embed_ids(self._ids, self._last), self._caches)
            self._set(0, 0)
        finally:
            for cache, n in zip(self._caches, before, strict=True):
                cache.advance(n - cache.n_seen)

    def _play(self, token: int, recording: Callable[[], None]) -> Array:
        self._set(token, self._next - self._last)
        recording()
        for cache in self._caches:
            cache.advance(1)
        self._next += 1
        self.n_replayed += 1
        return self._logits

    def _set(self, token: int, shift: int) -> None:
        self._driver.launch(INPUTS, self._ids, token, self._driver.shift, shift)


def _stretch(caches: Sequence[KVCache]) -> int:
    """Tokens that one recording can serve."""
    return min(LONGEST, *(cache.steady_tokens() for cache in caches))
