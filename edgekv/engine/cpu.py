"""The backend of this machine's cores: kernels of Numba, or of NumPy as the reference."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from edgekv import child
from edgekv.engine.decoder import CHUNK, WARM_UP_TOKENS, Backend, ScoreOptions, visible_range
from edgekv.engine.model import Model
from edgekv.kernels import Kernels, kernel_cache, numba_kernels, numpy_kernels
from edgekv.kernels.interface import bound_scores
from edgekv.kernels.threads import serial_kernels
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import Geometry, Workspace
from edgekv.machine import all_cores, blas_threads
from edgekv.models.config import ModelConfig
from edgekv.types import F32, I64, TaskProgress
from edgekv.weights.checkpoint_weights import Weights
from edgekv.weights.cpu import CpuOps, product_threads
from edgekv.weights.formats import ModelFormat
from edgekv.weights.ops import NumpyOps, WeightOps

BLOCK_ROWS = 512  # query rows per block of a prompt's attention, all heads of a group together


class CpuBackend(Backend):
    """Numba's kernels, and products on packed weights.

    Of a prompt's attention each worker thread takes blocks of query rows and multiplies them alone. Workers that
    share one product wait for each other at its end, thousands of times per prompt; on a busy machine that made a
    prompt three times slower.
    """

    keeps_kernels = True

    def __init__(self, weights: Weights, ops: WeightOps, kernels: Kernels, threads: int) -> None:
        self.weights, self.ops, self.kernels, self.threads = weights, ops, kernels, threads
        self.workspace = Workspace()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="edgekv-attention")
        self._scratch = [Workspace() for _ in range(threads)]

    @classmethod
    def open(
        cls, model: Model, form: ModelFormat, threads: int | None, progress: TaskProgress | None
    ) -> CpuBackend:
        kernels, store = numba_kernels(all_cores(threads)), model.store(form, progress)
        return cls(store, CpuOps(store, product_threads(store, threads)), kernels, all_cores(threads))

    @classmethod
    @contextlib.contextmanager
    def precompiling(cls, spec: CacheSpec) -> Iterator[None]:
        """Runs `main` in another process within the block, unless all is compiled or there is only one core."""
        kinds = {codec.kind for codec in spec.scheme.codecs_used(spec.config) or ()}
        what, process, nothing = f"ahead {sorted(kinds)}", None, subprocess.DEVNULL
        can_help = kinds and kernel_cache.folder() and all_cores() > 1
        if can_help and not kernel_cache.is_warm(what):
            with contextlib.suppress(OSError):
                command = child.command(__name__, str(spec))
                process = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing)
        try:
            yield
            if process:
                kernel_cache.mark_warm(what)
        finally:
            if process:
                process.terminate()  # what it has not done by now is not needed any more
                process.wait()

    def embed(self, tokens: Sequence[int] | I64, start: int) -> F32:
        """Returns the embeddings (n, hidden) float32 of n tokens."""
        ids, config = np.asarray(tokens, np.int64), self.weights.arch.config
        x = self.weights.rows("embed", ids)
        if config.embedding_scale != 1.0:
            x = np.multiply(x, np.float32(config.embedding_scale), dtype=np.float32)
        if self.weights.arch.learned_positions:
            positions = self.weights.rows("positions", np.arange(start, start + len(ids)))
            x = np.add(x, positions, dtype=np.float32)
        return x

    def prefill_attention(self, queries: F32, keys: F32, values: F32, options: ScoreOptions) -> None:
        """Attends as `Backend.prefill_attention`, with scratch (BLOCK_ROWS, m) for scores per thread."""
        n, n_kv_heads = queries.shape[1], len(keys)
        group = len(queries) // n_kv_heads
        rows = max(1, BLOCK_ROWS // group)
        starts = range((n - 1) // rows * rows, -1, -rows)  # the longest blocks first
        blocks = iter([(g, a, min(a + rows, n)) for a in starts for g in range(n_kv_heads)])

        def work(scratch: Workspace) -> None:
            with serial_kernels():
                for g, a, b in blocks:  # a list's iterator: each block goes to one worker
                    heads, sinks = slice(g * group, (g + 1) * group), options.sinks
                    head_options = options._replace(sinks=None if sinks is None else sinks[heads])
                    self._attend_block(scratch, queries[heads], keys[g], values[g], a, b, head_options)

        with blas_threads(1):
            jobs = [self._pool.submit(work, scratch) for scratch in self._scratch]
            for job in jobs:
                job.result()

    def _attend_block(
        self, scratch: Workspace, queries: F32, keys: F32, values: F32, a: int, b: int, options: ScoreOptions
    ) -> None:
        group, n, head_dim = queries.shape
        t0, t1 = len(keys) - n + a, len(keys) - n + b
        first, *ranges = visible_range(t0, t1, options.window)
        lo, hi = (np.tile(x, group) for x in ranges)
        rows, sinks = group * (b - a), options.sinks
        q = scratch.array("rows", (rows, head_dim))
        q.reshape(group, b - a, head_dim)[:] = queries[:, a:b]
        whole = scratch.array("scores", (rows, t1 - first + (sinks is not None)))
        s = whole[:, : t1 - first]
        np.matmul(q, keys[first:t1].T, out=s)
        bound_scores(s, options.cap)
        if sinks is None:
            self.kernels.softmax(s[None], lo, hi)
        else:
            i = np.arange(rows)
            whole[i, hi] = np.repeat(sinks, b - a)  # behind the last token that a row sees
            self.kernels.softmax(whole[None], lo, hi + 1)
            whole[i, hi] = 0
        np.matmul(s, values[first:t1], out=q)
        queries[:, a:b] = q.reshape(group, b - a, head_dim)


class NumpyBackend(CpuBackend):
    """The reference in NumPy: slow, exact."""

    @classmethod
    def open(
        cls, model: Model, form: ModelFormat, threads: int | None, progress: TaskProgress | None
    ) -> NumpyBackend:
        weights = model.weights if form.name == "f32" else model.store(form, progress)
        return cls(weights, NumpyOps(weights), numpy_kernels(all_cores(threads)), all_cores(threads))

    @classmethod
    @contextlib.contextmanager
    def precompiling(cls, spec: CacheSpec) -> Iterator[None]:
        yield


def scratch_bytes(c: ModelConfig, ctx: int, *, needs_prompt_queries: bool) -> int:
    """Returns an upper estimate of scratch, in bytes, while a prompt of ``ctx`` tokens is read into empty caches.

    needs_prompt_queries: whether the caches are shown all queries at once (`KVCache.needs_prompt_queries`).
    """
    held = ctx if needs_prompt_queries else min(ctx, CHUNK)
    prompt = ctx * (c.hidden_size + 2 * c.kv_size) + held * c.q_size + BLOCK_ROWS * ctx
    e = c.experts
    experts = e.per_token * (4 * e.size + 5 * c.hidden_size) if e else 0
    projected = max((layer.projected for layer in c.recurrences if layer is not None), default=0)
    chunk = CHUNK * (3 * c.intermediate_size + 4 * c.hidden_size + 2 * projected + experts) + c.vocab_size
    return 4 * (prompt + chunk)


def main(kv: str) -> None:
    """Compiles attention to one token, then the codecs' loops, those first that the process that waits needs last.

    That begins with the encoders.
    """
    from edgekv.kernels.cpu.loops import kernels_of

    spec, rng = CacheSpec.parse(kv), np.random.default_rng(0)
    cache = spec.scheme(Geometry(n_heads=2, n_kv_heads=1, head_dim=64, capacity=WARM_UP_TOKENS), spec.config)
    cache.allocate(numba_kernels(all_cores()), Workspace())
    cache.attend(*(rng.standard_normal((n, 1, 64), np.float32) for n in (2, 1, 1)))
    for codec in sorted(spec.scheme.codecs_used(spec.config) or (), key=lambda codec: codec.kind):
        assert all(loop.address for loop in kernels_of(codec).all())
