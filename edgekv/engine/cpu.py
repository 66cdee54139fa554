"""The decoder on this machine's cores: linear blocks and attention by kernels of Numba, or NumPy."""

from __future__ import annotations

import contextlib
import functools
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np

from edgekv import child, numba_cache
from edgekv.engine.decoder import CHUNK, Decoder, RopeRotation, Scoring, seen
from edgekv.kernels import Kernels, compiling, numba_kernels
from edgekv.kernels.arrays import contiguous
from edgekv.kernels.contract.attention import bound_scores
from edgekv.kernels.threads import serial_kernels
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import KVCache, LayerState, Workspace, rewind
from edgekv.kvcache.recurrent import RecurrentState, recurrent_states
from edgekv.machine import all_cores, available_memory_bytes, blas_threads
from edgekv.models.config import ModelConfig
from edgekv.types import F32, I64
from edgekv.weights.checkpoint_weights import Weights
from edgekv.weights.ops import WeightOps

BLOCK_ROWS = 512  # query rows per block, all heads of a group together


class CpuAttention:
    """Each worker thread takes blocks of query rows and multiplies them alone.

    Workers that share one product wait for each other at its end, thousands of times per prompt; on a busy
    machine that made a prompt three times slower than blocks computed apart.
    """

    def __init__(self, kernels: Kernels, threads: int) -> None:
        self.kernels, self.threads = kernels, threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="edgekv-attention")
        self._scratch = [Workspace() for _ in range(threads)]

    def __call__(self, queries: F32, keys: F32, values: F32, scoring: Scoring) -> None:
        """See `PromptAttention` (prompt_attention.py). Scratch: BLOCK_ROWS x m float32 scores per thread."""
        n_heads, n, _ = queries.shape
        n_kv_heads = keys.shape[0]
        rows = max(1, BLOCK_ROWS // (n_heads // n_kv_heads))
        starts = range((n - 1) // rows * rows, -1, -rows)  # the longest blocks first
        blocks = iter([(g, a, min(a + rows, n)) for a in starts for g in range(n_kv_heads)])
        with blas_threads(1):
            work = functools.partial(self._work, blocks, queries, keys, values, scoring)
            jobs = [self._pool.submit(work, scratch) for scratch in self._scratch]
            for job in jobs:
                job.result()

    def _work(
        self,
        blocks: Iterator[tuple[int, int, int]],
        queries: F32,
        keys: F32,
        values: F32,
        scoring: Scoring,
        scratch: Workspace,
    ) -> None:
        group = queries.shape[0] // keys.shape[0]
        with serial_kernels():
            for g, a, b in blocks:  # a list's iterator: each block goes to one worker
                heads = slice(g * group, (g + 1) * group)
                own = scoring if scoring.sinks is None else scoring._replace(sinks=scoring.sinks[heads])
                self._block(scratch, queries[heads], keys[g], values[g], a, b, own)

    def _block(
        self,
        scratch: Workspace,
        queries: F32,
        keys: F32,
        values: F32,
        a: int,
        b: int,
        scoring: Scoring,
    ) -> None:
        """Queries a..b of one group (group, n, head_dim) over its keys and values (m, head_dim)."""
        group, n, head_dim = queries.shape
        t0 = len(keys) - n + a
        t1 = t0 + b - a
        window, cap, sinks = scoring
        first, *ranges = seen(t0, t1, window)
        lo, hi = (np.tile(each, group) for each in ranges)
        rows = group * (b - a)
        q = scratch.array("rows", (rows, head_dim))
        q.reshape(group, b - a, head_dim)[:] = queries[:, a:b]
        whole = scratch.array("scores", (rows, t1 - first + (sinks is not None)))
        s = whole[:, : t1 - first]
        np.matmul(q, keys[first:t1].T, out=s)
        bound_scores(s, cap)
        if sinks is None:
            self.kernels.softmax(s[None], lo, hi)
        else:
            each = np.arange(rows)
            whole[each, hi] = np.repeat(sinks, b - a)  # behind the last token that a row sees
            self.kernels.softmax(whole[None], lo, hi + 1)
            whole[each, hi] = 0
        np.matmul(s, values[first:t1], out=q)
        queries[:, a:b] = q.reshape(group, b - a, head_dim)


WARM_UP_ROWS = (1, 5, 80)  # tokens at once: decoding, drafts, and more than a packed block


class CpuDecoder(Decoder):
    """`Decoder` in the host's memory."""

    def __init__(self, weights: Weights, ops: WeightOps, kernels: Kernels, capacity: int, threads: int) -> None:
        attention = CpuAttention(kernels, threads)
        super().__init__(
            weights, ops, kernels, attention, capacity=capacity, threads=threads, workspace=Workspace()
        )

    def free_bytes(self) -> int:
        return available_memory_bytes()

    def embed(self, tokens: Sequence[int] | I64, start: int) -> F32:
        self.require_process()
        ids = np.asarray(tokens, np.int64)
        x = self.weights.rows("embed", ids)
        if self.config.embedding_scale != 1.0:
            x = np.multiply(x, np.float32(self.config.embedding_scale), dtype=np.float32)
        if not self._learned_positions:
            return x
        positions = self.weights.rows("positions", np.arange(start, start + len(ids)))
        summed: F32 = np.add(x, positions, dtype=np.float32)
        return summed

    def step(self, token: int, caches: Sequence[LayerState]) -> F32:
        logits: F32 = self.head(self.forward(self.embed((token,), caches[0].n_seen), caches))[0]
        return logits

    def _prompt_layer(
        self, i: int, cache: KVCache, x: F32, rotation: RopeRotation, pause: Callable[[], None]
    ) -> None:
        self._exact_layer(i, cache, x, rotation, pause)

    def warm_up(self, caches: Sequence[KVCache]) -> list[Callable[[], object]]:
        """All that a conversation calls; nothing where it has been compiled before.

        A prompt, one token in an empty cache and in a filled one, a few at once as drafts are, and so many that a
        block is packed and all threads work.
        """
        cache, c = caches[-1], self.config
        linear = f"{type(self.ops).__name__} {getattr(self.weights, 'form', '')}"
        what = f"{type(cache).__name__} {cache.knobs} {cache.geometry} {c.model_type} {self.threads} {linear}"
        if compiling.are_kept(what):
            return []
        n, last = cache.geometry.capacity, c.attending[-1]
        cache.allocate(self.kernels, Workspace())
        rng = np.random.default_rng(0)
        qkv = rng.standard_normal((n, c.q_size + 2 * c.kv_size)).astype(np.float32)
        buffers = Workspace()
        q, k, v = (buffers.array(name, (heads, n, c.head_dim)) for name, heads in self._heads())

        def split() -> None:
            for m, parts in ((1, self._qkv_buffers("step", 1)), (n, (q, k, v))):
                self._split(last, qkv[:m], self._ropes.at(0, m)[last], *parts)

        def attend(n_tokens: int) -> None:
            a = cache.n_seen
            b = min(a + n_tokens, n)
            if a < b:
                cache.attend(*(contiguous(x[:, a:b]) for x in (q, k, v)))

        def prefill() -> None:
            rewind([cache], 0)
            m = max(1, n - sum(WARM_UP_ROWS))
            cache.prefill(q[:, :m], k[:, :m], v[:, :m])
            type(cache).finish_prefill([cache])

        return [
            *self.ops.warm_up(),
            split,
            lambda: self._exact_attention(q, k, v, Scoring()),  # of a prompt, and what every scheme needs: `ahead`
            functools.partial(attend, 1),
            prefill,
            *(functools.partial(attend, rows) for rows in WARM_UP_ROWS),
            *self._warm_up_recurrences(rng),
            lambda: compiling.note_kept(what),
        ]

    def _warm_up_recurrences(self, rng: np.random.Generator) -> list[Callable[[], object]]:
        """A token, and a prompt's chunk, of each kind of layer that does not attend."""
        layers = [i for i in range(self.config.n_layers) if i not in self.config.attending]
        first = {
            type(state.recurrence): (i, state)
            for i, state in zip(layers, recurrent_states(self.config, 2 * CHUNK), strict=False)
        }
        return [functools.partial(self._recur, i, state, rng) for i, state in first.values()]

    def _recur(self, i: int, state: RecurrentState, rng: np.random.Generator) -> None:
        state.allocate(self.kernels, Workspace())
        for n in (1, CHUNK):
            state.run(rng.standard_normal((n, state.recurrence.projected)).astype(np.float32), self._arrays[i])


def scratch_bytes(c: ModelConfig, ctx: int, *, sees_queries: bool) -> int:
    """An upper estimate of scratch, in bytes, while a prompt of ``ctx`` tokens is read into empty caches.

    sees_queries: whether the caches are shown all queries at once (`KVCache.sees_queries`).
    """
    held = ctx if sees_queries else min(ctx, CHUNK)
    prompt = ctx * (c.hidden_size + 2 * c.kv_size) + held * c.q_size + BLOCK_ROWS * ctx
    e = c.experts
    experts = e.per_token * (4 * e.size + 5 * c.hidden_size) if e else 0
    projected = max((each.projected for each in c.recurrences if each is not None), default=0)
    chunk = CHUNK * (3 * c.intermediate_size + 4 * c.hidden_size + 2 * projected + experts) + c.vocab_size
    return 4 * (prompt + chunk)


TOKENS = 700  # beyond the windows and budgets that the schemes have by default
SMALL = SimpleNamespace(
    n_layers=1,
    n_heads=2,
    n_kv_heads=1,
    head_dim=64,
    layer_windows=(None,),
    layer_recurrences=(None,),
    score_cap=None,
)


@contextlib.contextmanager
def precompiling(spec: CacheSpec) -> Iterator[None]:
    """Runs the process within the block, unless it has run before, or could not help."""
    kinds = {codec.kind for codec in spec.scheme.codecs_used(spec.knobs) or ()}
    what = f"ahead {sorted(kinds or ())}"
    if not (kinds and numba_cache.folder(__file__) and all_cores() > 1) or compiling.are_kept(what):
        yield
        return
    nothing = subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            child.command(__name__, str(spec)), stdin=nothing, stdout=nothing, stderr=nothing
        )
    except OSError:
        yield
        return
    try:
        yield
        compiling.note_kept(what)
    finally:
        process.terminate()  # what it has not done by now is not needed any more
        process.wait()


def main(kv: str) -> None:
    """Compiles: first what packs tokens, then the loops that read them, the last one first."""
    from edgekv.kernels.cpu.loops import loops_of

    spec, rng = CacheSpec.parse(kv), np.random.default_rng(0)
    cache = spec.layers(SMALL, TOKENS)[0]
    cache.allocate(numba_kernels(1), Workspace())
    q, k, v = (rng.standard_normal((n, TOKENS - 1, 64), np.float32) for n in (2, 1, 1))
    cache.prefill(q, k, v)
    codecs = sorted(spec.scheme.codecs_used(spec.knobs) or (), key=lambda codec: (codec.kind == "f16", codec.kind))
    for loop in [loop for codec in codecs for loop in reversed(loops_of(codec).all())]:
        assert loop.address
