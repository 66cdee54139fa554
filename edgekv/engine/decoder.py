"""The decoder: a prompt or a token through embedding, layers and head; and what a device is."""

from __future__ import annotations

import abc
import copy
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np

from edgekv.engine.model import Model
from edgekv.errors import EdgeKVError
from edgekv.kernels import Kernels
from edgekv.kernels.arrays import contiguous, to_host
from edgekv.kernels.cpu.matmul import FEW_ROWS as ALIKE_ROWS  # made as they are alone, to the bit
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import KVCache, LayerState, Workspace
from edgekv.kvcache.recurrent import RecurrentState, attending
from edgekv.machine import available_memory_bytes
from edgekv.models.config import ModelConfig
from edgekv.models.rope import RopeConfig, frequencies
from edgekv.types import F32, I64, TaskProgress
from edgekv.weights.checkpoint_weights import Weights
from edgekv.weights.formats import WeightFormat
from edgekv.weights.ops import Changes, WeightOps


class RopeRotation(NamedTuple):
    """Of n positions: cos and sin (n, rotated channels / 2), and where queries grow their factors (n, 1)."""

    cos: F32
    sin: F32
    query_factors: F32 | None = None

    def rows(self, first: int, stop: int) -> RopeRotation:
        """Of the positions first..stop among these."""
        factors = self.query_factors
        return RopeRotation(
            self.cos[first:stop], self.sin[first:stop], None if factors is None else factors[first:stop]
        )


class RopeTable:
    """The rotation of positions; of those below ``capacity`` made once, unless it depends on the length.

    rope None rotates nothing. upload: brings an array to the memory where it is read.
    """

    def __init__(
        self, rope: RopeConfig | None, capacity: int, upload: Callable[[F32], Any] = lambda array: array
    ) -> None:
        self.rope, self._upload = rope, upload
        self.is_fixed = rope is None or capacity <= rope.fixed_up_to
        self._fixed = self._compute(0, capacity, capacity) if self.is_fixed else None

    def at(self, start: int, n: int) -> RopeRotation:
        """Of positions start..start+n, the last of the sequence so far."""
        if self._fixed and start + n <= len(self._fixed.cos):
            return self._fixed.rows(start, start + n)
        return self._compute(start, n, start + n)

    def _compute(self, start: int, n: int, seq_len: int) -> RopeRotation:
        if self.rope is None:
            empty = self._upload(np.empty((n, 0), np.float32))
            return RopeRotation(empty, empty)
        freq, factor = frequencies(self.rope, seq_len)
        positions = np.arange(start, start + n)[:, None]
        angles = positions * freq  # (n, dim/2)
        cos, sin = (self._upload((f(angles) * factor).astype(np.float32)) for f in (np.cos, np.sin))
        return RopeRotation(cos, sin, self._query_factors(positions, self.rope))

    def _query_factors(self, positions: np.ndarray, rope: RopeConfig) -> F32 | None:
        if not rope.query_growth:
            return None
        growth = 1 + rope.query_growth * np.log1p(positions // rope.original)
        factors: F32 = self._upload(growth.astype(np.float32))
        return factors


class LayerRopes:
    """The tables of all layers; layers that rotate alike share one. upload: as of `RopeTable`."""

    def __init__(
        self,
        layer_ropes: Sequence[RopeConfig | None],
        capacity: int,
        upload: Callable[[F32], Any] = lambda array: array,
    ) -> None:
        distinct: list[RopeConfig | None] = []
        for rope in layer_ropes:
            if rope not in distinct:
                distinct.append(rope)
        self.tables = [RopeTable(rope, capacity, upload) for rope in distinct]
        self._table_of = [distinct.index(rope) for rope in layer_ropes]

    @property
    def is_fixed(self) -> bool:
        """Whether a position's rotation is the same however long the sequence becomes."""
        return all(table.is_fixed for table in self.tables)

    def at(self, start: int, n: int) -> list[RopeRotation]:
        """Each layer's rotation of the positions start..start+n, the last of the sequence so far."""
        rotations = [table.at(start, n) for table in self.tables]
        return [rotations[k] for k in self._table_of]


NONE = np.empty(0, np.float32)

Upload = Callable[[F32], Any]
"""Brings an array of the host to where the kernels compute."""


def head_norms(weights: Weights, upload: Upload) -> list[tuple[Any, Any]]:
    """For each layer the norms of queries and keys, (head_dim,) each; empty where it has none."""
    c = weights.arch.config
    normed = c.attending if c.qk_norm else ()
    none = upload(NONE), upload(NONE)
    return [
        (_vector(weights, f"{i}.norm_q", upload), _vector(weights, f"{i}.norm_k", upload)) if i in normed else none
        for i in range(c.n_layers)
    ]


def sinks(weights: Weights, upload: Upload) -> list[Any]:
    """For each layer the score of each head that belongs to no token, (n_heads,); None: the model has none."""
    c = weights.arch.config
    return [_vector(weights, f"{i}.sinks", upload) if c.attention_sinks else None for i in range(c.n_layers)]


def recurrence_arrays(weights: Weights, upload: Upload) -> list[dict[str, Any]]:
    """What the kernels of layers that do not attend are given, by argument; of convolutions (taps, channels)."""
    return [
        {
            name.partition(".")[2]: upload(_by_tap(weights.array(name)).copy())
            for name in weights.arch.layer_arrays(i)
        }
        for i in range(weights.arch.config.n_layers)
    ]


def _vector(weights: Weights, name: str, upload: Upload) -> Any:
    """A copy: mapped vectors are read-only, to Numba another type, for which a kernel is compiled again."""
    return upload(weights.vector(name).copy())


def _by_tap(array: F32) -> F32:
    """Of a convolution's weights (channels, 1, taps) the transposed; others as they are."""
    return array[:, 0].T if array.ndim == 3 else array


class Scoring(NamedTuple):
    """What a layer does to the scores of its queries; by default nothing.

    window: tokens that a query sees, up to its own; None: all. cap: the soft bound of scores.
    sinks (n_heads,): a score of each head that belongs to no token.
    """

    window: int | None = None
    cap: float | None = None
    sinks: F32 | None = None


class PromptAttention(Protocol):
    """Exact causal attention over a prompt."""

    def __call__(self, queries: F32, keys: F32, values: F32, scoring: Scoring) -> None:
        """Replaces queries (n_heads, n, head_dim), already scaled, by their attention over keys and values.

        keys, values (n_kv_heads, m, head_dim) with m >= n; the queries are those of the last n tokens. That of
        token t sees keys max(0, t + 1 - scoring.window)..t.
        """


def seen(t0: int, t1: int, window: int | None) -> tuple[int, I64, I64]:
    """The first token that any of the tokens t0..t1 sees; counted from it, what each sees: lo..hi (t1 - t0,)."""
    first = 0 if window is None else max(0, t0 + 1 - window)
    hi = np.arange(t0 + 1, t1 + 1, dtype=np.int64) - first
    return first, np.zeros_like(hi) if window is None else np.maximum(hi - window, 0), hi


CHUNK = 256  # tokens per dense block in prefill: bounds the MLP's activations
ATTEND_ROWS = 1 << 24  # scores (float32) alive at once when a prompt continues a filled cache


def _no_pause() -> None:
    """Nobody else computes."""


class Decoder(abc.ABC):
    """One model's computation. Holds weights and scratch, no conversation: that is in the caches.

    Here is the way of tokens through the layers; `CpuDecoder` and `CudaDecoder` say where and with what they are
    computed. Activations, logits and caches are float32 arrays in the memory of that place.

    capacity: tokens of the longest conversation. chunk: tokens of a prompt whose activations are alive at a time.
    upload: brings an array of the host to where the kernels compute.
    """

    def __init__(
        self,
        weights: Weights,
        ops: WeightOps,
        kernels: Kernels,
        attention: PromptAttention,
        *,
        capacity: int,
        threads: int,
        workspace: Workspace,
        chunk: int | None = None,
        upload: Upload = lambda array: array,
    ) -> None:
        self.arch, self.config, self.weights = weights.arch, weights.arch.config, weights
        self.ops, self.kernels = ops, kernels
        self.threads, self._pid = threads, os.getpid()
        self.workspace, self.chunk = workspace, chunk or CHUNK
        self._exact_attention = attention
        self._ropes = LayerRopes(self.config.layer_ropes, capacity, upload)
        self._learned_positions = weights.arch.learned_positions
        self._norms = head_norms(weights, upload)
        self._scoring = [
            Scoring(window, self.config.score_cap, each)
            for window, each in zip(self.config.layer_windows, sinks(weights, upload), strict=True)
        ]
        self._arrays = recurrence_arrays(weights, upload)

    @abc.abstractmethod
    def free_bytes(self) -> int:
        """Memory that is left where it computes."""

    @abc.abstractmethod
    def warm_up(self, caches: Sequence[KVCache]) -> list[Callable[[], object]]:
        """Calls that compile a scheme's kernels, or load them from disk, on throw-away random tokens."""

    @abc.abstractmethod
    def embed(self, tokens: Sequence[int] | I64, start: int) -> F32:
        """(n, hidden) float32: embeddings of tokens at positions start..start+n."""

    @abc.abstractmethod
    def step(self, token: int, caches: Sequence[LayerState]) -> F32:
        """Logits (vocab,) after appending one token, valid until the next step."""

    @abc.abstractmethod
    def _prompt_layer(
        self, i: int, cache: KVCache, x: F32, rotation: RopeRotation, pause: Callable[[], None]
    ) -> None:
        """Turns x (n, hidden), a prompt, into layer i's result in place; fills its empty cache.

        pause: see `prefill`.
        """

    def with_changes(self, changes: Changes) -> Decoder:
        """The same weights and scratch with low-rank changes beside them, for conversations of their own.

        ConfigError where the device knows none.
        """
        other = copy.copy(self)
        other.ops = self.ops.with_changes(changes)
        return other

    def require_process(self) -> None:
        """EdgeKVError in a forked child: the threads of the pools did not come along, and would be waited for."""
        if os.getpid() != self._pid:
            raise EdgeKVError(
                f"the model was loaded by process {self._pid} and this is {os.getpid()}, forked from it: start "
                "processes with multiprocessing's 'spawn', or fork before anything is loaded"
            )

    def place(self, rows: F32, x: F32, start: int, at: int) -> None:
        """Puts embeddings (m, hidden) into x (n, hidden), which begins at position ``start``, from row ``at`` on.

        Like tokens' they are given learned positions, where the model has these.
        """
        if self._learned_positions:
            first = start + at
            rows = rows + to_host(self.weights.rows("positions", np.arange(first, first + len(rows))))
        x[at : at + len(rows)] = np.asarray(rows, like=x)

    def attention_in(self, i: int, x: F32) -> F32:
        """x (n, hidden) before layer i -> `Architecture.attention_in`: queries, keys and values, as a rule."""
        projected: F32 = self.arch.attention_in(self.ops.for_rows(len(x)), i, x)
        return projected

    def attention_out(self, i: int, x: F32, mixed: F32) -> F32:
        """The next layer's x (n, hidden) of residual x, which may be changed, and what layer i has mixed."""
        following: F32 = self.arch.attention_out(self.ops.for_rows(len(x)), i, x, mixed)
        return following

    def head(self, x: F32) -> F32:
        """(n, vocab) float32 logits of hidden states (n, hidden)."""
        logits: F32 = self.arch.head(self.ops.for_rows(len(x)), x)
        return logits

    def tentative_tokens(self, caches: Sequence[LayerState]) -> int:
        """How many of the next tokens, appended by one `steps`, can be taken back as if they had never come."""
        if not self._ropes.is_fixed:  # tokens that come together are rotated as the last one is
            return 0
        return min(cache.tentative_tokens() for cache in caches)

    def steps(self, tokens: Sequence[int], caches: Sequence[LayerState]) -> F32:
        """Logits (n, vocab) after each of a few tokens, all of them appended: `step`, several at once."""
        if len(tokens) == 1:
            return self.step(tokens[0], caches)[None]
        return self.head(self.forward(self.embed(tokens, caches[0].n_seen), caches))

    def step_together(self, tokens: Sequence[int], conversations: Sequence[Sequence[LayerState]]) -> F32:
        """Logits (n, vocab): `step` of n conversations, a token each, ALIKE_ROWS of them in each pass.

        A pass of the linear layers has what they would have alone.
        """
        passes = (slice(a, a + ALIKE_ROWS) for a in range(0, len(tokens), ALIKE_ROWS))
        return np.concatenate([self._step_pass(tokens[part], conversations[part]) for part in passes])

    def _step_pass(self, tokens: Sequence[int], conversations: Sequence[Sequence[LayerState]]) -> F32:
        starts = [caches[0].n_seen for caches in conversations]
        x = np.concatenate([self.embed((token,), start) for token, start in zip(tokens, starts, strict=True)])
        rotations = [self._ropes.at(start, 1) for start in starts]
        for i in range(self.config.n_layers):
            projected = self.attention_in(i, x)
            mixed = self.workspace.array("together", (len(tokens), self.weights.arch.widths(i)[1]))
            for j, caches in enumerate(conversations):
                mixed[j : j + 1] = self._mix(i, projected[j : j + 1], caches[i], rotations[j][i])
            x = self.attention_out(i, x, mixed)
        return self.head(x)

    def forward(self, x: F32, caches: Sequence[LayerState]) -> F32:
        """Appends n tokens, embedded as x (n, hidden), through `KVCache.attend`; returns their hidden states."""
        rotations = self._ropes.at(caches[0].n_seen, len(x))
        for i, cache in enumerate(caches):
            mixed = self._mix(i, self.attention_in(i, x), cache, rotations[i])
            x = self.attention_out(i, x, mixed)
        return x

    def prefill(
        self,
        x: F32,
        caches: Sequence[LayerState],
        progress: Callable[[int, int], None] | None = None,
        exact: bool = True,
        pause: Callable[[], None] = _no_pause,
    ) -> F32:
        """Turns x (n, hidden), an embedded prompt, into its hidden states in place; fills the caches.

        pause() is called between chunks: tokens of other conversations may be decoded in it.

        Layer by layer. Into empty caches attention is exact, and each cache then encodes the whole prompt at once;
        only one layer's float32 keys and values are alive. A prompt that continues a filled
        cache goes through `KVCache.attend` in blocks, and so does every prompt with ``exact`` False, or where
        the scheme wants no exact one: then each token attends to what the scheme has kept of the earlier ones,
        as in decoding.
        """
        n, start = len(x), caches[0].n_seen
        attended = attending(caches)
        exact = exact and start == 0 and attended[0].exact_prefill
        rotations = self._ropes.at(start, n)
        for i, cache in enumerate(caches):
            if not isinstance(cache, KVCache):
                self._recurrent_layer(i, cache, x, pause)
            elif exact:
                self._prompt_layer(i, cache, x, rotations[i], pause)
            else:
                self._continue_layer(i, cache, x, rotations[i], pause)
            if progress:
                progress(i + 1, len(caches))
        if exact:
            type(attended[0]).finish_prefill(attended)
        return x

    def read_together(self, x: F32, n: int) -> F32:
        """Hidden states of prompts of n tokens each, x (m * n, hidden), in one pass of the linear layers.

        No conversation goes on from them: nothing is kept.
        """
        c, rotations = self.config, self._ropes.at(0, n)
        q, k, v = self._qkv_buffers("prefill", n)
        for i in range(c.n_layers):
            projected, merged = self.attention_in(i, x), []
            for a in range(0, len(x), n):
                part = projected[a : a + n]
                self._split(i, part, rotations[i], q, k, v)
                self._exact_attention(q, k, v, self._scoring[i])
                merged.append(self._merge(q, part).copy())
            x = self.attention_out(i, x, np.concatenate(merged))
        return x

    def _exact_layer(
        self, i: int, cache: KVCache, x: F32, rotation: RopeRotation, pause: Callable[[], None]
    ) -> None:
        """Chunk by chunk, as no token sees a later one; queries are kept only for caches that want all of them."""
        n, c, array = len(x), self.config, self.workspace.array
        held = n if cache.sees_queries else min(n, self.chunk)
        q = array("prefill.q", (c.n_heads, held, c.head_dim))
        k = array("prefill.k", (c.n_kv_heads, n, c.head_dim))
        v = array("prefill.v", (c.n_kv_heads, n, c.head_dim))
        for a in range(0, n, self.chunk):
            b = min(a + self.chunk, n)
            queries = q[:, a % held : a % held + b - a]
            projected = self.attention_in(i, x[a:b])
            self._split(i, projected, rotation.rows(a, b), queries, k[:, a:b], v[:, a:b])
            out = array("prefill.out", queries.shape)
            out[:] = queries
            self._exact_attention(out, k[:, :b], v[:, :b], self._scoring[i])
            x[a:b] = self.attention_out(i, x[a:b], self._merge(out, projected))
            pause()
        cache.prefill(q, k, v)

    def _continue_layer(
        self, i: int, cache: KVCache, x: F32, rotation: RopeRotation, pause: Callable[[], None]
    ) -> None:
        """Chunk by chunk, each of which attends in blocks of as many queries as their scores allow."""
        n, c = len(x), self.config
        block = max(1, ATTEND_ROWS // (c.n_heads * (cache.n_seen + n)))
        for a in range(0, n, self.chunk):
            part = slice(a, min(a + self.chunk, n))
            q, k, v = self._qkv_buffers("step", part.stop - part.start)
            projected = self.attention_in(i, x[part])
            self._split(i, projected, rotation.rows(part.start, part.stop), q, k, v)
            out = self.workspace.array("step.out", q.shape)
            for b in range(0, part.stop - part.start, block):
                rows = slice(b, b + block)
                out[:, rows] = cache.attend(q[:, rows], k[:, rows], v[:, rows], self._scoring[i].sinks)
            x[part] = self.attention_out(i, x[part], self._merge(out, projected))
            pause()

    def _recurrent_layer(self, i: int, state: LayerState, x: F32, pause: Callable[[], None]) -> None:
        """Chunk by chunk, into an empty state or a filled one."""
        assert isinstance(state, RecurrentState)
        for a in range(0, len(x), self.chunk):
            part = slice(a, a + self.chunk)
            mixed = state.run(self.attention_in(i, x[part]), self._arrays[i])
            x[part] = self.attention_out(i, x[part], mixed)
            pause()

    def _mix(self, i: int, projected: F32, state: LayerState, rotation: RopeRotation) -> F32:
        """Appends n tokens, projected by layer i's `attention_in`; what its `attention_out` reads of them.

        Valid until the next call.
        """
        if isinstance(state, RecurrentState):
            return state.run(projected, self._arrays[i])
        assert isinstance(state, KVCache)
        q, k, v = self._qkv_buffers("step", len(projected))
        self._split(i, projected, rotation, q, k, v)
        return self._merge(state.attend(q, k, v, self._scoring[i].sinks), projected)

    def _qkv_buffers(self, name: str, n: int) -> tuple[F32, F32, F32]:
        array, head_dim = self.workspace.array, self.config.head_dim
        q, k, v = (array(f"{name}.{part}", (heads, n, head_dim)) for part, heads in self._heads())
        return q, k, v

    def _heads(self) -> tuple[tuple[str, int], ...]:
        c = self.config
        return ("q", c.n_heads), ("k", c.n_kv_heads), ("v", c.n_kv_heads)

    def _split(self, i: int, projected: F32, rotation: RopeRotation, q: F32, k: F32, v: F32) -> None:
        """Head split, q/k norm and rotation of layer i's fused projection into q, k, v."""
        c, (cos, sin, query_factors) = self.config, rotation
        norm_q, norm_k = self._norms[i]
        qkv = projected[:, : c.q_size + 2 * c.kv_size] if c.gated_attention else projected
        self.kernels.split_rope(qkv, cos, sin, q, k, v, c.layer_scales[i], norm_q, norm_k, c.norm_eps)
        if query_factors is not None:
            q *= query_factors

    def _merge(self, out: F32, projected: F32) -> F32:
        """(n_heads, n, head_dim) -> (n, n_heads * head_dim), and behind it the gates of the projection, if any."""
        merged: F32 = contiguous(out.transpose(1, 0, 2)).reshape(out.shape[1], -1)
        if not self.config.gated_attention:
            return merged
        return np.concatenate([merged, projected[:, -self.config.q_size :]], axis=1)


class Device(abc.ABC):
    """A place to compute."""

    def available(self, spec: CacheSpec, config: ModelConfig | None = None) -> bool:
        """Whether this machine has it, and it has the scheme and the model's layers; None: of any model."""
        return True

    def require(
        self, spec: CacheSpec, config: ModelConfig | None = None, *, slots: int = 1, loras: bool = False
    ) -> None:
        """Raises an EdgeKVError that says what is missing for the scheme, a model's layers, slots or loras."""
        return

    def precompiling(self, spec: CacheSpec) -> AbstractContextManager[None]:
        """Compiles within the block, in which a model is read, what the scheme will need."""
        return nullcontext()

    def free_bytes(self) -> int:
        """Memory for weights and caches."""
        return available_memory_bytes()

    @abc.abstractmethod
    def decoder(
        self, model: Model, form: WeightFormat, capacity: int, threads: int | None, progress: TaskProgress | None
    ) -> Decoder:
        """Loads the weights in this format.

        threads: cores to use; None: all, but for weight products as many as are fastest.
        """
