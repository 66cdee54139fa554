"""Milliseconds per token at a given depth, part by part, against the bytes that must be read."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgekv.decoder.decoder import Decoder
from edgekv.kernels.cpu.stream import Bandwidth
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.base import KVCache
from edgekv.kvcache.recurrent import attending
from edgekv.linear.blocks import LinearBlocks
from edgekv.machine import blas_threads
from edgekv.quality.stopwatch import ATTENTION, Stopwatch
from edgekv.session.caches import open_caches
from edgekv.session.sampling import Sampler
from edgekv.session.sampling_params import SamplingParams
from edgekv.types import TaskProgress

FILL_TOKENS = 512  # synthetic keys and values drawn at a time
ROUND_TOKENS = 8  # that one scheme decodes before the next one's turn


@dataclasses.dataclass(frozen=True)
class Timing:
    """One scheme at one depth. Milliseconds per token are medians, of the whole model but for ``*_layer``.

    parts: matmul, sampling, rope, the kernels' append, choose and attend, and the recurrence of layers that do not
    attend; python is what is left of ``token_ms``. attention_ms_layer: one whole `KVCache.attend`. floor_ms_layer:
    the time that reading ``bytes_read_layer`` once takes at the machine's bandwidth.
    """

    kv: str
    depth: int
    tokens: int
    token_ms: float
    token_ms_p95: float
    parts: dict[str, float]
    attention_ms_layer: float
    bytes_read_layer: int
    floor_ms_layer: float
    times_floor: float
    gb_per_s: float
    cache_bytes: int


class TimedLinear:
    """`LinearBlocks`, their time counted as matmul."""

    def __init__(self, linear: LinearBlocks, watch: Stopwatch) -> None:
        self.weights_bytes, self.threads = linear.weights_bytes, linear.threads
        self.changes_bytes, self.with_changes = linear.changes_bytes, linear.with_changes
        self.attention_in = watch.timed("matmul", linear.attention_in)
        self.attention_out = watch.timed("matmul", linear.attention_out)
        self.head, self.warm_up = watch.timed("matmul", linear.head), linear.warm_up


class SchemeTimer:
    """One scheme's caches, filled to a depth, and its timings."""

    def __init__(
        self, decoder: Decoder, linear: LinearBlocks, kernels: Any, spec: CacheSpec, depth: int, tokens: int
    ) -> None:
        self.decoder, self.spec, self.depth = decoder, spec, depth
        self.coarse, self.fine = Stopwatch(), Stopwatch()
        self.coarse.on = True
        self.linear = TimedLinear(linear, self.coarse)
        self.kernels = self.fine.kernels(kernels)
        self.layers = open_caches(decoder, spec, depth + tokens, kernels=self.kernels)
        self.caches = attending(self.layers)
        for cache in self.caches:
            cache.attend = self.coarse.timed("attend", cache.attend)  # type: ignore[method-assign]
        self.sampler = Sampler(SamplingParams(), decoder.config.vocab_size)
        self.sample = self.coarse.timed("sampling", self.sampler.sample)
        self.token = 0
        self.totals: list[float] = []  # seconds per token, of the rounds without fine timing
        self.coarse_rows: list[dict[str, float]] = []
        self.fine_rows: list[dict[str, float]] = []

    def fill(self) -> None:
        """Synthetic contents: normal keys around a drifting mean, normal values, the same in every layer."""
        c, rng = self.decoder.config, np.random.default_rng(0)
        own = list(dict.fromkeys(self._first_alike()))
        drift = np.zeros((c.n_kv_heads, 1, c.head_dim), np.float32)
        for start in range(0, self.depth, FILL_TOKENS):
            n = min(FILL_TOKENS, self.depth - start)
            drift += rng.standard_normal(drift.shape, np.float32)
            k = rng.standard_normal((c.n_kv_heads, n, c.head_dim), np.float32) + drift
            v = rng.standard_normal(k.shape, np.float32)
            q = rng.standard_normal((c.n_heads, n, c.head_dim), np.float32) / np.float32(np.sqrt(c.head_dim))
            for cache in own:
                if start:
                    cache.extend(k, v)
                else:
                    cache.prefill(q, k, v)
            if not start:
                type(own[0]).finish_prefill(own)
        for cache, like in zip(self.caches, self._first_alike(), strict=True):
            if cache is not like:
                filled = like.state()
                for name, array in cache.prepare(filled.counters, copy.deepcopy(filled.fitted)).items():
                    array[:] = filled.arrays[name]
        for layer in self.layers:
            if not isinstance(layer, KVCache):  # what is in its state makes no difference to the time
                layer.advance(self.depth)

    def _first_alike(self) -> list[KVCache]:
        """For each layer the first whose cache is laid out as its own: that one is filled for all of them."""
        first: dict[Any, KVCache] = {}
        keys = [(type(cache), str(cache.layout()), cache.geometry.sliding_window) for cache in self.caches]
        return [first.setdefault(key, cache) for key, cache in zip(keys, self.caches, strict=True)]

    def decode(self, n: int, fine: bool) -> None:
        """n more tokens; with ``fine`` the kernels are timed, and the token's total is not used."""
        decoder = self.decoder
        decoder.linear, decoder.kernels, self.fine.on = self.linear, self.kernels, fine
        for _ in range(n):
            self.coarse.seconds, self.fine.seconds = {}, {}
            begin = time.perf_counter()
            self.token = self.sample(decoder.step(self.token, self.layers))
            total = time.perf_counter() - begin
            if fine:
                self.fine_rows.append(self.fine.seconds)
            else:
                self.totals.append(total)
                self.coarse_rows.append(self.coarse.seconds)

    def timing(self, bandwidth: float) -> Timing:
        """bandwidth: bytes per second."""
        coarse, fine = _medians(self.coarse_rows), _medians(self.fine_rows)
        total = float(np.median(self.totals)) * 1e3
        parts = {"matmul": coarse["matmul"], "sampling": coarse["sampling"]}
        own = () if len(self.caches) == len(self.layers) else ("recurrence",)
        parts |= {name: fine.get(name, 0.0) for name in ("rope", *ATTENTION, *own)}
        n_layers = len(self.caches)
        read = sum(cache.bytes_read() for cache in self.caches) // n_layers
        attention, floor = coarse["attend"] / n_layers, read / bandwidth * 1e3
        return Timing(
            kv=str(self.spec),
            depth=self.depth,
            tokens=len(self.totals),
            token_ms=total,
            token_ms_p95=float(np.percentile(self.totals, 95)) * 1e3,
            parts=parts | {"python": total - sum(parts.values())},
            attention_ms_layer=attention,
            bytes_read_layer=read,
            floor_ms_layer=floor,
            times_floor=attention / floor if floor else float("nan"),
            gb_per_s=read / attention / 1e6,
            cache_bytes=sum(cache.nbytes for cache in self.caches),
        )


def bench(
    decoder: Decoder,
    specs: Sequence[CacheSpec],
    depths: Sequence[int],
    *,
    tokens: int,
    bandwidth: Bandwidth,
    progress: TaskProgress | None = None,
) -> list[Timing]:
    """``tokens`` tokens with each scheme at each depth, the schemes and the bandwidth's probe taking turns."""
    results = []
    linear, kernels = decoder.linear, decoder.kernels
    with blas_threads(1):
        for depth in depths:
            rounds = -(-tokens // ROUND_TOKENS)
            room = (2 * rounds + 1) * ROUND_TOKENS
            runners = [SchemeTimer(decoder, linear, kernels, spec, depth, room) for spec in specs]
            for i, runner in enumerate(runners):
                if progress:
                    progress(f"filling caches to {depth} tokens", i, len(runners))
                runner.fill()
                runner.decode(1, fine=False)  # compiles, and touches the buffers
                runner.totals.clear()
                runner.coarse_rows.clear()
            for i in range(rounds):
                if progress:
                    progress(f"decoding at {depth} tokens", i, rounds)
                bandwidth.sample()
                for runner in runners:
                    runner.decode(ROUND_TOKENS, fine=False)
                    runner.decode(ROUND_TOKENS, fine=True)
            results += [runner.timing(bandwidth.best) for runner in runners]
    decoder.linear, decoder.kernels = linear, kernels
    return results


@dataclasses.dataclass(frozen=True)
class Prefill:
    """An exact prompt of ``tokens`` tokens through all layers, the cache's encoding included; no logits.

    blas_flops: float32 operations per second of a large square product on all threads. times_floor: seconds over
    the linear layers' plus what causal attention takes at half of that speed.
    """

    kv: str
    tokens: int
    seconds: float
    tokens_per_s: float
    matmul_s: float
    blas_flops: float
    times_floor: float


def bench_prefill(decoder: Decoder, specs: Sequence[CacheSpec], lengths: Sequence[int]) -> list[Prefill]:
    """The better of two prompts for each length and scheme."""
    results, linear, c = [], decoder.linear, decoder.config
    ids = np.random.default_rng(0).integers(0, c.vocab_size, max(lengths, default=0))
    flops = blas_flops(decoder.threads) if lengths else 0.0
    for n in lengths:
        attention = 2 * c.q_size * len(c.attending) * n * n / (flops / 2)
        for spec in specs:
            best: Prefill | None = None
            for _ in range(2):
                watch = Stopwatch()
                watch.on = True
                decoder.linear = TimedLinear(linear, watch)
                caches = open_caches(decoder, spec, n)
                x = decoder.embed(ids[:n], 0)
                begin = time.perf_counter()
                with blas_threads(decoder.threads):
                    decoder.prefill(x, caches)
                seconds = time.perf_counter() - begin
                if best is None or seconds < best.seconds:
                    matmul = watch.seconds["matmul"]
                    floor = matmul + attention
                    best = Prefill(str(spec), n, seconds, n / seconds, matmul, flops, seconds / floor)
            assert best is not None
            results.append(best)
    decoder.linear = linear
    return results


def blas_flops(threads: int) -> float:
    """Float32 operations per second of NumPy's product of two matrices of 2,048 x 2,048, the best of five."""
    a = np.random.default_rng(0).standard_normal((2048, 2048), np.float32)
    out, best = np.empty_like(a), float("inf")
    with blas_threads(threads):
        for _ in range(5):
            begin = time.perf_counter()
            np.matmul(a, a, out=out)
            best = min(best, time.perf_counter() - begin)
    return float(2 * 2048**3 / best)


def _medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Milliseconds by part."""
    names = {name for row in rows for name in row}
    return {name: float(np.median([row.get(name, 0.0) for row in rows])) * 1e3 for name in names}
