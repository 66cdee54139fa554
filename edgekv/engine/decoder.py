"""The decoder, which runs tokens through embedding, layers and head; and `Backend`, with which it computes."""

from __future__ import annotations

import abc
import copy
import functools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from edgekv.engine.model import Model
from edgekv.errors import EdgeKVError
from edgekv.kernels import Kernels, kernel_cache
from edgekv.kernels.arrays import contiguous, to_host
from edgekv.kernels.interface import GEMV_ROWS
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import KVCache, LayerState, Workspace, rewind
from edgekv.kvcache.recurrent import RecurrentState, attending, recurrent_states
from edgekv.machine import available_memory_bytes
from edgekv.models.config import ModelConfig
from edgekv.models.rope import RopeConfig, frequencies
from edgekv.types import F32, I64, TaskProgress
from edgekv.weights.checkpoint_weights import Weights
from edgekv.weights.formats import ModelFormat
from edgekv.weights.ops import LoraDeltas, WeightOps

CHUNK = 256  # tokens of a prompt per pass of a layer: bounds the activations
MAX_SCORES = 1 << 24  # float32 alive at once when a prompt continues a filled cache
WARM_UP_TOKENS = 700  # beyond the windows and budgets that the schemes have by default
WARM_UP_ROWS = (1, 5, 80)  # tokens at once: decoding, drafts, and more than a packed block

Pause = Callable[[], None]
Upload = Callable[[F32], Any]


class RopeRotation(NamedTuple):
    """The rotation of n positions: cos and sin (n, rotated channels / 2), factors of queries (n, 1) or None."""

    cos: F32
    sin: F32
    query_factors: F32 | None = None

    def rows(self, first: int, stop: int) -> RopeRotation:
        """Returns the rotation of the positions first..stop among these."""
        return RopeRotation(*(None if x is None else x[first:stop] for x in self))  # type: ignore[arg-type]


class LayerRopes:
    """The rotations of all layers. Those of positions below ``capacity`` are computed once, unless they change."""

    def __init__(
        self, layer_ropes: Sequence[RopeConfig | None], capacity: int, upload: Upload = lambda array: array
    ) -> None:
        self._upload = upload
        self._ropes = [rope for i, rope in enumerate(layer_ropes) if rope not in layer_ropes[:i]]
        self._rope_of = [self._ropes.index(rope) for rope in layer_ropes]
        self._fixed = [
            self._compute(rope, 0, capacity, capacity) if rope is None or capacity <= rope.fixed_up_to else None
            for rope in self._ropes
        ]

    @property
    def is_fixed(self) -> bool:
        """Whether no position's rotation depends on the length of the sequence."""
        return None not in self._fixed

    def at(self, start: int, n: int) -> list[RopeRotation]:
        """Returns each layer's rotation of the positions start..start+n, the last of the sequence so far."""
        rotations = [
            fixed.rows(start, start + n)
            if fixed and start + n <= len(fixed.cos)
            else self._compute(rope, start, n, start + n)
            for rope, fixed in zip(self._ropes, self._fixed, strict=True)
        ]
        return [rotations[k] for k in self._rope_of]

    def _compute(self, rope: RopeConfig | None, start: int, n: int, seq_len: int) -> RopeRotation:
        if rope is None:
            empty = self._upload(np.empty((n, 0), np.float32))
            return RopeRotation(empty, empty)
        freq, factor = frequencies(rope, seq_len)
        positions = np.arange(start, start + n)[:, None]
        cos, sin = (self._upload((f(positions * freq) * factor).astype(np.float32)) for f in (np.cos, np.sin))
        if not rope.query_growth:
            return RopeRotation(cos, sin)
        growth = 1 + rope.query_growth * np.log1p(positions // rope.original)
        return RopeRotation(cos, sin, self._upload(growth.astype(np.float32)))


class ScoreOptions(NamedTuple):
    """How a layer changes scores: sliding window in tokens, soft bound, sinks (n_heads,) (scores of no token)."""

    window: int | None = None
    cap: float | None = None
    sinks: F32 | None = None


def visible_range(t0: int, t1: int, window: int | None) -> tuple[int, I64, I64]:
    """Returns the first token that t0..t1 see and, counted from it, the range lo, hi (t1 - t0,) that each sees."""
    first = 0 if window is None else max(0, t0 + 1 - window)
    hi = np.arange(t0 + 1, t1 + 1, dtype=np.int64) - first
    return first, np.zeros_like(hi) if window is None else np.maximum(hi - window, 0), hi


class Backend(abc.ABC):
    """Base of the devices that a decoder computes on, whose memory holds activations and caches.

    chunk: tokens of a prompt whose activations are alive at a time. keeps_kernels: whether compiled kernels are
    remembered by `edgekv.kernels.kernel_cache`. device_format: returns the format that weights of a store have in
    the device's memory.
    """

    weights: Weights
    ops: WeightOps
    kernels: Kernels
    workspace: Workspace
    threads: int
    chunk: int = CHUNK
    keeps_kernels = False
    free_bytes: Callable[[], int] = staticmethod(lambda: available_memory_bytes())
    device_format: Callable[[ModelFormat], ModelFormat] = staticmethod(lambda form: form)

    @classmethod
    def available(cls, spec: CacheSpec, config: ModelConfig | None = None) -> bool:
        """Returns whether this machine has the device, and the device the scheme and the layers of a model."""
        return True

    @classmethod
    def require(
        cls, spec: CacheSpec, config: ModelConfig | None = None, *, slots: int = 1, loras: bool = False
    ) -> None:
        """Raises an EdgeKVError that says what is missing for the scheme, the model's layers, slots or LoRAs."""
        return

    @classmethod
    def precompiling(cls, spec: CacheSpec) -> AbstractContextManager[None]:
        """Returns a context, for the time while a model is read, in which the scheme's kernels are compiled."""
        return nullcontext()

    @classmethod
    @abc.abstractmethod
    def open(cls, model: Model, form: ModelFormat, threads: int | None, progress: TaskProgress | None) -> Backend:
        """Loads the model's weights in a format. threads: None: all cores, for products as many as are fastest."""

    @classmethod
    def decoder(
        cls, model: Model, form: ModelFormat, capacity: int, threads: int | None, progress: TaskProgress | None
    ) -> Decoder:
        """Loads weights as `open` does; returns a decoder of conversations of up to ``capacity`` tokens."""
        return Decoder(cls.open(model, form, threads, progress), capacity)

    def new_workspace(self) -> Workspace:
        """Returns scratch memory of the device."""
        return Workspace()

    def upload(self, array: F32) -> Any:
        """Returns a copy in the device's memory of an array of any shape."""
        return array

    @abc.abstractmethod
    def embed(self, tokens: Sequence[int] | I64, start: int) -> F32:
        """Returns the embeddings (n, hidden) float32 of n tokens at positions start..start+n."""

    @abc.abstractmethod
    def prefill_attention(self, queries: F32, keys: F32, values: F32, options: ScoreOptions) -> None:
        """Replaces queries (n_heads, n, head_dim), already scaled, by their exact causal attention.

        keys, values (n_kv_heads, m, head_dim) with m >= n; the queries are those of the last n tokens. That of
        token t sees keys max(0, t + 1 - options.window)..t.
        """

    def prefill_layer(
        self, i: int, cache: KVCache, x: F32, rotation: RopeRotation, norms: tuple[Any, Any]
    ) -> bool:
        """Runs layer i over a prompt x (n, hidden) in place and fills its cache; False: not supported."""
        return False

    def reserve_row(self, cache: KVCache) -> tuple[Any, ...]:
        """Counts a token of a cache and returns where `split_rope` stores it; empty: the cache does both."""
        return ()

    def new_graph_runner(self, decoder: Decoder) -> Any | None:
        """Returns what replays the decoder's steps from a CUDA graph; None: the device captures nothing."""
        return None


class Decoder:
    """The computation of one model. It has weights and scratch; the conversation is in the caches.

    capacity: tokens of the longest conversation.
    """

    def __init__(self, backend: Backend, capacity: int) -> None:
        self.backend, self.weights, self.ops = backend, backend.weights, backend.ops
        self.kernels, self.workspace = backend.kernels, backend.workspace
        self.threads, self.chunk = backend.threads, backend.chunk
        self.arch, self._pid = self.weights.arch, os.getpid()
        self.config = c = self.arch.config
        self._ropes = LayerRopes(c.layer_ropes, capacity, backend.upload)
        none, normed = backend.upload(np.empty(0, np.float32)), c.attending if c.qk_norm else ()
        layers = range(c.n_layers)
        self._norms = [
            (self._vector(f"{i}.norm_q"), self._vector(f"{i}.norm_k")) if i in normed else (none, none)
            for i in layers
        ]
        sinks = [self._vector(f"{i}.sinks") if c.attention_sinks else None for i in layers]
        self._options = [ScoreOptions(c.layer_windows[i], c.score_cap, sinks[i]) for i in layers]
        self._recurrence_weights = [  # of layers that do not attend; convolutions as (taps, channels)
            {
                name.partition(".")[2]: backend.upload((a[:, 0].T if a.ndim == 3 else a).copy())
                for name in self.arch.layer_arrays(i)
                for a in (self.weights.array(name),)
            }
            for i in layers
        ]
        self.graph_runner = backend.new_graph_runner(self)

    def _vector(self, name: str) -> Any:
        # A copy: mapped vectors are read-only, to Numba another type, for which a kernel is compiled again.
        return self.backend.upload(self.weights.vector(name).copy())

    def with_lora(self, deltas: LoraDeltas) -> Decoder:
        """Returns a decoder with low-rank changes beside the weights. Raises ConfigError if unsupported."""
        other = copy.copy(self)
        other.ops = self.ops.with_lora(deltas)
        return other

    @property
    def can_replay(self) -> bool:
        """Whether two steps differ in the position alone, and rotations are read from a table by it."""
        return self._ropes.is_fixed and not any(rope.query_growth for rope in self.config.ropes)

    def embed(self, tokens: Sequence[int] | I64, start: int) -> F32:
        """Returns the embeddings (n, hidden) float32 of tokens at positions start..start+n.

        Raises EdgeKVError in a forked child, which lacks the threads of the pools and would wait for them.
        """
        if os.getpid() != self._pid:
            raise EdgeKVError(
                f"the model was loaded by process {self._pid} and this is {os.getpid()}, forked from it: start "
                "processes with multiprocessing's 'spawn', or fork before anything is loaded"
            )
        return self.backend.embed(tokens, start)

    def insert_embeddings(self, rows: F32, x: F32, start: int, at: int) -> None:
        """Writes embeddings (m, hidden) to x (n, hidden) from row ``at`` on. start: position of x's first row."""
        if self.arch.learned_positions:
            first = start + at
            rows = rows + to_host(self.weights.rows("positions", np.arange(first, first + len(rows))))
        x[at : at + len(rows)] = np.asarray(rows, like=x)

    def head(self, x: F32) -> F32:
        """Returns logits (n, vocab) float32 of hidden states (n, hidden)."""
        result: F32 = self.arch.head(self.ops.for_rows(len(x)), x)
        return result

    def max_draft_tokens(self, caches: Sequence[LayerState]) -> int:
        """Returns how many tokens, appended next by one `steps`, can be taken back from all caches."""
        if not self._ropes.is_fixed:  # what is taken back would have been rotated for another length
            return 0
        return min(cache.rollback_tokens() for cache in caches)

    def step(self, token: int, caches: Sequence[LayerState]) -> F32:
        """Appends one token; returns the logits (vocab,) after it, valid until the next step."""
        result: F32 = self.steps((token,), caches)[0]
        return result

    def steps(self, tokens: Sequence[int], caches: Sequence[LayerState]) -> F32:
        """Appends n tokens, a few; returns the logits (n, vocab) after each, valid until the next step."""
        if len(tokens) == 1 and self.graph_runner is not None:
            result: F32 = self.graph_runner.step(tokens[0], caches)[None]
            return result
        return self.head(self.forward(self.embed(tokens, caches[0].n_seen), caches))

    def step_batch(self, tokens: Sequence[int], conversations: Sequence[Sequence[LayerState]]) -> F32:
        """Appends a token to each of n conversations; returns the logits (n, vocab).

        GEMV_ROWS conversations share a pass of the linear layers, which gives each what it would have alone.
        """
        starts = [caches[0].n_seen for caches in conversations]
        x = np.concatenate([self.embed((token,), start) for token, start in zip(tokens, starts, strict=True)])
        passes = (slice(a, a + GEMV_ROWS) for a in range(0, len(tokens), GEMV_ROWS))
        return np.concatenate([self.head(self.forward(x[rows], *conversations[rows])) for rows in passes])

    def forward(self, x: F32, *conversations: Sequence[LayerState]) -> F32:
        """Appends equally many tokens to each conversation, through `KVCache.attend`.

        x (n, hidden): embeddings, those of the first conversation first. Returns the hidden states (n, hidden).
        """
        n = len(x) // len(conversations)
        rotations = [self._ropes.at(caches[0].n_seen, n) for caches in conversations]
        for i in range(self.config.n_layers):
            projected, outs = self.pre_attention(i, x), []
            for j, caches in enumerate(conversations):
                out = self._attend(i, projected[j * n : (j + 1) * n], caches[i], rotations[j][i])
                outs.append(out if len(conversations) == 1 else out.copy())
            x = self.post_attention(i, x, outs[0] if len(outs) == 1 else np.concatenate(outs))
        return x

    def prefill(
        self,
        x: F32,
        caches: Sequence[LayerState],
        progress: Callable[[int, int], None] | None = None,
        exact: bool = True,
        pause: Pause = lambda: None,
    ) -> F32:
        """Turns x (n, hidden), an embedded prompt, into its hidden states in place, and fills the caches.

        With empty caches attention is exact, and each cache then encodes the whole prompt at once; only one
        layer's float32 keys and values are alive. A prompt that continues a filled cache, or is not to be
        ``exact``, goes through `KVCache.attend` in blocks: each token attends to the stored form of the earlier
        ones, as in decoding. pause() is called between chunks, and may decode tokens of other conversations.
        """
        n, start, attended = len(x), caches[0].n_seen, attending(caches)
        if self.graph_runner is not None:
            self.graph_runner.forget()  # a prompt may replace arrays of the caches
        exact = exact and start == 0 and attended[0].exact_prefill
        for i, (cache, rotation) in enumerate(zip(caches, self._ropes.at(start, n), strict=True)):
            if not (exact and isinstance(cache, KVCache)):
                for a in range(0, n, self.chunk):
                    rows = slice(a, a + self.chunk)
                    projected = self.pre_attention(i, x[rows])
                    attn_out = self._attend(i, projected, cache, rotation.rows(a, a + self.chunk))
                    x[rows] = self.post_attention(i, x[rows], attn_out)
                    pause()
            elif not self.backend.prefill_layer(i, cache, x, rotation, self._norms[i]):
                self._exact_layer(i, cache, x, rotation, pause)
            if progress:
                progress(i + 1, len(caches))
        if exact:
            type(attended[0]).finish_prefill(attended)
        return x

    def read_together(self, x: F32, n: int, first: int = 0, stop: int | None = None) -> F32:
        """Returns the hidden states (m * n, hidden) of m embedded prompts x (m * n, hidden) of n tokens each.

        They share a pass of the linear layers, and fill no caches. first, stop: layers to go through; x is the
        first one's input.
        """
        c, rotations = self.config, self._ropes.at(0, n)
        q, k, v = self._qkv_buffers("prefill", n)
        for i in range(c.n_layers)[first:stop]:
            projected, merged = self.pre_attention(i, x), []
            for a in range(0, len(x), n):
                rows = projected[a : a + n]
                self._split(i, rows, rotations[i], q, k, v)
                self.backend.prefill_attention(q, k, v, self._options[i])
                merged.append(self._merge(q, rows).copy())
            x = self.post_attention(i, x, np.concatenate(merged))
        return x

    def pre_attention(self, i: int, x: F32) -> F32:
        """Returns the projections (n, width) of x (n, hidden) before layer i: mostly queries, keys, values."""
        result: F32 = self.arch.pre_attention(self.ops.for_rows(len(x)), i, x)
        return result

    def post_attention(self, i: int, x: F32, attn_out: F32) -> F32:
        """Returns x (n, hidden) of the next layer, from x, which may be overwritten, and attn_out (n, width)."""
        result: F32 = self.arch.post_attention(self.ops.for_rows(len(x)), i, x, attn_out)
        return result

    def _attend(self, i: int, projected: F32, cache: LayerState, rotation: RopeRotation) -> F32:
        """Appends n tokens by their projections (n, width); returns the input of `post_attention`.

        It is valid until the next call.
        """
        if isinstance(cache, RecurrentState):
            return cache.run(projected, self._recurrence_weights[i])
        assert isinstance(cache, KVCache)
        n, sinks = len(projected), self._options[i].sinks
        q, k, v = self._qkv_buffers("step", n)
        row = self.backend.reserve_row(cache) if n == 1 else ()
        self._split(i, projected, rotation, q, k, v, *row)
        if n <= GEMV_ROWS:
            out = cache.attend_stored(q, sinks) if row else cache.attend(q, k, v, sinks)
            return self._merge(out, projected)
        out = self.workspace.array("step.out", q.shape)
        block = max(1, MAX_SCORES // (len(q) * (cache.n_seen + n)))
        for a in range(0, n, block):
            rows = slice(a, a + block)
            out[:, rows] = cache.attend(q[:, rows], k[:, rows], v[:, rows], sinks)
        return self._merge(out, projected)

    def _exact_layer(self, i: int, cache: KVCache, x: F32, rotation: RopeRotation, pause: Pause) -> None:
        """Runs layer i over a prompt x (n, hidden) in place, chunk by chunk, exactly; fills its cache."""
        n, c, array = len(x), self.config, self.workspace.array
        n_queries = n if cache.needs_prompt_queries else min(n, self.chunk)
        q = array("prefill.q", (c.n_heads, n_queries, c.head_dim))
        k, v = (array(f"prefill.{kind}", (c.n_kv_heads, n, c.head_dim)) for kind in "kv")
        for a in range(0, n, self.chunk):
            b = min(a + self.chunk, n)
            queries = q[:, a % n_queries : a % n_queries + b - a]
            projected = self.pre_attention(i, x[a:b])
            self._split(i, projected, rotation.rows(a, b), queries, k[:, a:b], v[:, a:b])
            out = array("prefill.out", queries.shape)
            out[:] = queries
            self.backend.prefill_attention(out, k[:, :b], v[:, :b], self._options[i])
            x[a:b] = self.post_attention(i, x[a:b], self._merge(out, projected))
            pause()
        cache.prefill(q, k, v)

    def _qkv_buffers(self, name: str, n: int, workspace: Workspace | None = None) -> list[F32]:
        """Returns buffers of queries (n_heads, n, head_dim), keys and values (n_kv_heads, n, head_dim)."""
        c, array = self.config, (workspace or self.workspace).array
        heads = ("q", c.n_heads), ("k", c.n_kv_heads), ("v", c.n_kv_heads)
        return [array(f"{name}.{kind}", (n_heads, n, c.head_dim)) for kind, n_heads in heads]

    def _split(self, i: int, projected: F32, rotation: RopeRotation, q: F32, k: F32, v: F32, *row: Any) -> None:
        """Splits layer i's fused projection into heads, normalises and rotates them, into q, k and v."""
        c, (cos, sin, query_factors) = self.config, rotation
        qkv = projected[:, : c.q_size + 2 * c.kv_size] if c.gated_attention else projected
        self.kernels.split_rope(qkv, cos, sin, q, k, v, c.layer_scales[i], *self._norms[i], c.norm_eps, *row)
        if query_factors is not None:
            q *= query_factors

    def _merge(self, out: F32, projected: F32) -> F32:
        """Returns out (n_heads, n, head_dim) as (n, n_heads * head_dim), and the projection's gates after it."""
        merged: F32 = contiguous(out.transpose(1, 0, 2)).reshape(out.shape[1], -1)
        if not self.config.gated_attention:
            return merged
        return np.concatenate([merged, projected[:, -self.config.q_size :]], axis=1)

    def warm_up(self, caches: Sequence[KVCache]) -> list[Callable[[], object]]:
        """Returns calls that compile every kernel of a conversation; none where all are compiled already.

        On random tokens they run a prompt, one token in an empty cache and in a filled one, a few at once as
        drafts are, and so many that a block is packed and all threads work.
        """
        cache, c, backend = caches[-1], self.config, self.backend
        linear = f"{type(self.ops).__name__} {getattr(self.weights, 'form', '')}"
        what = f"{type(cache).__name__} {cache.config} {cache.geometry} {c.model_type} {self.threads} {linear}"
        if backend.keeps_kernels and kernel_cache.is_warm(what):
            return []
        n, last, rng = cache.geometry.capacity, c.attending[-1], np.random.default_rng(0)
        cache.allocate(self.kernels, backend.new_workspace())
        qkv = backend.upload(rng.standard_normal((n, c.q_size + 2 * c.kv_size), np.float32))
        q, k, v = self._qkv_buffers("warm_up", n, backend.new_workspace())

        def split() -> None:
            for m, parts in ((1, self._qkv_buffers("step", 1)), (n, (q, k, v))):
                self._split(last, qkv[:m], self._ropes.at(0, m)[last], *parts)

        def attend(n_tokens: int) -> None:
            rows = slice(cache.n_seen, min(cache.n_seen + n_tokens, n))
            if rows.start < rows.stop:
                cache.attend(*(contiguous(x[:, rows]) for x in (q, k, v)))

        def prefill() -> None:
            rewind([cache], 0)
            m = max(1, n - sum(WARM_UP_ROWS))
            cache.prefill(q[:, :m], k[:, :m], v[:, :m])
            type(cache).finish_prefill([cache])

        def recur(i: int, state: RecurrentState) -> None:
            state.allocate(self.kernels, backend.new_workspace())
            for m in (1, CHUNK):
                x = rng.standard_normal((m, state.recurrence.projected), np.float32)
                state.run(x, self._recurrence_weights[i])

        others = [i for i in range(c.n_layers) if i not in c.attending]
        states = zip(others, recurrent_states(c, 2 * CHUNK), strict=False)
        kinds = {type(state.recurrence): (i, state) for i, state in states}
        calls = [*self.ops.warm_up(), split, lambda: backend.prefill_attention(q, k, v, ScoreOptions())]
        # Encoders first: another process compiles attention meanwhile (`Backend.precompiling`).
        attends = [functools.partial(attend, n) for n in WARM_UP_ROWS]
        calls += [prefill, *attends, lambda: rewind([cache], 0), attends[0]]
        calls += [functools.partial(recur, *kind) for kind in kinds.values()]
        return [*calls, lambda: kernel_cache.mark_warm(what)] if backend.keeps_kernels else calls
