"""What every KV scheme is: storage for one layer that appends, attends, rewinds, and knows its exact bytes."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgekv.errors import CacheError
from edgekv.kernels.contract.segment import Segment, Visible
from edgekv.kernels.memory import contiguous
from edgekv.kvcache.geometry import Geometry
from edgekv.kvcache.layer_state import LayerState
from edgekv.kvcache.scheme import Scheme
from edgekv.types import F32


class KVCache(Scheme, LayerState):
    """Keys and values of one layer, in whatever form the scheme keeps them.

    The cache owns attention: dense keys and values never go back to the model. Arrays are allocated
    once for ``geometry.capacity`` tokens. Queries arrive multiplied by the layer's score scale. Whatever counts
    tokens is an int attribute ``n_...``, so that `state` finds it.

    A scheme must define: `name`, `paper`, `summary`, `gives_up` and `Knobs` (scheme.py); `layout` and `bytes_read`
    (counting.py); `extend`, `append` and `segments` (here). It may define the rest of scheme.py, what it can take
    back (rewinding.py), what it decides and must check when it is restored (saving.py), and here `piece`, `tidy`,
    `prefill`, `finish_prefill` and `adapt`; `mark_images` and `notes` (layer_state.py).

    Callers use `allocate`, `prefill`, `extend` and `attend`; bytes and counts; `rewind`; `state` and `prepare`.
    `KeepAll` and `Windowed` define most of this for schemes that are two codecs.
    """

    exact_prefill = True  # False: a prompt attends through the cache, as the adapted model was trained to

    def __init__(self, geometry: Geometry, knobs: Any) -> None:
        super().__init__()
        self.geometry, self.knobs = geometry, knobs

    @property
    def capacity(self) -> int:
        return self.geometry.capacity

    def cut(self, n_tokens: int) -> KVCache:
        return type(self)(self.geometry.cut(n_tokens), self.knobs)

    @abc.abstractmethod
    def extend(self, keys: F32, values: F32) -> None:
        """Appends keys and values (n_kv_heads, n, head_dim) without attending."""

    @abc.abstractmethod
    def append(self, keys: F32, values: F32) -> None:
        """Stores at most `piece` tokens (n_kv_heads, n, head_dim), to be seen by their own queries."""

    @abc.abstractmethod
    def segments(self) -> list[Segment]:
        """What the queries of the latest tokens read."""

    def tidy(self) -> None:
        """What follows once the queries of the latest tokens have read: packing, say. Most do nothing."""
        return

    def piece(self) -> int:
        """Tokens that may come before `tidy` is due, 1 or more."""
        return self.geometry.capacity

    def prefill(self, queries: F32, keys: F32, values: F32) -> None:
        """Encodes a whole prompt into the empty cache; the model attends to it exactly, outside.

        queries (n_heads, n, head_dim), keys and values (n_kv_heads, n, head_dim), float32. Without `sees_queries`
        the queries are those of the last tokens only.
        """
        self.extend(keys, values)

    @classmethod
    def finish_prefill(cls, caches: Sequence[Any]) -> None:
        """Called with every layer's cache after a prompt: for what is fitted over all layers. Most fit nothing."""
        return

    def adapt(self, parameters: Mapping[str, F32], source: str) -> None:
        """Takes what was trained for this layer of this scheme, by name, into the empty cache.

        ``source`` says in `notes` where it is from. Raises CacheError: most schemes have nothing to train.
        """
        raise CacheError(
            f"kv={self.name!r} takes no {source}: nothing in it is trained; leave `adapter` out", field="adapter"
        )

    def attend(self, queries: F32, keys: F32, values: F32, sinks: F32 | None = None) -> F32:
        """Appends n tokens and returns their causal attention over all that is kept.

        queries (n_heads, n, head_dim); returns (n_heads, n, head_dim), valid until the next call.
        sinks (n_heads,): a score of each head that belongs to no token, where the model has them.
        """
        n = keys.shape[1]
        self.require_room(n)
        out = self.workspace.array("attention", queries.shape)
        a = 0
        while a < n:  # a piece ends where tokens that come one by one would change how others are kept
            b = min(n, a + self.piece())
            self.append(keys[:, a:b], values[:, a:b])
            self._read(queries[:, a:b], out[:, a:b], sinks)
            self.tidy()
            a = b
        return out

    def _read(self, queries: F32, out: F32, sinks: F32 | None) -> None:
        """out (n_heads, n, head_dim) = attention of the latest n tokens."""
        target = out if out.flags.c_contiguous else self.workspace.array("attention.piece", out.shape)
        q, segments, visible = contiguous(queries), self.segments(), self.visible(out.shape[1])
        self.kernels.attend(q, segments, visible, target, sinks=sinks, cap=self.geometry.score_cap)
        if target is not out:
            out[:] = target

    def visible(self, n: int) -> Visible:
        """The positions that the queries of the latest n tokens see, the sliding window applied."""
        hi = np.arange(self.n_seen - n + 1, self.n_seen + 1, dtype=np.int64)
        window = self.geometry.sliding_window
        return (np.zeros_like(hi) if window is None else np.maximum(hi - window, 0)), hi
