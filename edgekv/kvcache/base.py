"""What every KV scheme is: storage for one layer that appends, attends, rewinds, and knows its exact bytes."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from edgekv.errors import CacheError
from edgekv.kernels import Kernels, aligned
from edgekv.kernels.contract.segment import Segment, Visible
from edgekv.kernels.memory import Memory, contiguous
from edgekv.kvcache.soft_cap import attend_capped
from edgekv.types import F32, Array

Layout = dict[str, tuple[tuple[int, ...], str]]  # array name -> (shape, dtype)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """One layer's attention: heads, sizes, how many tokens it must hold, and its sliding window (None: all).

    score_cap: the soft bound of its scores (None: none), for schemes that can apply one.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    capacity: int
    layer: int = 0
    n_layers: int = 1
    sliding_window: int | None = None
    score_cap: float | None = None

    @property
    def n_rep(self) -> int:
        """Query heads that share one key-value head."""
        return self.n_heads // self.n_kv_heads


EXAMPLE = Geometry(n_heads=1, n_kv_heads=1, head_dim=128, capacity=1 << 16)


class Workspace:
    """Scratch buffers by name, grown when needed and shared by all layers of a session; in ``memory``."""

    def __init__(self, memory: Memory = aligned) -> None:
        self.memory = memory
        self._buffers: dict[str, Array] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """A C-contiguous array of the shape, contents undefined, valid until the name is asked for again."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = self.memory.empty((size,), dtype)
        return buffer[:size].reshape(shape)

    def buffers(self) -> list[Array]:
        """All of them."""
        return list(self._buffers.values())


@dataclasses.dataclass(frozen=True)
class CacheState:
    """All that one layer's attention depends on; ``counters`` and ``fitted`` are ready for JSON."""

    counters: dict[str, int]
    fitted: dict[str, Any]
    arrays: dict[str, Array]


def layout_bytes(layout: Layout) -> int:
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in layout.values())


class KVCache(abc.ABC):
    """Keys and values of one layer, in whatever form the scheme keeps them.

    The cache owns attention: dense keys and values never go back to the model. Arrays are allocated
    once for ``geometry.capacity`` tokens. Queries arrive multiplied by the layer's score scale. Whatever counts
    tokens is an int attribute ``n_...``, so that `state` finds it.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    gives_up: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()  # names that it had before, still understood
    version: ClassVar[int] = 1  # of what the arrays mean: a saved cache of another one is refused
    packs_like: ClassVar[tuple[str, ...]] = ()  # other schemes, whose kernels it comes to use as it fills
    bytes_knob: ClassVar[str | None] = None  # the knob that bounds all layers' bytes: a session's `kv_budget`
    exact_when_short: ClassVar[bool] = False  # no loss beyond f16 rounding for the first 64 tokens
    Knobs: ClassVar[type]  # a dataclass; its `aliases`, where it has them, name fields as they were called before
    sees_queries: ClassVar[bool] = False  # `prefill` needs those of the whole prompt
    tidies_alike: ClassVar[bool] = True  # `tidy` differs from time to time in counters alone: no array is replaced
    caps_scores: ClassVar[bool] = False  # can bound scores softly (`Geometry.score_cap`)
    exact_prefill = True  # False: a prompt attends through the cache, as the adapted model was trained to

    def __init_subclass__(cls) -> None:
        cls.aliases = cls.__dict__.get("aliases", ())  # those of another scheme are not inherited

    def __init__(self, geometry: Geometry, knobs: Any) -> None:
        self.geometry, self.knobs = geometry, knobs
        self.n_seen = 0  # tokens appended so far
        self.arrays: dict[str, Array] = {}

    @classmethod
    def exact_on_text(cls, knobs: Any) -> bool:
        """Whether text loses nothing but f16 rounding: then there is nothing to gate."""
        return False

    @classmethod
    def window_codecs(cls, knobs: Any) -> Callable[[int, int, int], tuple[Any, Any]] | None:
        """How a sliding layer may keep its window alone: codecs of keys and values by KV heads, tokens, head_dim.

        None: it is kept as other layers are. Such a layer must lose no more than the others do. It is kept so
        only where that takes fewer bytes.
        """
        return None

    @classmethod
    def kinds(cls, knobs: Any) -> set[str] | None:
        """Of the codecs that its segments can have: a device that reads them all can run the scheme.

        None: the policy works on arrays of the host.
        """
        return None

    @abc.abstractmethod
    def layout(self) -> Layout:
        """Every array that the scheme keeps; nothing else grows with the context."""

    def allocate(self, kernels: Kernels, workspace: Workspace) -> None:
        """Takes the memory; the pages are touched as tokens arrive."""
        self.kernels, self.workspace = kernels, workspace
        zeros = workspace.memory.zeros
        self.arrays = {name: zeros(shape, dtype) for name, (shape, dtype) in self.layout().items()}

    @property
    def planned_bytes(self) -> int:
        """Bytes that `allocate` takes: the formula."""
        return layout_bytes(self.layout())

    @property
    def nbytes(self) -> int:
        """Bytes of the allocated arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def visual_bytes(self) -> int | None:
        """Bytes that hold the spans that `mark_images` named; None: the scheme does not keep these apart."""
        return None

    @property
    def n_kept(self) -> int:
        """Tokens that a query can still reach."""
        return self.n_seen

    @abc.abstractmethod
    def bytes_read(self) -> int:
        """Bytes that the attention of one more token must touch at the present length."""

    def prefill(self, queries: F32, keys: F32, values: F32) -> None:
        """Encodes a whole prompt into the empty cache; the model attends to it exactly, outside.

        queries (n_heads, n, head_dim), keys and values (n_kv_heads, n, head_dim), float32. Without `sees_queries`
        the queries are those of the last tokens only.
        """
        self.extend(keys, values)

    def mark_images(self, spans: Sequence[tuple[int, int]]) -> None:
        """Says which tokens of the coming prompt stand for images: ranges (first, last + 1) from its start on.

        Called on every layer's cache before `prefill`. Most schemes treat all tokens alike.
        """
        return

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

    @abc.abstractmethod
    def extend(self, keys: F32, values: F32) -> None:
        """Appends keys and values (n_kv_heads, n, head_dim) without attending."""

    def attend(self, queries: F32, keys: F32, values: F32) -> F32:
        """Appends n tokens and returns their causal attention over all that is kept.

        queries (n_heads, n, head_dim); returns (n_heads, n, head_dim), valid until the next call.
        """
        n = keys.shape[1]
        self.require_room(n)
        out = self.workspace.array("attention", queries.shape)
        a = 0
        while a < n:  # a piece ends where tokens that come one by one would change how others are kept
            b = min(n, a + self.piece())
            self.append(keys[:, a:b], values[:, a:b])
            self._read(queries[:, a:b], out[:, a:b])
            self.tidy()
            a = b
        return out

    def piece(self) -> int:
        """Tokens that may come before `tidy` is due, 1 or more."""
        return self.geometry.capacity

    @abc.abstractmethod
    def append(self, keys: F32, values: F32) -> None:
        """Stores at most `piece` tokens (n_kv_heads, n, head_dim), to be seen by their own queries."""

    @abc.abstractmethod
    def segments(self) -> list[Segment]:
        """What the queries of the latest tokens read."""

    def tidy(self) -> None:
        """What follows once the queries of the latest tokens have read: packing, say. Most do nothing."""
        return

    def _read(self, queries: F32, out: F32) -> None:
        """out (n_heads, n, head_dim) = attention of the latest n tokens."""
        target = out if out.flags.c_contiguous else self.workspace.array("attention.piece", out.shape)
        q, segments, visible = contiguous(queries), self.segments(), self.visible(out.shape[1])
        cap = self.geometry.score_cap
        if cap is None:
            self.kernels.attend(q, segments, visible, target)
        else:
            attend_capped(self.kernels, self.workspace.array, q, segments, visible, cap, target)
        if target is not out:
            out[:] = target

    def tidy_is_due(self) -> bool:
        """Whether `tidy` would do something, where `is_steady` holds of the token before."""
        return False

    def is_steady(self) -> bool:
        """Whether the next token is only appended and read before `tidy`: nothing is chosen or laid out anew.

        Steps of such tokens differ in nothing but counters, so that one can be replayed for another; and so does
        what `tidy` does when it is due.
        """
        return False

    def tentative_tokens(self) -> int:
        """How many of the next tokens, appended by one `attend`, can be taken back as if they had never come.

        `advance` with a negative count does that. 0 where a token has a say in what is kept of others.
        """
        return 0

    def advance(self, n: int) -> None:
        """Counts n tokens that a replayed step appends, where `is_steady` holds; n < 0 takes the latest back.

        What is taken back are tokens within `tentative_tokens`, or counted ones.
        """
        self.n_seen += n

    def restart(self, n: int) -> int:
        """After how many tokens computing is best taken up again when all but the first ``n`` are forgotten.

        At most n, which is below `n_seen`. Less where the last of them are to be computed once more.
        """
        return n

    def truncate(self, n: int, again: int = 0) -> int:
        """Forgets all but the first ``n`` tokens (at most `n_seen`); returns how many it could keep.

        Schemes that can't rewind to the very token keep fewer, and the session computes the rest again. The
        ``again`` tokens that follow will be those that followed before: what is stored of them may be used.
        """
        self.n_seen = n
        return n

    def state(self) -> CacheState:
        """What a cache of the same scheme, knobs and geometry needs to go on from here; arrays are not copied."""
        counters = {name: int(value) for name, value in vars(self).items() if name.startswith("n_")}
        return CacheState(counters, self.fitted(), self.arrays)

    def prepare(self, counters: Mapping[str, int], fitted: Mapping[str, Any]) -> dict[str, Array]:
        """Takes a state's counters and fitted values into the just allocated cache.

        Returns the arrays, zero where nothing is written yet, to be filled with the state's. Raises ValueError for
        counters that contradict each other, and for fitted values that no conversation has.
        """
        vars(self).update(counters)
        if not self.consistent():
            raise ValueError(f"counters {dict(counters)}")
        self.load_fitted(fitted)
        return self.arrays

    def consistent(self) -> bool:
        """Whether the counters agree with each other and with the geometry: those of a file may lie."""
        return 0 <= self.n_seen <= self.geometry.capacity

    def readable(self) -> bool:
        """Whether arrays that were filled from a file hold nothing that would lead a kernel out of bounds."""
        return True

    def fitted(self) -> dict[str, Any]:
        """What the conversation decided beside counters and arrays, ready for JSON. Most schemes fit nothing."""
        return {}

    def load_fitted(self, fitted: Mapping[str, Any]) -> None:
        """Takes what `fitted` gave; afterwards `arrays` have the shapes that they had then."""
        return

    def notes(self) -> list[str]:
        """What the user must know about this run's cache, one line each."""
        return []

    def require_room(self, n: int) -> None:
        if self.n_seen + n > self.geometry.capacity:
            raise CacheError(
                f"the cache holds {self.n_seen} of {self.geometry.capacity} tokens, {n} more do not fit; "
                "raise `ctx`",
                field="ctx",
                value=self.geometry.capacity,
                accepted=[f"{self.n_seen + n} or more"],
            )

    def visible(self, n: int) -> Visible:
        """The positions that the queries of the latest n tokens see, the sliding window applied."""
        hi = np.arange(self.n_seen - n + 1, self.n_seen + 1, dtype=np.int64)
        window = self.geometry.sliding_window
        return (np.zeros_like(hi) if window is None else np.maximum(hi - window, 0)), hi


def rewind(caches: Sequence[KVCache], n: int) -> int:
    """Makes every layer forget all but the first ``n`` tokens; returns how many all of them still hold.

    Those from there to the n-th, if any, come again.
    """
    start = min([n, *(cache.n_seen if cache.n_seen <= n else cache.restart(n) for cache in caches)])
    while True:
        kept = min(cache.truncate(start, n - start) for cache in caches)
        if kept == start:
            return start
        start = kept
