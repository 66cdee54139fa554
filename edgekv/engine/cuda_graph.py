"""Decode steps without launch gaps: a step is recorded once as a CUDA graph and replayed for later tokens.

What differs between two steps of a conversation is counters alone, while every cache says so
(`KVCache.is_static`): positions, and where the stores end. A recorded launch finds on the device how far each has
moved since (`edgekv.kernels.cuda.counter`). What the caches do after some tokens (`KVCache.flush`: a block is
packed) is a recording of its own, made when it comes the first time; where that can't be it is done, and the step
recorded anew.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from edgekv.kernels.cuda.counter import RECORDED_TOKENS, Counter, Moves, put_inputs
from edgekv.kernels.cuda.driver import Array, CannotRecord, Driver
from edgekv.kvcache.cache import KVCache

FEWEST_TOKENS = 8  # before the cache is full, worth recording
MOST_FAILURES = 3  # recordings of a scheme that failed; then its steps are taken plainly
POSITIONS = "n_seen"  # the counter that all caches share
Counts = list[dict[str, int]]


class Recording(NamedTuple):
    """What was recorded, with which counters; and how it changed them."""

    run: Callable[[], None]
    moves: Moves
    counts: Counts
    changes: Counts
    held: list[Array]


class CacheGroup:
    """Caches that have the same counters at every step: those of one scheme with the same knobs and sizes."""

    def __init__(self, caches: list[KVCache]) -> None:
        self.caches, self.first = caches, caches[0]

    def counts(self) -> dict[str, int]:
        """The caches' counters, by name."""
        return self.first.state().counters

    def structure(self) -> Hashable:
        """What a step of the next token launches, as far as counters decide."""
        cache, window = self.first, self.first.geometry.sliding_window
        cache.advance(1)
        try:
            return len(cache.segments()), window is not None and cache.n_seen > window
        finally:
            cache.advance(-1)

    def flushes_next(self) -> bool:
        """Whether `flush` is due after the next token."""
        self.first.advance(1)
        try:
            return self.first.needs_flush()
        finally:
            self.first.advance(-1)

    def equals(self) -> Hashable:
        """Which counters are equal: that may decide what `flush` does."""
        return tuple(a == b for a, b in itertools.combinations(self.counts().values(), 2))

    @staticmethod
    def of(caches: Sequence[KVCache]) -> list[CacheGroup]:
        """The groups of the caches."""
        groups: dict[Hashable, list[KVCache]] = {}
        for cache in caches:
            size = cache.geometry.capacity, cache.geometry.sliding_window
            key = type(cache), repr(cache.knobs), size, tuple(cache.state().counters.items())
            groups.setdefault(key, []).append(cache)
        return [CacheGroup(members) for members in groups.values()]


class Replay:
    """The steps of one decoder; remembers the recordings of the conversation that it served last."""

    def __init__(self, decoder: Any, backend: Any) -> None:
        self._decoder, self._backend = decoder, backend
        self._driver: Driver = backend.driver
        self._ids = self._driver.zeros((1,), np.int32)
        self._is_warm: set[type[KVCache]] = set()  # schemes whose kernels are compiled
        self._failures: collections.Counter[type[KVCache]] = collections.Counter()
        self.n_replayed = 0
        self._forget()

    def _forget(self) -> None:
        self._step: Recording | None = None
        self._flushes: dict[Hashable, Recording] = {}
        self._caches: tuple[KVCache, ...] = ()
        self._groups: list[CacheGroup] = []
        self._structure: list[Hashable] = []
        self._next = self._last = 0

    def step(self, token: int, caches: Sequence[KVCache]) -> Array:
        """Logits (vocab,) after appending one token, valid until the next step."""
        if self._caches != tuple(caches) or caches[0].n_seen != self._next:
            self._forget()  # others have changed them, perhaps what they point to
        if not self._can_play():
            before, flushes = [group.caches for group in self._groups], self._flushes
            self._forget()
            if not self._record(caches):
                self._is_warm.add(type(caches[0]))
                return self._run(self._decoder.embed((token,), caches[0].n_seen), caches)
            if before == [group.caches for group in self._groups]:
                self._flushes = flushes
        assert self._step is not None
        self._play(self._step, token)
        self.n_replayed += 1
        self._next = caches[0].n_seen
        self._tidy()
        return self._logits

    def _can_play(self) -> bool:
        if self._step is None or self._next > self._last:
            return False
        is_static = all(group.first.is_static() for group in self._groups)
        return is_static and self._structure == self._structures()

    def _structures(self) -> list[Hashable]:
        return [group.structure() for group in self._groups]

    def _run(self, x: Array, caches: Sequence[KVCache]) -> Array:
        return self._decoder.head(self._decoder.forward(x, caches))[0]

    def _record(self, caches: Sequence[KVCache]) -> bool:
        """Whether the step of the next token could be recorded; it has not been taken then."""
        scheme, start = type(caches[0]), caches[0].n_seen
        ready = self._decoder.can_replay and scheme in self._is_warm and self._failures[scheme] < MOST_FAILURES
        room = caches[0].geometry.capacity - start
        if not ready or room < FEWEST_TOKENS or not all(cache.is_static() for cache in caches):
            return False
        self._caches, self._groups = tuple(caches), CacheGroup.of(caches)
        self._structure, self._next, self._last = self._structures(), start, start + RECORDED_TOKENS
        if any(group.flushes_next() for group in self._groups):
            return False

        def step() -> None:
            x = self._backend.embed_ids(self._ids, start)
            self._logits = self._run(x, self._caches)

        try:
            self._step = self._recorded(step)
        except CannotRecord:
            self._failures[scheme] += 1
            return False
        return True

    def _recorded(self, work: Callable[[], None]) -> Recording:
        """``work`` with the counters as they are; it is done when that is replayed."""
        put_inputs(self._driver, self._ids, 0, [])  # compiles
        moves, counts = Moves(self._driver, POSITIONS), [group.counts() for group in self._groups]
        changes: Counts = []

        def everything() -> None:
            changes[:] = self._counted(work, moves, counts)
            put_inputs(self._driver, self._ids, 0, [])  # for what is not replayed

        run = self._driver.record(everything)
        # Others may ask for larger buffers while these are in use.
        return Recording(run, moves, counts, changes, self._backend.buffers())

    def _counted(self, work: Callable[[], None], moves: Moves, counts: Counts) -> Counts:
        """``work`` with `Counter`s of these values in the caches, whose own then return; how it changed them."""
        before = [group.counts() for group in self._groups]
        for i, (group, own) in enumerate(zip(self._groups, counts, strict=True)):
            for name, value in own.items():
                counter = Counter(value, ((_key(i, name), 1),), moves)
                for cache in group.caches:
                    setattr(cache, name, counter)
        try:
            work()
            after = [group.counts() for group in self._groups]
        finally:
            for group, own in zip(self._groups, before, strict=True):
                for cache in group.caches:
                    vars(cache).update(own)
        return [
            {name: now[name] - value for name, value in own.items()}
            for now, own in zip(after, counts, strict=True)
        ]

    def _play(self, recording: Recording, token: int) -> None:
        now = [group.counts() for group in self._groups]
        moved = {
            _key(i, name): now[i][name] - value
            for i, own in enumerate(recording.counts)
            for name, value in own.items()
        }
        recording.moves.set(self._ids, token, moved.__getitem__)
        recording.run()
        for group, own, change in zip(self._groups, now, recording.changes, strict=True):
            for name, by in change.items():
                if by:
                    for cache in group.caches:
                        setattr(cache, name, own[name] + by)

    def _tidy(self) -> None:
        """What is due after a token: replayed, or recorded and replayed, or done."""
        groups = [group for group in self._groups if group.first.needs_flush()]
        if not groups:
            return
        caches = [cache for group in groups for cache in group.caches]
        due = tuple((self._groups.index(group), group.equals()) for group in groups)

        def flush() -> None:
            for cache in caches:
                cache.flush()

        if all(cache.flush_is_static for cache in caches) and self._record_flush(due, flush):
            self._play(self._flushes[due], 0)
        else:
            flush()
            self._forget()  # it may have replaced arrays

    def _record_flush(self, due: Hashable, flush: Callable[[], None]) -> bool:
        """Whether it could be, or was."""
        try:
            if due not in self._flushes:
                self._flushes[due] = self._recorded(flush)
        except CannotRecord:
            return False
        return True


def _key(group: int, name: str) -> Hashable:
    return name if name == POSITIONS else (group, name)
