"""Whole decode steps of a shape with random weights, for tools/gpu_check.py."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import cupy
import numpy as np
from gpu_measure import FILL_TOKENS, Gpu

from edgekv.decoder.cuda import CudaDecoder
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.base import KVCache
from edgekv.linear.cuda_weights import KINDS, DeviceWeights, Matrix
from edgekv.linear.formats import WEIGHTS, WeightFormat, specs_bytes, store_specs
from edgekv.models import architecture
from edgekv.session.sampling import Sampler
from edgekv.session.sampling_params import SamplingParams

STD = 0.02
PROMPTS = (2048, 8192)


class SyntheticWeights(DeviceWeights):
    """Random weights of a shape, drawn on the device."""

    def __init__(self, gpu: Gpu, config: dict[str, Any], form: WeightFormat) -> None:
        self.arch, self.driver = architecture(config), gpu.driver
        specs = store_specs(self.arch, form, dict.fromkeys(self.arch.tables(), "F16"))
        tables = {name: specs[name] for name in self.arch.tables()}
        self.nbytes, self.token_bytes = specs_bytes(specs), specs_bytes(specs) - specs_bytes(tables)
        self.linears = {name: self._linear(gpu, name, specs, form) for name in self.arch.linears()}
        self.vectors = {name: cupy.ones(size, np.float32) for name, (_, size) in self.arch.vectors().items()}
        drawn = {name: (gpu.normal(*shape) * STD).astype(np.float16) for name, (_, shape) in tables.items()}
        self.tables = {name: (table.view(np.uint16), KINDS["F16"]) for name, table in drawn.items()}

    def _linear(self, gpu: Gpu, name: str, specs: dict[str, Any], form: WeightFormat) -> Matrix:
        linear = self.arch.linears()[name]
        codes = gpu.rng.integers(0, 256, specs[f"{name}.codes"][1], dtype=np.uint8)
        scales = cupy.full(specs[f"{name}.scales"][1], STD * np.sqrt(3) / 2 ** (form.bits - 1), np.float32)
        return Matrix(linear.rows, linear.columns, form.bits, form.block, scales.shape[1], codes, scales, None)


def prefill_seconds(gpu: Gpu, decoder: CudaDecoder, n: int) -> float:
    """A prompt of n random tokens into dense caches: the best of three after the first."""
    spec, ids = CacheSpec.parse("dense"), np.random.default_rng(0).integers(0, decoder.config.vocab_size, n)
    times = []
    for _ in range(4):
        caches = spec.layers(decoder.config, n)
        for cache in caches:
            cache.allocate(decoder.kernels, decoder.workspace)
        gpu.driver.stream.synchronize()
        begin = time.perf_counter()
        decoder.head(decoder.prefill(decoder.embed(ids, 0), caches)[-1:])
        gpu.driver.stream.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def end_to_end(gpu: Gpu, config: dict[str, Any], plan: Sequence[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """A shape with random int4 weights: prompts, and decode steps of each (scheme, tokens in the cache)."""
    weights = SyntheticWeights(gpu, config, WEIGHTS["int4"])
    decoder = CudaDecoder(weights, gpu.driver, max(depth for _, depth in plan) + 1024, 1)
    for n in PROMPTS:
        yield {"scheme": "a prompt", "depth": n, "ms": prefill_seconds(gpu, decoder, n) * 1e3}
    c = decoder.config
    for text, depth in plan:
        spec = CacheSpec.parse(text)
        caches = spec.layers(decoder.config, depth + 1024)
        for cache in caches:
            cache.allocate(decoder.kernels, decoder.workspace)
            for a in range(0, depth, FILL_TOKENS):
                shape = c.n_kv_heads, min(FILL_TOKENS, depth - a), c.head_dim
                cache.extend(gpu.normal(*shape), gpu.normal(*shape))
        yield {"scheme": text, "depth": depth, **_decode(gpu, decoder, caches, weights.token_bytes)}
        del caches
        cupy.get_default_memory_pool().free_all_blocks()


def _decode(gpu: Gpu, decoder: CudaDecoder, caches: Sequence[KVCache], weight_bytes: int) -> dict[str, Any]:
    sampler = Sampler(SamplingParams(), decoder.config.vocab_size)
    token, replayed = 1, decoder.n_replayed
    for _ in range(4):
        token = sampler.sample(decoder.step(token, caches), ())
    joules, begin, times = _joules(), time.perf_counter(), []
    while time.perf_counter() - begin < 1.5 and len(times) < 800:
        start = time.perf_counter()
        token = sampler.sample(decoder.step(token, caches), ())
        times.append(time.perf_counter() - start)
    seconds, used = time.perf_counter() - begin, _joules()
    read = weight_bytes + sum(cache.bytes_read() for cache in caches)
    return {
        "ms_per_token": float(np.median(times)) * 1e3,
        "ms_per_token_mean": seconds / len(times) * 1e3,
        "tokens": len(times),
        "replayed": decoder.n_replayed - replayed,
        "bytes": read,
        "gb_per_s": read / float(np.median(times)) / 1e9,
        "mj_per_token": None if joules is None or used is None else (used - joules) / len(times) * 1e3,
        "watts": None if joules is None or used is None else (used - joules) / seconds,
    }


def _joules() -> float | None:
    """The board's energy counter; None where NVML has none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0))) / 1e3
    except Exception:  # no nvidia-ml-py, or a card without a counter
        return None
