"""Benchmark: times tokens at a given depth of the context, and prompts, on a model or on random weights."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from edgekv.checkpoint.hub import load_shape
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import open_caches
from edgekv.engine.model import Model
from edgekv.engine.sampling import Sampler, SamplingParams
from edgekv.eval.evaluate import copy_cache
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import KVCache
from edgekv.kvcache.recurrent import attending
from edgekv.machine import blas_threads
from edgekv.models import architecture
from edgekv.types import TaskProgress
from edgekv.weights.formats import weight_format
from edgekv.weights.random_weights import RandomWeights, random_store

FILL_TOKENS = 512  # synthetic keys and values that are drawn at a time
ROUND_TOKENS = 8  # that one scheme decodes before the next one's turn
MATMUL_METHODS = ("pre_attention", "post_attention", "head")  # of a `Decoder`, whose time is counted as matmul
PREFILL_RUNS = 2  # of which the faster counts
SPARE_POSITIONS = 4096  # beyond the needed ones, where a shape has too few learned positions

Seconds = dict[str, float]  # by part: matmul, attention


@dataclasses.dataclass(frozen=True)
class Timing:
    """The times of one scheme at one depth; medians in milliseconds per token, of all layers but for ``*_layer``.

    attention_ms_layer: one whole `KVCache.attend`, which reads ``bytes_read_layer`` at ``gb_per_s``.
    """

    kv: str
    depth: int
    tokens: int
    token_ms: float
    token_ms_p95: float
    matmul_ms: float
    attention_ms_layer: float
    bytes_read_layer: int
    gb_per_s: float
    cache_bytes: int


@dataclasses.dataclass(frozen=True)
class Prefill:
    """The time of an exact prompt of ``tokens`` tokens through all layers, with encoding, without logits."""

    kv: str
    tokens: int
    seconds: float
    tokens_per_s: float
    matmul_s: float


def timed(seconds: Seconds, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that its time is added to ``seconds[part]``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - begin
        return result

    return call


@contextlib.contextmanager
def timed_blocks(decoder: Decoder, seconds: Seconds) -> Iterator[None]:
    """Times the decoder's MATMUL_METHODS as matmul, within a with statement."""
    for name in MATMUL_METHODS:
        setattr(decoder, name, timed(seconds, "matmul", getattr(decoder, name)))
    try:
        yield
    finally:
        for name in MATMUL_METHODS:
            delattr(decoder, name)


class SchemeTimer:
    """The caches of one scheme, filled with ``depth`` tokens, and the times of the tokens after them.

    totals: seconds of each token. parts: seconds of its matmul and its attention.
    """

    def __init__(self, decoder: Decoder, spec: CacheSpec, depth: int, tokens: int) -> None:
        self.decoder, self.spec, self.depth = decoder, spec, depth
        self.totals: list[float] = []
        self.parts: list[Seconds] = []
        self._seconds: Seconds = {}
        self.layers = open_caches(decoder, spec, depth + tokens)
        self.caches = attending(self.layers)
        for cache in self.caches:
            cache.attend = timed(self._seconds, "attention", cache.attend)  # type: ignore[method-assign]
        self._sampler = Sampler(SamplingParams(temperature=0.0), decoder.config.vocab_size)
        self._token = 0
        self._fill()
        with blas_threads(1):
            self.decode(1)  # compiles, and touches the buffers
        self.totals.clear()
        self.parts.clear()

    def _fill(self) -> None:
        """Fills the caches with keys around a drifting mean and normal values, the same in every layer."""
        c, rng = self.decoder.config, np.random.default_rng(0)
        drawn = list(dict.fromkeys(self._first_of_layout()))
        drift = np.zeros((c.n_kv_heads, 1, c.head_dim), np.float32)
        for start in range(0, self.depth, FILL_TOKENS):
            n = min(FILL_TOKENS, self.depth - start)
            drift += rng.standard_normal(drift.shape, np.float32)
            k = rng.standard_normal((c.n_kv_heads, n, c.head_dim), np.float32) + drift
            v = rng.standard_normal(k.shape, np.float32)
            q = rng.standard_normal((c.n_heads, n, c.head_dim), np.float32) / np.float32(np.sqrt(c.head_dim))
            for cache in drawn:
                if start:
                    cache.append_prefill(k, v)
                else:
                    cache.prefill(q, k, v)
            if not start:
                type(drawn[0]).finish_prefill(drawn)
        for cache, like in zip(self.caches, self._first_of_layout(), strict=True):
            if cache is not like:
                copy_cache(like, cache)
        for layer in self.layers:
            if not isinstance(layer, KVCache):  # the time does not depend on the contents of a state
                layer.advance(self.depth)

    def _first_of_layout(self) -> list[KVCache]:
        """Returns for each layer the first cache of the same layout, which is filled for all of them."""
        first: dict[Any, KVCache] = {}
        keys = [(type(cache), str(cache.layout()), cache.geometry.sliding_window) for cache in self.caches]
        return [first.setdefault(key, cache) for key, cache in zip(keys, self.caches, strict=True)]

    def decode(self, n: int) -> None:
        """Decodes n more tokens."""
        with timed_blocks(self.decoder, self._seconds):
            for _ in range(n):
                self._seconds.clear()
                begin = time.perf_counter()
                self._token = self._sampler.sample(self.decoder.step(self._token, self.layers))
                self.totals.append(time.perf_counter() - begin)
                self.parts.append(dict(self._seconds))

    def part_ms(self, part: str) -> float:
        """Returns the median milliseconds of a part of a token."""
        return float(np.median([seconds.get(part, 0.0) for seconds in self.parts])) * 1e3

    def timing(self) -> Timing:
        """Returns the timing of the tokens so far."""
        n_layers = len(self.caches)
        read = sum(cache.bytes_read() for cache in self.caches) // n_layers
        attention = self.part_ms("attention") / n_layers
        return Timing(
            kv=str(self.spec),
            depth=self.depth,
            tokens=len(self.totals),
            token_ms=float(np.median(self.totals)) * 1e3,
            token_ms_p95=float(np.percentile(self.totals, 95)) * 1e3,
            matmul_ms=self.part_ms("matmul"),
            attention_ms_layer=attention,
            bytes_read_layer=read,
            gb_per_s=read / attention / 1e6,
            cache_bytes=sum(cache.nbytes for cache in self.caches),
        )


def bench(
    decoder: Decoder,
    specs: Sequence[CacheSpec],
    depths: Sequence[int],
    *,
    tokens: int,
    progress: TaskProgress = lambda task, done, total: None,
) -> list[Timing]:
    """Times at least ``tokens`` tokens with each scheme at each depth; the schemes take turns."""
    results = []
    rounds = -(-tokens // ROUND_TOKENS)
    for depth in depths:
        timers = []
        for i, spec in enumerate(specs):
            progress(f"filling caches to {depth} tokens", i, len(specs))
            timers.append(SchemeTimer(decoder, spec, depth, (rounds + 1) * ROUND_TOKENS))
        with blas_threads(1):
            for i in range(rounds):
                progress(f"decoding at {depth} tokens", i, rounds)
                for timer in timers:
                    timer.decode(ROUND_TOKENS)
        results += [timer.timing() for timer in timers]
    return results


def bench_prefill(decoder: Decoder, specs: Sequence[CacheSpec], lengths: Sequence[int]) -> list[Prefill]:
    """Times PREFILL_RUNS prompts for each length and scheme; returns the faster ones."""
    results = []
    ids = np.random.default_rng(0).integers(0, decoder.config.vocab_size, max(lengths, default=0))
    for n in lengths:
        for spec in specs:
            runs = []
            for _ in range(PREFILL_RUNS):
                parts: Seconds = {}
                caches = open_caches(decoder, spec, n)
                x = decoder.embed(ids[:n], 0)
                begin = time.perf_counter()
                with blas_threads(decoder.threads), timed_blocks(decoder, parts):
                    decoder.prefill(x, caches)
                seconds = time.perf_counter() - begin
                runs.append(Prefill(str(spec), n, seconds, n / seconds, parts["matmul"]))
            results.append(min(runs, key=lambda run: run.seconds))
    return results


def shape_model(
    shape: str, n_layers: int | None, positions: int, weights: str, progress: TaskProgress | None = None
) -> Model:
    """Makes a model of random weights in a shape of `edgekv.checkpoint.hub`, or finds it in the cache folder.

    n_layers: None: the shape's own. positions: tokens that it must be able to read. weights: a format's name, or
    auto. Raises ConfigError (field shape, or weights).
    """
    config = shape_config(shape, n_layers, positions)
    store = random_store(config, weight_format(weights, architecture(config)), progress)
    return Model(pathlib.Path(store.folder), config, None, store)


def shape_config(shape: str, n_layers: int | None, positions: int) -> dict[str, Any]:
    """Returns the config for which `shape_model` draws weights."""
    config = load_shape(shape, n_layers, None)
    arch = architecture(config)
    if arch.learned_positions and positions > arch.config.max_positions:
        config = load_shape(shape, n_layers, positions + SPARE_POSITIONS)
    return config


def unread_model(name: str, config: dict[str, Any]) -> Model:
    """Makes a model of a config alone, without weights, to plan with. Raises the errors of `architecture`."""
    return Model(pathlib.Path(name), config, None, RandomWeights(config))
