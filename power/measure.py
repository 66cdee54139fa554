"""Decoding at a full context, scheme by scheme: latency, attention, streaming read and energy of a token."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np

from edgekv.decoder.decoder import Decoder
from edgekv.errors import ConfigError, MemoryBudgetError
from edgekv.kernels import threads as kernel_threads
from edgekv.kernels.cpu.jit import parallel_jit
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.base import KVCache
from edgekv.kvcache.geometry import Workspace
from edgekv.linear.weights import CheckpointWeights
from edgekv.machine import available_memory_bytes, blas_threads, require_memory
from edgekv.models import architecture
from edgekv.power.phases import EnergyMeter, NoMeter
from edgekv.power.report import EnergyReport
from edgekv.session.model import Model
from edgekv.session.plan import SessionPlan

LAYER_KEYS = {"gpt2": "n_layer"}
TOKEN = 1


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median of the runs, and half the distance between the least and the greatest."""

    median: float
    half_range: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        return cls(statistics.median(values), (max(values) - min(values)) / 2) if values else None


@dataclasses.dataclass(frozen=True)
class Row:
    """One scheme; times in milliseconds and energies in millijoules per token. None: not measured."""

    kv: str
    cache_bytes: int
    bytes_read: int
    token_bytes: int
    latency_ms: Spread
    attention_ms: Spread
    load_ms: Spread | None
    gross_mj: Spread | None = None
    net_mj: Spread | None = None
    corrected_mj: Spread | None = None


@parallel_jit
def read_words(words: Any, sums: Any) -> None:
    """Sums a part of the words per thread, in four streams: one alone waits for its own additions."""
    n = len(sums)
    for part in numba.prange(n):
        mine = words[len(words) * part // n : len(words) * (part + 1) // n]
        a = b = c = d = np.uint64(0)
        quarter = len(mine) // 4
        for i in range(quarter):
            a += mine[i]
            b += mine[quarter + i]
            c += mine[2 * quarter + i]
            d += mine[3 * quarter + i]
        sums[part] = a + b + c + d


class FirstLayers:
    """A checkpoint's tensors of its first layers; the others are hidden."""

    def __init__(self, tensors: Any, names: set[str]) -> None:
        self._tensors, self._names = tensors, names

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensors, name)

    def names(self) -> list[str]:
        return [name for name in self._tensors.names() if name in self._names]


def first_layers(model: Model, n: int) -> Model:
    """The model with its first ``n`` layers only. Raises ConfigError."""
    if n > model.config.n_layers:
        raise ConfigError(f"--layers {n}: this model has {model.config.n_layers}; give 1 to that")
    if not isinstance(model.weights, CheckpointWeights):
        raise ConfigError(f"--layers: {model.path} is a weight store; give the original checkpoint")
    source = model.weights.source
    config = dict(source.config) | {LAYER_KEYS.get(model.config.model_type, "num_hidden_layers"): n}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:n]
    short = architecture(config, source.tensors)
    hidden = FirstLayers(source.tensors, set(short.tensors()))
    identity = f"{source.identity}-{n}layers"
    part = dataclasses.replace(source, tensors=hidden, config=config, identify=lambda progress: identity)
    return Model(model.path, config, model.tokenizer_path, CheckpointWeights(part, short))


def check_memory(model: Model, plan: SessionPlan) -> None:
    """Raises MemoryBudgetError naming the --layers that would fit."""
    available = available_memory_bytes()
    try:
        require_memory(plan.parts(), available)
    except MemoryBudgetError as error:
        layers = model.config.n_layers * available // (sum(plan.parts().values()) * 11 // 10)
        offer = f"--layers {layers}" if layers else "a smaller --ctx"
        raise MemoryBudgetError(f"--kv {plan.kv}: {error}; this machine has room for {offer}") from None


def filled(spec: CacheSpec, decoder: Decoder, capacity: int, n: int) -> list[KVCache]:
    """A cache per layer that holds ``n`` random tokens, with room for ``capacity``."""
    caches, c = spec.layers(decoder.config, capacity), decoder.config
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((c.n_heads, n, c.head_dim), np.float32) / np.float32(math.sqrt(c.head_dim))
    keys, values = (rng.standard_normal((c.n_kv_heads, n, c.head_dim), np.float32) for _ in range(2))
    for cache in caches:
        cache.allocate(decoder.kernels, decoder.workspace)
        cache.prefill(queries, keys, values)
    spec.scheme.finish_prefill(caches)
    return caches


def stopwatch(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """``function``, adding its time to ``seconds[0]``."""

    def timed(*arguments: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            seconds[0] += time.perf_counter() - begun

    return timed


def measure(
    spec: CacheSpec, decoder: Decoder, ctx: int, runs: int, tokens: int, meter: EnergyMeter | NoMeter
) -> Row:
    """Decodes ``tokens`` greedy tokens ``runs`` times, ending at a context of ``ctx``."""
    warm_up = 1
    caches = filled(spec, decoder, ctx, ctx - runs * tokens - warm_up)
    attended = [0.0]
    for cache in caches:
        cache.attend = stopwatch(cache.attend, attended)
    latencies, attentions = [], []
    with blas_threads(1):
        token = int(decoder.step(TOKEN, caches).argmax())
        for run in range(runs):
            attended[0] = 0.0
            with meter.phase(phase_name(spec, run), tokens=tokens):
                begun = time.perf_counter()
                for _ in range(tokens):
                    token = int(decoder.step(token, caches).argmax())
                latencies.append(1e3 * (time.perf_counter() - begun) / tokens)
            attentions.append(1e3 * attended[0] / tokens)
    bytes_read = sum(cache.bytes_read() for cache in caches)
    cache_bytes = sum(cache.nbytes for cache in caches)
    del caches, cache
    decoder.workspace = Workspace()
    latency, attention = Spread.of(latencies), Spread.of(attentions)
    assert latency is not None
    assert attention is not None
    return Row(
        kv=str(spec),
        cache_bytes=cache_bytes,
        bytes_read=bytes_read,
        token_bytes=decoder.weights.token_bytes + bytes_read,
        latency_ms=latency,
        attention_ms=attention,
        load_ms=streaming_read(bytes_read, runs),
    )


def phase_name(spec: CacheSpec, run: int) -> str:
    return f"{spec} run {run + 1}"


def streaming_read(n_bytes: int, runs: int) -> Spread | None:
    """Milliseconds to read so many bytes once from memory with all threads; None if they do not fit it now."""
    if n_bytes * 1.1 > available_memory_bytes():
        return None
    words = np.ones(n_bytes // 8, np.uint64)
    sums = np.empty(kernel_threads.count(), np.uint64)
    times = []
    for _ in range(runs + 1):
        begun = time.perf_counter()
        kernel_threads.run_parallel(read_words, words, sums)
        times.append(1e3 * (time.perf_counter() - begun))
    return Spread.of(times[1:])  # the first compiles


def with_energy(row: Row, spec: CacheSpec, runs: int, report: EnergyReport | None) -> Row:
    """The row with the energies of its runs, where all of them were measured."""
    if report is None:
        return row
    phases = [report.phases[phase_name(spec, run)] for run in range(runs)]
    if any(phase.mj_per_token is None for phase in phases):
        return row
    return dataclasses.replace(
        row,
        gross_mj=Spread.of([phase.mj_per_token for phase in phases if phase.mj_per_token is not None]),
        net_mj=Spread.of([phase.net_mj_per_token for phase in phases if phase.net_mj_per_token is not None]),
        corrected_mj=Spread.of(
            [phase.corrected_mj_per_token for phase in phases if phase.corrected_mj_per_token is not None]
        ),
    )
