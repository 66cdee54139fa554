"""Where an answer is, for a client that wants to watch: the names are those of llama.cpp's server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from edgekv.kvcache import CacheSpec
from edgekv.kvcache.choice import DEFAULT
from edgekv.kvcache.layer_state import LayerState
from edgekv.kvcache.recurrent import attending
from edgekv.session.session import Session

INTERVAL_S = 0.25  # between two counts of the cache's bytes, and between two events of progress


class Timings:
    """Of one answer. n_prompt: tokens of the whole prompt; n_read: those of them that were computed for its echo.

    watched: somebody wants to know; else nothing is counted.
    """

    def __init__(self, session: Session, n_prompt: int, n_read: int, *, watched: bool) -> None:
        self._session, self._n_prompt, self._n_read, self._watched = session, n_prompt, n_read, watched
        self._begun_s = self._counted_s = time.perf_counter()
        self._first_s: float | None = None
        self._n_made = 0
        self._bytes: dict[str, Any] = {}

    @property
    def n_new(self) -> int:
        """Tokens of the prompt that were not in the cache, once it is being read."""
        return min(self._n_prompt, self._n_read + self._session.runner.n_read)

    @property
    def n_cached(self) -> int:
        """The others."""
        return self._n_prompt - self.n_new

    def prefill(self, layer: int, n_layers: int) -> dict[str, Any] | None:
        """After each layer of the prompt; None where an event was told a moment ago."""
        if not self._due(at_once=layer == n_layers):
            return None
        done = self.n_cached + self.n_new * layer // n_layers
        seconds = time.perf_counter() - self._begun_s
        return {
            "total": self._n_prompt,
            "cache": self.n_cached,
            "processed": done,
            "time_ms": round(1e3 * seconds, 1),
            **self._bytes,
        }

    def token(self) -> dict[str, Any]:
        """After each token."""
        now = time.perf_counter()
        self._first_s, self._n_made = self._first_s or now, self._n_made + 1
        if not self._watched:
            return {}
        self._due(at_once=self._n_made == 1)
        return self.latest(now)

    def latest(self, now: float | None = None) -> dict[str, Any]:
        """Counts, milliseconds and bytes so far."""
        if self._first_s is None:
            return {"cache_n": self.n_cached, "prompt_n": self.n_new, "predicted_n": 0, **self._bytes}
        reading, writing = self._first_s - self._begun_s, (now or time.perf_counter()) - self._first_s
        speed = (self._n_made - 1) / writing if self._n_made > 1 and writing > 0 else None
        return {
            "cache_n": self.n_cached,
            "prompt_n": self.n_new,
            "prompt_ms": round(1e3 * reading, 1),
            "predicted_n": self._n_made,
            "predicted_ms": round(1e3 * writing, 1),
            "predicted_per_second": speed and round(speed, 2),
            **self._bytes,
        }

    def end(self) -> dict[str, Any]:
        """After the last token."""
        self._due(at_once=True)
        return self.latest()

    def _due(self, at_once: bool) -> bool:
        """Counts the bytes where that was not done a moment ago; whether it was done now."""
        now = time.perf_counter()
        if not at_once and now - self._counted_s < INTERVAL_S:
            return False
        caches, self._counted_s = self._session.state.caches, now
        self._bytes = {"kv_cache_bytes": held_bytes(caches), "kv_cache_f16_bytes": f16_bytes(caches)}
        return True


def held_bytes(caches: Sequence[LayerState]) -> int:
    """Bytes of the tokens that caches hold, without what is set aside for more of them."""
    held = [cache for cache in attending(caches) if cache.n_seen]
    return sum(min(cache.nbytes, cache.planned_bytes(cache.n_seen)) for cache in held)


def f16_bytes(caches: Sequence[LayerState]) -> int:
    """Bytes that the same tokens take in the plain cache."""
    plain, held = CacheSpec.parse(DEFAULT), [cache for cache in attending(caches) if cache.n_seen]
    return sum(plain.layer(cache.geometry).planned_bytes(cache.n_seen) for cache in held)
