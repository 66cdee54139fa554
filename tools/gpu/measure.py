"""Measures for check.py: medians over device events, captured launches, inputs beyond the second-level cache."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cupy
import numpy as np

from edgekv.engine.cuda import CudaBackend
from edgekv.engine.decoder import Decoder
from edgekv.engine.sampling import Sampler, SamplingParams
from edgekv.kernels.cuda.driver import CaptureError, Driver
from edgekv.kernels.cuda.kernels import CudaKernels
from edgekv.kernels.cuda.matvec import Matrix, matvec, packed_matvec, takes_packed, widen
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import Geometry, KVCache, Workspace
from edgekv.models import architecture
from edgekv.weights.cuda import KINDS, DeviceWeights
from edgekv.weights.formats import FORMATS, ModelFormat, WeightFormat, specs_bytes, store_specs
from edgekv.weights.gaussian import BEST_SCALES

REPEATS = 15
HEADS, HEAD_DIM = 32, 128  # Llama 2 7B: as many KV heads as query heads
FILL_TOKENS = 2048
FORMS = ("int4", "int4-32", "int8", "q2", "q3", "q4", "q5")
PROMPTS = (2048, 8192)  # tokens
SHAPE = 4096, 11008  # of a matrix: rows, columns
STD = 0.02  # of random weights
L2_TIMES = 4  # the inputs of one measurement, at least, in sizes of the L2 cache


class Gpu:
    """The driver, its kernels, and what the card can do."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.kernels = CudaKernels(self.driver)
        self.workspace = Workspace(self.driver)
        device = cupy.cuda.runtime.getDevice()
        self.properties = cupy.cuda.runtime.getDeviceProperties(device)
        self.l2_bytes = int(self.properties["l2CacheSize"])
        self.rng = cupy.random.default_rng(0)

    def normal(self, *shape: int) -> Any:
        return self.rng.standard_normal(shape, dtype=np.float32)

    def seconds(self, step: Callable[[], Any], repeats: int = REPEATS) -> float:
        """Returns the median time of ``step``, captured so that gaps between its launches are the device's own."""
        step()
        try:
            run = self.driver.capture(step)
        except CaptureError:
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
        """Returns bytes per second, read and written, of a large copy on the device: the faster of two ways."""
        a, b = (cupy.ones(n_bytes // 4, np.float32) for _ in range(2))
        copies = (
            lambda: a.data.copy_from_device_async(b.data, n_bytes, self.driver.stream),
            lambda: cupy.negative(b, out=a),
        )
        return max(2 * n_bytes / self.seconds(copy) for copy in copies)


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
            first.append_prefill(k, gpu.normal(HEADS, n, HEAD_DIM))
        n_layers = max(2, min(most, -(-L2_TIMES * gpu.l2_bytes // max(first.bytes_read(), 1))))
        caches = [first, *(clone(gpu, spec, depth, first, kernels) for _ in range(n_layers - 1))]
        rows = [[gpu.normal(HEADS, 1, HEAD_DIM) for _ in caches] for _ in range(3)]
        queries = [q * np.float32(2 / np.sqrt(HEAD_DIM)) for q in rows[0]]
        return cls(caches, queries, rows[1], rows[2])

    def attend(self) -> None:
        """Attends with one token in each layer; counts it, and takes it back."""
        for cache, *token in zip(self.caches, self.queries, self.keys, self.values, strict=True):
            cache.attend(*token)
            cache.advance(-1)


def new_cache(gpu: Gpu, spec: CacheSpec, depth: int, kernels: Any) -> KVCache:
    cache = spec.scheme(Geometry(HEADS, HEADS, HEAD_DIM, depth + 256, layer=2, n_layers=32), spec.config)
    cache.allocate(kernels, gpu.workspace)
    return cache


def clone(gpu: Gpu, spec: CacheSpec, depth: int, other: KVCache, kernels: Any) -> KVCache:
    """Returns a cache with the contents of another."""
    cache, state = new_cache(gpu, spec, depth, kernels), other.state()
    for name, array in cache.restore(state.counters, state.extra).items():
        array[...] = state.arrays[name]
    return cache


def attention(gpu: Gpu, text: str, depth: int, bandwidth: float, most: int = 16) -> dict[str, Any]:
    """Measures one scheme's attention at a depth, per layer: append, attend."""
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


def torch_attention(depth: int, n_layers: int, n: int = 1) -> float:
    """Returns seconds per layer of PyTorch's float16 attention at batch 1, as a CUDA graph.

    n: query tokens; one, or as many as ``depth``: then it is causal.
    """
    import torch

    kv = [torch.randn(1, HEADS, depth, HEAD_DIM, dtype=torch.float16, device="cuda") for _ in range(2 * n_layers)]
    q = torch.randn(1, HEADS, n, HEAD_DIM, dtype=torch.float16, device="cuda")

    def step() -> None:
        for i in range(n_layers):
            torch.nn.functional.scaled_dot_product_attention(q, kv[2 * i], kv[2 * i + 1], is_causal=n > 1)

    return torch_seconds(step) / n_layers


def torch_matvec(depth: int, n_layers: int, transposed: bool) -> float:
    """Returns seconds of cuBLAS's float16 product per head: scores, or (transposed) value sums."""
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


def launches_of(gpu: Gpu, text: str, depth: int, most: int) -> list[tuple[str, int, float]]:
    """Returns every kernel that a token's attention launches: how often per layer, and its seconds per layer.

    Each layer's launches of one kernel are captured together, so that the gaps between them count too.
    """
    layers = Layers.filled(gpu, CacheSpec.parse(text), depth, most)
    layers.attend()
    launch, notes = gpu.driver.launch, []

    def note(*arguments: Any) -> None:
        notes.append(arguments)
        launch(*arguments)

    gpu.driver.launch = note
    try:
        layers.attend()
    finally:
        gpu.driver.launch = launch
    n, found = len(layers.caches), []
    for program, kernel in dict.fromkeys(what[:2] for what, *_ in notes):
        own = [arguments for arguments in notes if arguments[0][:2] == (program, kernel)]

        def step(own: Sequence[tuple[Any, ...]] = own) -> None:
            for arguments in own:
                launch(*arguments)

        codecs = [str(value) for name, value in program.macros if name in ("KEYS", "VALUES")]
        found.append((" ".join([kernel, *codecs]), len(own) // n, gpu.seconds(step) / n))
    return found


def weight_products(gpu: Gpu) -> Iterator[tuple[str, float, int]]:
    """Yields (form, seconds, bytes) of one weight matrix times one activation."""
    rows, columns = SHAPE
    x = gpu.normal(1, columns)
    for name in (*FORMS, "f16", "f32"):
        form = FORMATS.get(name)
        n_bytes = rows * columns * (2 if name == "f16" else 4)
        if form and form.bits < 32:
            n_bytes = specs_bytes(form.arrays(rows, columns))
        matrices = []
        for _ in range(max(2, L2_TIMES * gpu.l2_bytes // n_bytes)):
            if form and form.bits < 32:
                matrices.append(random_matrix(gpu, form, rows, columns))
            else:
                bits, dtype = (16, np.float16) if name == "f16" else (32, np.float32)
                matrices.append(Matrix(rows, columns, bits, 1, 0, gpu.normal(rows, columns).astype(dtype)))

        def step(matrices: Any = matrices) -> None:
            for w in matrices:
                (packed_matvec if takes_packed(gpu.driver, w) else matvec)(gpu.driver, x, w)

        yield name, gpu.seconds(step) / len(matrices), n_bytes


def random_matrix(gpu: Gpu, form: WeightFormat, rows: int, columns: int) -> Matrix:
    """Returns random weights of a format of fewer than 32 bits."""
    specs = form.arrays(rows, columns)
    codes = gpu.rng.integers(0, 256, specs["codes"][1], dtype=np.uint8)
    step = BEST_SCALES[form.bits] if form.rotated else np.sqrt(3) / 2 ** (form.bits - 1)
    scales = cupy.full(specs["scales"][1], STD * step, np.float32)
    if form.rotated:
        scales = (scales.view(np.uint32) >> 16).astype(np.uint16)
    return Matrix(rows, columns, form.bits, form.block, scales.shape[1], codes, scales, rotated=form.rotated)


def prefill_attention(gpu: Gpu, n: int) -> tuple[float, float]:
    """Returns (seconds of a layer's attention over n tokens, its floating-point operations)."""
    q, k, v = ((gpu.normal(HEADS, n, HEAD_DIM) * 0.3).astype(np.float16) for _ in range(3))
    out = cupy.empty((n, HEADS * HEAD_DIM), np.float16)
    seconds = gpu.seconds(lambda: gpu.kernels.prefill_attention(q, k, v, 0, None, out))
    return seconds, 2 * HEADS * HEAD_DIM * n * n


def prompt_products(gpu: Gpu, n: int) -> Iterator[tuple[str, float, int]]:
    """Yields (what, seconds, operations or bytes): widening codes, and the product of halves."""
    rows, columns = SHAPE
    for name in ("int4", "q4"):
        w = random_matrix(gpu, FORMATS[name], rows, columns)

        def step(w: Matrix = w) -> None:
            widen(gpu.driver, w, slice(0, rows), np.float16)

        n_bytes = specs_bytes(FORMATS[name].arrays(rows, columns)) + 2 * rows * columns
        yield f"{name} weights to halves", gpu.seconds(step), n_bytes
    half = (gpu.normal(*SHAPE) * STD).astype(np.float16)
    x, y = gpu.normal(n, columns).astype(np.float16), cupy.empty((n, rows), np.float32)
    yield (
        "product of halves",
        gpu.seconds(lambda: gpu.driver.half_gemm(x, half, y, False)),
        2 * n * half.size,
    )


class SyntheticWeights(DeviceWeights):
    """Random weights of a shape, drawn on the device."""

    def __init__(self, gpu: Gpu, config: dict[str, Any], form: str) -> None:
        self.arch, self.driver = architecture(config), gpu.driver
        specs = store_specs(self.arch, ModelFormat(form), dict.fromkeys(self.arch.tables(), "F16"))
        tables = {name: specs[name] for name in self.arch.tables()}
        self.nbytes, self.token_bytes = specs_bytes(specs), specs_bytes(specs) - specs_bytes(tables)
        linears = self.arch.linears().items()
        self.linears = {name: random_matrix(gpu, FORMATS[form], each.rows, each.columns) for name, each in linears}
        self.vectors = {name: cupy.ones(size, np.float32) for name, (_, size) in self.arch.vectors().items()}
        drawn = {name: (gpu.normal(*shape) * STD).astype(np.float16) for name, (_, shape) in tables.items()}
        self.tables = {name: (table.view(np.uint16), KINDS["F16"]) for name, table in drawn.items()}


def prefill_seconds(gpu: Gpu, decoder: Decoder, n: int) -> float:
    """Measures a prompt of n random tokens into dense caches: the best of three after the first."""
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


def end_to_end(
    gpu: Gpu, config: dict[str, Any], form: str, plan: Sequence[tuple[str, int]]
) -> Iterator[dict[str, Any]]:
    """Measures a shape with random weights: prompts, and steps of each (scheme, tokens in the cache)."""
    weights = SyntheticWeights(gpu, config, form)
    decoder = Decoder(CudaBackend(weights, gpu.driver, 1), max(depth for _, depth in plan) + 1024)
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
                cache.append_prefill(gpu.normal(*shape), gpu.normal(*shape))
        yield {"scheme": text, "depth": depth, **_decode(gpu, decoder, caches, weights.token_bytes)}
        del caches
        cupy.get_default_memory_pool().free_all_blocks()


def _decode(gpu: Gpu, decoder: Decoder, caches: Sequence[KVCache], weight_bytes: int) -> dict[str, Any]:
    sampler = Sampler(SamplingParams(temperature=0.0), decoder.config.vocab_size)
    token, replayed = 1, decoder.graph_runner.n_replayed
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
        "replayed": decoder.graph_runner.n_replayed - replayed,
        "bytes": read,
        "gb_per_s": read / float(np.median(times)) / 1e9,
        "mj_per_token": None if joules is None or used is None else (used - joules) / len(times) * 1e3,
        "watts": None if joules is None or used is None else (used - joules) / seconds,
    }


def _joules() -> float | None:
    """Returns the board's energy counter, or None where NVML has none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0))) / 1e3
    except Exception:  # no nvidia-ml-py, or a card without a counter
        return None
