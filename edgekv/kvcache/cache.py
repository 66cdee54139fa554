"""A layer's state: `LayerState`, base of all, and `KVCache`, base of every scheme of the layers that attend."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from edgekv.codecs.codec import Layout
from edgekv.errors import CacheError
from edgekv.kernels import Kernels
from edgekv.kernels.arrays import contiguous
from edgekv.kernels.interface import Segment, Visible
from edgekv.kernels.interface import Workspace as Workspace
from edgekv.types import F32, Array


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The shape of one layer's attention.

    capacity: tokens that its cache must hold. sliding_window: tokens that a query sees; None: all. score_cap: soft
    bound of the scores; None: none. context: tokens that budgets are fractions of, where ``capacity`` is less than
    the context; else 0.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    capacity: int
    layer: int = 0
    n_layers: int = 1
    sliding_window: int | None = None
    score_cap: float | None = None
    context: int = 0

    def cut(self, n_tokens: int) -> Geometry:
        """Returns the geometry of a cache for ``n_tokens`` of the context."""
        return dataclasses.replace(self, capacity=n_tokens, context=self.context or self.capacity)

    @property
    def n_rep(self) -> int:
        """Query heads that share one KV head."""
        return self.n_heads // self.n_kv_heads


EXAMPLE = Geometry(n_heads=1, n_kv_heads=1, head_dim=128, capacity=1 << 16)


def layout_bytes(layout: Layout) -> int:
    """Returns the bytes of all arrays of a layout."""
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in layout.values())


@dataclasses.dataclass(frozen=True)
class CacheState:
    """All that a layer's next token depends on: what is saved. ``counters`` and ``extra`` are ready for JSON."""

    counters: dict[str, int]
    extra: dict[str, Any]
    arrays: dict[str, Array]


class LayerState(abc.ABC):
    """Base of a layer's state: its memory and bytes, rewinding, saving and restoring.

    A subclass must define `layout`, `bytes_read` and `capacity`. Whatever counts tokens is an int attribute
    ``n_...``, so that `state` finds it.
    """

    def __init__(self) -> None:
        self.n_seen = 0  # tokens appended so far
        self.arrays: dict[str, Array] = {}

    def notes(self) -> list[str]:
        """Returns what a user must know about this cache, a line each."""
        return []

    # Memory and bytes.

    @property
    @abc.abstractmethod
    def capacity(self) -> int:
        """The number of tokens that there is room for."""

    @abc.abstractmethod
    def layout(self) -> Layout:
        """Returns shape and dtype of every array by its name; nothing else grows with the context."""

    @abc.abstractmethod
    def bytes_read(self) -> int:
        """Returns the bytes that one more token must read at the present length."""

    def allocate(self, kernels: Kernels, workspace: Workspace) -> None:
        """Allocates the arrays, of zeros, whose pages are touched only as tokens arrive."""
        self.kernels, self.workspace = kernels, workspace
        zeros = workspace.memory.zeros
        self.arrays = {name: zeros(shape, dtype) for name, (shape, dtype) in self.layout().items()}

    def cut(self, n_tokens: int) -> LayerState:
        """Returns an unallocated state for the first ``n_tokens`` (1 or more), to count bytes.

        Budgets that are fractions of the context stay those of the whole context.
        """
        return self

    def planned_bytes(self, n_tokens: int | None = None) -> int:
        """Returns the bytes of a state for ``n_tokens``; None: of this one, as `allocate` takes them."""
        return layout_bytes((self if n_tokens is None else self.cut(n_tokens)).layout())

    @property
    def nbytes(self) -> int:
        """Bytes of the allocated arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def mark_images(self, spans: Sequence[tuple[int, int]]) -> None:
        """Takes the ranges (first, last + 1) of the coming prompt's tokens that are images."""
        return

    def require_room(self, n: int) -> None:
        """Raises CacheError (field ctx) where n more tokens do not fit."""
        if self.n_seen + n > self.capacity:
            raise CacheError(
                f"the cache holds {self.n_seen} tokens, {n} more do not fit",
                field="ctx",
                value=self.capacity,
                accepted=[f"{self.n_seen + n} or more"],
            )

    # Rewinding, and replaying steps: callers use `rewind` below, `advance` for drafts and captured steps.

    def recompute_from(self, n: int) -> int:
        """Returns how many tokens a rewind to the first ``n`` (< `n_seen`) should keep: n at most.

        Less where the last of them are better computed again.
        """
        return n

    def checkpoint_at(self, n: int) -> None:
        """Notes that a rewind to the first ``n`` tokens (`n_seen` or more) is likely."""
        return

    def truncate(self, n: int, n_same: int = 0) -> int:
        """Forgets all but the first ``n`` tokens (at most `n_seen`); returns how many of them could be kept.

        The session computes the others again. n_same: the next so many tokens will be those that are dropped now,
        so that what is stored of them may be used again.
        """
        self.n_seen = n
        return n

    def rollback_tokens(self) -> int:
        """Returns how many tokens, appended next by one `attend`, `advance` can take back."""
        return 0

    def advance(self, n: int) -> None:
        """Counts n tokens that a replayed step appended while `is_static`; n < 0 takes the latest back."""
        self.n_seen += n

    def is_static(self) -> bool:
        """Returns whether the next step makes the same launches as this one, with other counters."""
        return False

    def needs_flush(self) -> bool:
        """Returns whether `flush` would do something, where `is_static` held for the token before."""
        return False

    def fixed(self) -> list[F32]:
        """Returns `Codec.fixed` of each codec that has it."""
        return []

    # Saving and restoring. The contents of a file are untrusted.

    def state(self) -> CacheState:
        """Returns what another cache of the same scheme and geometry needs to go on; arrays are not copied."""
        counters = {name: int(value) for name, value in vars(self).items() if name.startswith("n_")}
        return CacheState(counters, self.extra_state(), self.arrays)

    def restore(self, counters: Mapping[str, int], extra: Mapping[str, Any]) -> dict[str, Array]:
        """Takes counters and extra state of `state` into this allocated cache; returns the arrays to fill.

        The arrays have the shapes of `layout`, and are zero where nothing was written yet. Raises ValueError for
        counters that contradict each other and for an extra state that no conversation has.
        """
        vars(self).update(counters)
        if not self.counters_valid():
            raise ValueError(f"counters {dict(counters)}")
        self.load_extra_state(extra)
        return self.arrays

    def counters_valid(self) -> bool:
        """Returns whether the counters agree with each other and with the geometry."""
        return 0 <= self.n_seen <= self.capacity

    def arrays_valid(self) -> bool:
        """Returns whether the arrays, filled from a file, lead no kernel out of bounds."""
        return True

    def extra_state(self) -> dict[str, Any]:
        """Returns what the conversation decided beside counters and arrays, ready for JSON."""
        return {}

    def load_extra_state(self, extra: Mapping[str, Any]) -> None:
        """Takes what `extra_state` gave; afterwards `arrays` have the shapes that they had then."""
        return


class KVCache(LayerState):
    """Base of the schemes: stores keys and values of one layer in a form of its own, and attends over them.

    Dense keys and values never go back to the model. Arrays are allocated once for ``geometry.capacity`` tokens.
    Queries arrive multiplied by the layer's score scale.

    A scheme must define the class attributes without a value below, `layout`, `bytes_read`, `append_prefill`,
    `append` and `segments`. `FullCache` and `SinkWindowCache` define most of this for schemes that are two codecs.
    Config: a frozen dataclass with defaults. summary, tradeoff: a phrase each for the table of schemes.
    """

    name: ClassVar[str]  # as in ``--kv name``
    paper: ClassVar[str]
    summary: ClassVar[str]
    tradeoff: ClassVar[str]
    Config: ClassVar[type]

    version: ClassVar[int] = 1
    """The version of what the arrays mean: a saved cache of another one is refused."""
    needs_prompt_queries: ClassVar[bool] = False
    """Whether `prefill` needs the queries of the whole prompt."""
    flush_is_static: ClassVar[bool] = True
    """Whether a GPU may capture `flush`: one differs from another in counters alone, and no array is replaced."""
    exact_prefill = True
    """False where a prompt attends through the cache, as an adapted model was trained to."""

    @classmethod
    def is_lossless_on_text(cls, config: Any) -> bool:
        """Returns whether text loses nothing beyond f16 rounding, so that there is nothing to gate."""
        return False

    @classmethod
    def window_codecs(cls, config: Any) -> Callable[[int, int, int], tuple[Any, Any]] | None:
        """Returns what makes the two codecs of a sliding layer's window: (KV heads, tokens, head_dim) -> codecs.

        They must lose no more than the other layers do, and are used only where that takes fewer bytes. None: a
        sliding layer is stored as the others are.
        """
        return None

    @classmethod
    def codecs_used(cls, config: Any) -> set[type[Any]] | None:
        """Returns the classes of codecs in its segments: a device whose kernels read them all can run the scheme.

        None: the scheme works on arrays of the host.
        """
        return None

    def __init__(self, geometry: Geometry, config: Any) -> None:
        super().__init__()
        self.geometry, self.config = geometry, config

    @property
    def capacity(self) -> int:
        return self.geometry.capacity

    def cut(self, n_tokens: int) -> KVCache:
        return type(self)(self.geometry.cut(n_tokens), self.config)

    @abc.abstractmethod
    def append_prefill(self, keys: F32, values: F32) -> None:
        """Appends keys and values (n_kv_heads, n, head_dim) without attending."""

    @abc.abstractmethod
    def append(self, keys: F32, values: F32) -> None:
        """Stores at most `max_append_tokens` tokens (n_kv_heads, n, head_dim), to be seen by their own queries."""

    @abc.abstractmethod
    def segments(self) -> list[Segment]:
        """Returns the segments that the queries of the latest tokens attend to."""

    def flush(self) -> None:
        """Packs what is due, after the queries of the latest tokens have been answered."""
        return

    def max_append_tokens(self) -> int:
        """Returns how many tokens (1 or more) may come before `flush` is due."""
        return self.geometry.capacity

    def prefill(self, queries: F32, keys: F32, values: F32) -> None:
        """Encodes a whole prompt into the empty cache; the model attends to it exactly, outside.

        queries (n_heads, n, head_dim), keys and values (n_kv_heads, n, head_dim), float32. Without
        `needs_prompt_queries` the queries are those of the last tokens only.
        """
        self.append_prefill(keys, values)

    @classmethod
    def finish_prefill(cls, caches: Sequence[Any]) -> None:
        """Fits what all layers share; called once after a prompt, with every layer's cache."""
        return

    def load_adapter(self, parameters: Mapping[str, F32], source: str) -> None:
        """Takes what was trained for this layer into the empty cache: arrays (n_kv_heads, ...) or () by name.

        source: where they are from, for `notes`. Raises CacheError where the scheme has nothing to train.
        """
        raise CacheError(
            f"the scheme {self.name} takes no {source}: nothing in it is trained",
            field="adapter",
            advice="leave {adapter} out",
        )

    def attend(self, queries: F32, keys: F32, values: F32, sinks: F32 | None = None) -> F32:
        """Appends n tokens and returns their causal attention (n_heads, n, head_dim), valid until the next call.

        queries (n_heads, n, head_dim); keys and values (n_kv_heads, n, head_dim). sinks (n_heads,): a score of
        each head that belongs to no token.
        """
        n = keys.shape[1]
        self.require_room(n)
        out = self.workspace.array("attention", queries.shape)
        a = 0
        while a < n:  # a piece ends where tokens that come one by one would be packed
            b = min(n, a + self.max_append_tokens())
            self.append(keys[:, a:b], values[:, a:b])
            self.read(queries[:, a:b], out[:, a:b], sinks)
            self.flush()
            a = b
        return out

    def attend_stored(self, queries: F32, sinks: F32 | None) -> F32:
        """Returns what `attend` does of the latest n tokens, which something else has stored and counted."""
        out: F32 = self.workspace.array("attention", queries.shape)
        self.read(queries, out, sinks)
        self.flush()
        return out

    def read(self, queries: F32, out: F32, sinks: F32 | None) -> None:
        """Writes the attention of the latest n tokens to out (n_heads, n, head_dim); a scheme may override it."""
        target = out if out.flags.c_contiguous else self.workspace.array("attention.piece", out.shape)
        q, segments, visible = contiguous(queries), self.segments(), self.visible(out.shape[1])
        self.kernels.attend(q, segments, visible, target, sinks=sinks, cap=self.geometry.score_cap)
        if target is not out:
            out[:] = target

    def visible(self, n: int) -> Visible:
        """Returns lo, hi (n,): the queries of the latest n tokens see the positions lo..hi, within the window."""
        hi = np.arange(1 - n, 1, dtype=np.int64) + int(self.n_seen)  # as captured: kernels add their delta
        window = self.geometry.sliding_window
        return (np.zeros_like(hi) if window is None else np.maximum(hi - window, 0)), hi


def rewind(caches: Sequence[LayerState], n: int) -> int:
    """Makes every layer forget all but the first ``n`` tokens; returns how many of these all layers still hold.

    The others of the n must be computed again.
    """
    start = min([n, *(cache.n_seen if cache.n_seen <= n else cache.recompute_from(n) for cache in caches)])
    while (n_held := min(cache.truncate(start, n - start) for cache in caches)) < start:
        start = n_held
    return start
