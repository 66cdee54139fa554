"""Measurements for tools/gpu_check.py: medians over device events, recorded launches, inputs beyond the L2."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cupy
import numpy as np

from edgekv.cuda.cupy_driver import CupyDriver
from edgekv.cuda.decoder import CudaDecoder, CudaWorkspace
from edgekv.cuda.kernels import CudaKernels
from edgekv.cuda.matvec import matvec
from edgekv.cuda.module import CannotRecord
from edgekv.cuda.weights import KINDS, DeviceWeights, Matrix
from edgekv.dense.formats import WEIGHTS, WeightFormat, specs_bytes, store_specs
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.base import Geometry, KVCache
from edgekv.models import architecture
from edgekv.sampling import Sampler, SamplingParams

REPEATS = 15
HEADS, HEAD_DIM = 32, 128  # Llama 2 7B: as many KV heads as query heads
FILL_TOKENS = 2048
STD = 0.02
PROMPT = 2048
FORMS = (("int4", 4, 128), ("int4-32", 4, 32), ("int8", 8, 128), ("f16", 16, 1), ("f32", 32, 1))
L2_TIMES = 4  # the inputs of one measurement, at least, in sizes of the L2 cache


class Gpu:
    """The driver, its kernels, and what the card can do."""

    def __init__(self) -> None:
        self.driver = CupyDriver()
        self.kernels = CudaKernels(self.driver)
        self.workspace = CudaWorkspace(self.driver)
        device = cupy.cuda.runtime.getDevice()
        self.properties = cupy.cuda.runtime.getDeviceProperties(device)
        self.l2_bytes = int(self.properties["l2CacheSize"])
        self.rng = cupy.random.default_rng(0)

    def normal(self, *shape: int) -> Any:
        return self.rng.standard_normal(shape, dtype=np.float32)

    def seconds(self, step: Callable[[], Any], repeats: int = REPEATS) -> float:
        """Median of one run of ``step``, recorded, so that the gaps between its launches are the device's own."""
        step()
        try:
            run = self.driver.record(step)
        except CannotRecord:
            run = step
        run()
        times = []
        for _ in range(repeats):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(self.driver.stream)
            run()
            end.record(self.driver.stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
        return float(np.median(times))

    def copy_bandwidth(self, n_bytes: int = 4 << 30) -> float:
        """Bytes per second, read and written, of a large copy from device to device."""
        a, b = (cupy.ones(n_bytes // 4, np.float32) for _ in range(2))
        return 2 * n_bytes / self.seconds(lambda: cupy.copyto(a, b))


@dataclasses.dataclass
class Layers:
    """Caches of one scheme with the same content in different memory, enough to push each other out of the L2."""

    caches: list[KVCache]
    queries: list[Any]
    keys: list[Any]
    values: list[Any]

    @classmethod
    def filled(cls, gpu: Gpu, spec: CacheSpec, depth: int, most: int, kernels: Any = None) -> Layers:
        kernels = kernels or gpu.kernels
        first = new_cache(gpu, spec, depth, kernels)
        for a in range(0, depth, FILL_TOKENS):
            n = min(FILL_TOKENS, depth - a)
            k = gpu.normal(HEADS, n, HEAD_DIM) + 2 * gpu.normal(HEADS, 1, HEAD_DIM)
            first.extend(k, gpu.normal(HEADS, n, HEAD_DIM))
        n_layers = max(2, min(most, -(-L2_TIMES * gpu.l2_bytes // max(first.bytes_read(), 1))))
        caches = [first, *(clone(gpu, spec, depth, first, kernels) for _ in range(n_layers - 1))]
        rows = [[gpu.normal(HEADS, 1, HEAD_DIM) for _ in caches] for _ in range(3)]
        queries = [q * np.float32(2 / np.sqrt(HEAD_DIM)) for q in rows[0]]
        return cls(caches, queries, rows[1], rows[2])

    def attend(self) -> None:
        """One token in each layer; counted, and taken back."""
        for cache, *token in zip(self.caches, self.queries, self.keys, self.values, strict=True):
            cache.attend(*token)
            cache.skip(-1)


def new_cache(gpu: Gpu, spec: CacheSpec, depth: int, kernels: Any) -> KVCache:
    cache = spec.scheme(Geometry(HEADS, HEADS, HEAD_DIM, depth + 256, layer=2, n_layers=32), spec.knobs)
    cache.allocate(kernels, gpu.workspace)
    return cache


def clone(gpu: Gpu, spec: CacheSpec, depth: int, other: KVCache, kernels: Any) -> KVCache:
    """A cache with the contents of another."""
    cache, state = new_cache(gpu, spec, depth, kernels), other.state()
    for name, array in cache.prepare(state.counters, state.fitted).items():
        array[...] = state.arrays[name]
    return cache


def attention(gpu: Gpu, text: str, depth: int, bandwidth: float, most: int = 16) -> dict[str, Any]:
    """One scheme's attention at a depth, per layer: append, scores, softmax, values."""
    layers = Layers.filled(gpu, CacheSpec.parse(text), depth, most)
    n = len(layers.caches)
    seconds = gpu.seconds(layers.attend) / n
    read = layers.caches[0].bytes_read()
    floor = read / bandwidth
    return {
        "scheme": text,
        "depth": depth,
        "us": seconds * 1e6,
        "bytes": read,
        "gb_per_s": read / seconds / 1e9,
        "times_floor": seconds / floor,
        "layers": n,
        "cache_bytes": layers.caches[0].nbytes,
    }


def scan(gpu: Gpu, depth: int, bandwidth: float) -> dict[str, Any]:
    """bitplane's scan alone: the scores of all packed tokens from their signs."""
    layers = Layers.filled(gpu, CacheSpec.parse("bitplane"), depth, 32)
    packed: int = layers.caches[0].n_bulk  # type: ignore[attr-defined]
    buffers = [cupy.empty((HEADS, 1, packed), np.float32) for _ in layers.caches]
    codes = [cache.keys.pack(q) for cache, q in zip(layers.caches, layers.queries, strict=True)]  # type: ignore[attr-defined]

    def step() -> None:
        for cache, (rotated, planes, scale, _), s in zip(layers.caches, codes, buffers, strict=True):
            cache.keys.scan(rotated, planes, scale, 0, packed, s, 0)  # type: ignore[attr-defined]

    seconds = gpu.seconds(step) / len(buffers)
    read = packed // 64 * layers.caches[0].keys.block_bytes  # type: ignore[attr-defined]
    return {
        "scheme": "bitplane, scan alone",
        "depth": depth,
        "us": seconds * 1e6,
        "bytes": read,
        "gb_per_s": read / seconds / 1e9,
        "times_floor": seconds * bandwidth / read,
        "layers": len(buffers),
        "cache_bytes": 0,
    }


def torch_attention(depth: int, n_layers: int) -> float:
    """Seconds per layer of PyTorch's scaled_dot_product_attention in float16 at batch 1, as a CUDA graph."""
    import torch

    shape = 1, HEADS, depth, HEAD_DIM
    kv = [torch.randn(shape, dtype=torch.float16, device="cuda") for _ in range(2 * n_layers)]
    q = torch.randn(1, HEADS, 1, HEAD_DIM, dtype=torch.float16, device="cuda")

    def step() -> None:
        for i in range(n_layers):
            torch.nn.functional.scaled_dot_product_attention(q, kv[2 * i], kv[2 * i + 1])

    return torch_seconds(step) / n_layers


def torch_matvec(depth: int, n_layers: int, transposed: bool) -> float:
    """Seconds of a float16 matrix-vector product per head through cuBLAS: scores, or (transposed) value sums."""
    import torch

    shape = HEADS, depth, HEAD_DIM
    matrices = [torch.randn(shape, dtype=torch.float16, device="cuda") for _ in range(n_layers)]
    x = torch.randn(HEADS, 1, depth if transposed else HEAD_DIM, dtype=torch.float16, device="cuda")
    out = torch.empty(HEADS, 1, HEAD_DIM if transposed else depth, dtype=torch.float16, device="cuda")

    def step() -> None:
        for m in matrices:
            torch.bmm(x, m if transposed else m.transpose(1, 2), out=out)

    return torch_seconds(step) / n_layers


def torch_seconds(step: Callable[[], None]) -> float:
    import torch

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(np.median(times))


def kernels_of(gpu: Gpu, text: str, depth: int, most: int) -> list[tuple[str, float]]:
    """Every kernel function that a token's attention calls, with its seconds per layer, each timed by itself."""
    spy = Spy(gpu.kernels)
    layers = Layers.filled(gpu, CacheSpec.parse(text), depth, most, spy)
    lazy = gpu.workspace.scores
    gpu.workspace.scores = lambda shape: gpu.workspace.array("scores", shape)  # type: ignore[method-assign]
    spy.notes = []
    try:
        layers.attend()
    finally:
        gpu.workspace.scores = lazy  # type: ignore[method-assign]
    notes, spy.notes = spy.notes, None
    times = []
    for name in dict.fromkeys(name for name, _, _ in notes):
        own = [(function, arguments) for each, function, arguments in notes if each == name]

        def step(own: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]] = own) -> None:
            for function, arguments in own:
                function(*arguments)

        times.append((name, gpu.seconds(step) / len(layers.caches)))
    return times


class Spy:
    """Kernels that note every call with its arguments while ``notes`` is a list."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.notes: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] | None = None

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.kernels, name)

        def call(*arguments: Any) -> Any:
            if self.notes is not None:
                self.notes.append((name, function, arguments))
            return function(*arguments)

        return call


def weight_products(gpu: Gpu, rows: int = 4096, columns: int = 11008) -> Iterator[tuple[str, float, int]]:
    """(form, seconds, bytes) of one weight matrix times one activation."""
    x = gpu.normal(1, columns)
    for name, bits, block in FORMS:
        n = max(2, L2_TIMES * gpu.l2_bytes // (rows * columns * bits // 8))
        blocks = columns // block if bits < 16 else 0
        scales = [gpu.normal(rows, blocks) for _ in range(n)] if blocks else [None] * n
        if blocks:
            data = [gpu.rng.integers(0, 256, (rows, blocks, block * bits // 8), dtype=np.uint8) for _ in range(n)]
        else:
            data = [gpu.normal(rows, columns).astype(np.float16 if bits == 16 else np.float32) for _ in range(n)]

        def step(data: Any = data, scales: Any = scales, bits: int = bits, block: int = block) -> None:
            for each, own in zip(data, scales, strict=True):
                matvec(gpu.driver, x, each, bits=bits, block=block, columns=columns, scales=own)

        yield name, gpu.seconds(step) / n, rows * (columns * bits // 8 + 4 * blocks)


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
    """A prompt of n random tokens into dense caches, the second time."""
    spec, ids = CacheSpec.parse("dense"), np.random.default_rng(0).integers(0, decoder.config.vocab_size, n)
    for _ in range(2):
        caches = spec.layers(decoder.config, n)
        for cache in caches:
            cache.allocate(decoder.kernels, decoder.workspace)
        gpu.driver.stream.synchronize()
        begin = time.perf_counter()
        decoder.prefill(decoder.embed(ids, 0), caches)
        gpu.driver.stream.synchronize()
    return time.perf_counter() - begin


def end_to_end(gpu: Gpu, config: dict[str, Any], schemes: Sequence[str], depth: int) -> Iterator[dict[str, Any]]:
    """Whole decode steps of a shape with random int4 weights: time and energy per token."""
    weights = SyntheticWeights(gpu, config, WEIGHTS["int4"])
    decoder = CudaDecoder(weights, gpu.driver, depth + 1024, 1)
    yield {"scheme": f"prefill of {PROMPT} tokens", "ms": prefill_seconds(gpu, decoder, PROMPT) * 1e3}
    for text in schemes:
        spec = CacheSpec.parse(text)
        caches = spec.layers(decoder.config, depth + 1024)
        for cache in caches:
            cache.allocate(decoder.kernels, decoder.workspace)
            for a in range(0, depth, FILL_TOKENS):
                shape = HEADS, min(FILL_TOKENS, depth - a), HEAD_DIM
                cache.extend(gpu.normal(*shape), gpu.normal(*shape))
        yield {"scheme": text, **_decode(gpu, decoder, caches, weights.token_bytes)}
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
