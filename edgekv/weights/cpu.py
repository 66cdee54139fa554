"""Operators of `edgekv.models.architecture` on the CPU: products read the mapped weights in 2 to 8 or 32 bits."""

from __future__ import annotations

import functools
import mmap
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from edgekv.files import Memo
from edgekv.kernels.cpu import layers
from edgekv.kernels.cpu.blocks import BLOCKS
from edgekv.kernels.cpu.gemm import BYTE_CODES, MXFP4, OUTPUTS, integer_layout, rotated_layout
from edgekv.kernels.cpu.matmul import QuantizedMatmul, QuantizedWeights, float_matmul, multiply_rows
from edgekv.kernels.interface import GEMV_ROWS
from edgekv.machine import all_cores, available_memory_bytes, machine_info
from edgekv.models.architecture import Architecture
from edgekv.types import F32, I64, Array, Threads
from edgekv.weights.formats import FORMATS, ROUTER, ModelFormat, WeightFormat
from edgekv.weights.ops import NumpyOps, apply_gate, groups
from edgekv.weights.store import WeightStore

DECODE_PAIRS = 32  # pairs of a token and an expert up to which products take the threads of decoding


class StoredLinear(NamedTuple):
    """A linear layer of the store: its product of rows (n, columns) and threads, and its bias (rows,)."""

    product: Callable[[F32, int], F32]
    bias: F32 | None


class CpuOps(NumpyOps):
    """Operators by compiled kernels.

    Of a mixture's mapped file only the rows of the chosen experts are read. Where memory has no room for all
    experts, the system is told which rows to read: by itself it would read ahead, most of the others too.
    """

    def __init__(self, store: WeightStore, threads: Threads) -> None:
        super().__init__(store)
        self._store, self._threads, self.threads = store, threads, threads
        self._stored: dict[str, StoredLinear] = {}
        self._vectors: dict[str, F32] = {}
        self._is_cold = store.nbytes > available_memory_bytes()
        experts = {name: linear.n_experts for name, linear in self._linears.items() if linear.n_experts}
        wide = [name for name, n in experts.items() if least_outputs(store, name, n) >= OUTPUTS]
        self._experts = {name: products(store, name, experts[name]) for name in wide}
        for name in experts if self._is_cold else ():
            self._advise(name, mmap.MADV_RANDOM)

    def warm_up(self) -> list[Callable[[], object]]:
        """Returns calls that compute a row of a layer of each kind and format, and of the head."""
        first: dict[tuple[object, ...], int] = {}
        for i in range(self.arch.config.n_layers):
            linears = self.arch.layer_linears(i)
            kind = ((name.partition(".")[2], self._store.form.of(name)) for name in linears)
            first.setdefault((self.arch.widths(i), *kind), i)
        row = np.zeros((1, self.arch.config.hidden_size), np.float32)
        calls = [functools.partial(self._run_layer, i, row) for i in first.values()]
        return [*calls, lambda: self.arch.head(self, row)]

    def _run_layer(self, i: int, row: F32) -> None:
        self.arch.pre_attention(self, i, row)
        self.arch.post_attention(self, i, row, np.zeros((1, self.arch.widths(i)[1]), np.float32))

    def _multiply(self, x: F32, matrix: F32) -> F32:
        return float_matmul(x, matrix, self._threads)

    def _stored_linear(self, x: F32, name: str) -> F32:
        if name not in self._stored:
            self._stored[name] = self._open(name)
        product, bias = self._stored[name]
        y = product(x, self._threads.decode if len(x) <= GEMV_ROWS else self._threads.prompt)
        if bias is not None:
            y += bias
        return y

    def _open(self, name: str) -> StoredLinear:
        """Returns how a linear layer is computed: by quantized kernels, or in float32 if it has few outputs.

        A router computes each row as if it were alone, also in a prompt.
        """
        store = self._store
        if least_outputs(store, name) >= OUTPUTS:
            return StoredLinear(products(store, name), store.bias(name))
        matrix = self._matrix(name)
        if name.endswith(ROUTER):
            return StoredLinear(lambda x, n_threads: multiply_rows(x, matrix, n_threads), store.bias(name))
        return StoredLinear(lambda x, n_threads: self._multiply(x, matrix), store.bias(name))

    def add_linear(self, x: F32, y: F32, name: str) -> F32:
        """Returns x plus the linear layer's outputs of y (n, columns)."""
        total = self.linear(y, name)
        total += x
        return total

    def rms_norm(self, x: F32, name: str, eps: float) -> F32:
        """Returns x (n, channels), normed by its rows' root mean squares."""
        return layers.rms_norm(x, self._vector(name), eps)

    def layer_norm(self, x: F32, name: str, eps: float) -> F32:
        """Returns x (n, channels), normed by its rows' means and deviations."""
        return layers.layer_norm(x, self._vector(f"{name}.weight"), self._vector(f"{name}.bias"), eps)

    def _vector(self, name: str) -> F32:
        if name not in self._vectors:
            self._vectors[name] = np.ascontiguousarray(self.weights.vector(name))
        return self._vectors[name]

    def activation(self, x: F32, kind: str) -> F32:
        """Returns the activation of each number of x (n, channels)."""
        return layers.activation(x, kind) if kind in (*layers.SIGMOIDS, "gelu") else super().activation(x, kind)

    def gated_linear(self, x: F32, name: str, kind: str) -> F32:
        """Returns activation(gate) * up (n, rows / 2) of a linear layer's two halves."""
        if kind not in layers.SIGMOIDS:
            return super().gated_linear(x, name, kind)
        return layers.apply_gate(self.linear(x, name), kind)

    def add_experts(self, x: F32, y: F32, i: int) -> F32:
        """Returns x (n, hidden) plus what layer i's experts make of y (n, hidden)."""
        config = self.arch.config
        experts = config.experts_of(i)
        assert experts is not None
        logits = self.linear(y, f"{i}.router")
        expert_ids, tokens, weights = layers.route(logits, experts.per_token, experts.renormalized)
        both = self.expert_products(y.take(tokens, axis=0), expert_ids, f"{i}.experts_up")
        if experts.clamped:
            inner = layers.clamped_gate(both, *experts.clamped)
        elif config.activation in layers.SIGMOIDS:
            inner = layers.apply_gate(both, config.activation)
        else:
            inner = apply_gate(config, both)
        results = self.expert_products(inner, expert_ids, f"{i}.experts_down")
        return layers.add_results(x, results, tokens, weights)

    def expert_products(self, rows: F32, expert_ids: I64, name: str) -> F32:
        """Returns outputs (m, n) of rows (m, columns), each through its expert in expert_ids (m,), ascending."""
        for expert, _ in groups(expert_ids) if self._is_cold else ():
            self._advise(name, mmap.MADV_WILLNEED, expert)
        if name not in self._experts:
            return super().expert_products(rows, expert_ids, name)
        n_threads = self._threads.decode if len(rows) <= DECODE_PAIRS else self._threads.prompt
        result = self._experts[name](rows, n_threads, expert_ids)
        bias = self._store.bias(name)
        if bias is not None:
            result += bias.reshape(self._linears[name].n_experts, -1)[expert_ids]
        return result

    def _advise(self, name: str, advice: int, expert: int | None = None) -> None:
        """Tells the system how the rows of an expert, or of all experts, will be read."""
        for key, array in self._store.arrays(name).items():
            n = len(array) // self._linears[name].n_experts
            rows = (0, None) if expert is None else (expert * n, n)
            self._store.advise(f"{name}.{key}", advice, *rows)


def least_outputs(store: WeightStore, name: str, n_experts: int = 1) -> int:
    """Returns the fewest outputs of a linear layer, or of an expert, of a format in fewer than 32 bits; else 0."""
    form, rows = store.form.of(name), store.arch.linears()[name].rows // n_experts
    pieces = [piece.rows for piece in form.pieces]
    return 0 if form == FORMATS["f32"] else rows // sum(pieces) * min(pieces)


def products(store: WeightStore, name: str, n_experts: int = 1) -> Callable[..., F32]:
    """Returns a linear layer in fewer than 32 bits, of one format or several: x (n, columns) -> (n, outputs)."""
    pieces, arrays = store.form.of(name).pieces, store.arrays(name)
    first, *others = (QuantizedMatmul(stored_weights(p.form, p.select(arrays)), n_experts) for p in pieces)
    if not others:
        return first
    # Each rounds x for itself, as their blocks may differ, in less than a twentieth of a product's time.
    return lambda *given: np.concatenate([product(*given) for product in (first, *others)], axis=1)


def stored_weights(form: WeightFormat, arrays: Mapping[str, Array]) -> QuantizedWeights:
    """Returns the weights of arrays (rows, ...) in fewer than 32 bits, with their zero points or offsets."""
    arrays = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
    if form.kept:
        return QuantizedWeights(arrays["blocks"], None, BYTE_CODES, block_type=BLOCKS[form.name])
    if form.rotated:
        scales = arrays["scales"].view(np.uint16)
        return QuantizedWeights(arrays["codes"], scales, rotated_layout(form.bits))
    layout = MXFP4 if form.e2m1 else integer_layout(form.bits, form.block)
    return QuantizedWeights(arrays["codes"], arrays["scales"], layout, arrays.get("offsets"), arrays.get("zeros"))


# How many threads are fastest

MEMO, MAX_REMEMBERED = Memo("threads.json", 3), 256
FEW_CORES = 2  # so many are all used, unmeasured
ENOUGH = 0.97  # of the best speed
PROBE_WEIGHTS = 12 << 20  # elements of a block that small caches do not hold, or not four times
PROMPT_ROWS = 32
DECODE_ROUNDS, DECODE_S = 3, 0.08  # rounds of one token with every number of threads; for at least so long
PROMPT_ROUNDS = 2


def product_threads(store: WeightStore, threads: int | None) -> Threads:
    """Returns the threads of decoding and of prompts: ``threads``, or if that is None those that are fastest.

    They are measured once per machine, shape and format, and remembered. A token's products are bound by memory,
    which fewer cores than all may read as fast, or faster; those of a prompt are bound by computing. A product's
    sums do not depend on how many threads share it, so neither does a text.
    """
    cores = all_cores(threads)
    if threads is not None or cores <= FEW_CORES:
        return Threads(cores, cores)
    known, key = MEMO.read() or {}, _key(store.arch, store.form)
    if key not in known:
        decode, prompt = map(fastest, measure(store, candidates(cores)))
        known[key] = decode, max(decode, prompt)
        MEMO.keep(dict([*known.items()][-MAX_REMEMBERED:]))
    return Threads(*known[key])


def candidates(cores: int) -> list[int]:
    """Returns numbers of threads worth trying, the most first: all cores, three quarters, half and a quarter."""
    return sorted({-(-cores * quarters // 4) for quarters in (1, 2, 3, 4)}, reverse=True)


def fastest(seconds: Mapping[int, float]) -> int:
    """Returns the fewest threads that are nearly as fast as the fastest, of seconds by number of threads."""
    return min(n for n, s in seconds.items() if s * ENOUGH <= min(seconds.values()))


def measure(store: WeightStore, numbers: list[int]) -> tuple[dict[int, float], dict[int, float]]:
    """Measures a block of the model: seconds by number of threads, of a token and of PROMPT_ROWS.

    They are the best of a few rounds, in which the numbers of threads take turns.
    """
    (name, widths), rng = _block(store.arch), np.random.default_rng(0)
    blocks = {n: functools.partial(getattr(store.arch, name), CpuOps(store, Threads(n, n)), 0) for n in numbers}
    rows = {key: rng.standard_normal((PROMPT_ROWS, width), np.float32) for key, width in widths.items()}
    row = {key: x[:1] for key, x in rows.items()}
    _best(blocks, row, 1, 0)  # with what is done once
    return _best(blocks, row, DECODE_ROUNDS, DECODE_S), _best(blocks, rows, PROMPT_ROUNDS, 0)


def _best(
    blocks: Mapping[int, Callable[..., F32]], inputs: dict[str, F32], rounds: int, least_s: float
) -> dict[int, float]:
    best, begun = dict.fromkeys(blocks, np.inf), time.perf_counter()
    while rounds > 0 or time.perf_counter() - begun < least_s:
        rounds -= 1
        for n, block in blocks.items():
            start = time.perf_counter()
            block(**inputs)
            best[n] = min(best[n], time.perf_counter() - start)
    return best


def _block(arch: Architecture) -> tuple[str, dict[str, int]]:
    """Returns a block's name and its inputs' widths: the first layer's smaller one if that is large enough."""
    hidden, (fused, mixed) = arch.config.hidden_size, arch.widths(0)
    if hidden * fused >= PROBE_WEIGHTS:
        return "pre_attention", {"x": hidden}
    return "post_attention", {"x": hidden, "attention": mixed}


def _key(arch: Architecture, form: ModelFormat) -> str:
    """Returns the machine, and shape and formats of layer 0: models that share them take the same threads."""
    m, c = machine_info(), arch.config
    name, (fused, mixed) = _block(arch)[0], arch.widths(0)
    formats = ",".join(form.of(linear).name for linear in arch.layer_linears(0))
    shape = f"{name} {formats} {c.hidden_size} {fused} {mixed} {c.intermediate_size}"
    return f"{m['board'] or m['cpu']}, {m['cores']} cores, edgekv {m['versions']['edgekv']}: {shape}"
