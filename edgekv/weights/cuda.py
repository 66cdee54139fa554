"""Weights in the GPU's memory, and their operators: kernels of edgekv for a few rows, cuBLAS for many."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgekv.errors import ConfigError
from edgekv.kernels.arrays import contiguous
from edgekv.kernels.cuda.driver import Array, Driver, Launch, Program
from edgekv.kernels.cuda.matvec import MATVEC_ROWS, Matrix, matvec, packed_matvec, rotated, takes_packed, widen
from edgekv.models.architecture import Architecture
from edgekv.types import I64, TaskProgress
from edgekv.weights.formats import (
    FORMATS,
    MatrixFormat,
    ModelFormat,
    WeightFormat,
    specs_bytes,
    store_specs,
    token_bytes,
)
from edgekv.weights.ops import LoraDeltas, NumpyOps
from edgekv.weights.store import WeightStore

KINDS = {"F32": 0, "F16": 1, "BF16": 2}  # as KIND_... of layers.cu
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "identity": 4}  # as in common.cu
LAYERS = Program(("layers",))
NORM_THREADS = 512
MIN_SLAB = 1 << 23  # weights that are widened at a time; more on cards with more memory
SLAB_SHARE = 2048  # bytes of the card's memory per weight of a slab
TILE_ROWS = 256
LOADING = "loading to the GPU"


def lora_refusal() -> ConfigError:
    """Returns the refusal of a LoRA beside the weights."""
    advice = "give {lora} without a name, which is merged into the weights, or use {device:cpu}"
    return ConfigError("a GPU applies no LoRA at run time", field="loras", advice=advice)


def device_matrix_format(form: MatrixFormat) -> WeightFormat:
    """Returns the format that a matrix of a store has in the GPU's memory.

    Codes of e2m1 and blocks kept as a GGUF file has them become int8-32, zero points the float32 numbers they add.
    """
    stored, *others = (piece.form for piece in form.pieces)
    if others or stored.kept or stored.e2m1:
        return FORMATS["int8-32"]
    with_offsets = dataclasses.replace(stored, zeros=False, offsets=stored.zeros or stored.offsets)
    return next(held for held in FORMATS.values() if dataclasses.replace(held, name=stored.name) == with_offsets)


def device_model_format(form: ModelFormat) -> ModelFormat:
    """Returns the format that the weights of a store have in the GPU's memory."""
    linears = ((name, device_matrix_format(form.of(name)).name) for name, _ in form.linears)
    return ModelFormat(form.name, tuple(linears))


class DeviceWeights:
    """A store's weights in the GPU's memory: all that decoding reads. `matrix` and others are read on the host."""

    def __init__(self, store: WeightStore, driver: Driver, progress: TaskProgress | None) -> None:
        self.arch: Architecture = store.arch
        self.driver = driver
        specs = store_specs(store.arch, device_model_format(store.form), store.table_dtypes)
        self.nbytes, self.token_bytes = specs_bytes(specs), token_bytes(store.arch, specs)
        self.matrix, self.bias, self.vector, self.array = store.matrix, store.bias, store.vector, store.array
        self.linears: dict[str, Matrix] = {}
        names = store.arch.linears()
        for done, (name, linear) in enumerate(names.items(), 1):
            form, arrays = device_matrix_format(store.form.of(name)), store.arrays(name)
            if form == FORMATS["int8-32"] and form != store.form.of(name):
                arrays = form.quantize(store.matrix(name))
            data, scales = arrays["codes" if form.bits < 32 else "weight"], arrays.get("scales")
            blocks = 0 if scales is None else scales.shape[1]
            if form.rotated and scales is not None:
                scales = scales.view(np.uint16)
            uploaded: list[Any] = [
                None if array is None else driver.upload(np.ascontiguousarray(array))
                for array in (data, scales, store.bias(name), store.corrections(name))
            ]
            shape = linear.rows, linear.columns, form.bits, form.block or 1, blocks
            self.linears[name] = Matrix(*shape, *uploaded)._replace(rotated=form.rotated)
            if progress:
                progress(LOADING, done, len(names))
        self.vectors = {name: driver.upload(store.vector(name)) for name in store.arch.vectors()}
        self.tables: dict[str, tuple[Array, int]] = {}
        for name in store.arch.tables():
            stored = store.raw(name)
            bits = stored if stored.dtype.itemsize == 4 else stored.view(np.uint16)
            self.tables[name] = driver.upload(np.ascontiguousarray(bits)), KINDS[store.table_dtypes[name]]

    def rows(self, table: str, ids: I64) -> Array:
        """Returns rows ``ids`` (n,) of a table, (n, hidden) float32 on the device."""
        return self.embed(table, self.driver.upload(ids.astype(np.int32)), None, 0)

    def embed(self, table: str, ids: Array, positions: str | None, start: int) -> Array:
        """Returns rows ``ids`` (n,) int32 of a table, (n, hidden), plus rows start.. (+ the delta) of another."""
        data, kind = self.tables[table]
        n, size = ids.shape[0], data.shape[1]
        added = self.tables[positions] if positions else (None, 0)
        x = self.driver.empty((n, size), np.float32)
        launch = Launch(LAYERS, "embed", (n,), 256)
        self.driver.launch(launch, data, kind, ids, *added, start, self.driver.position_delta, size, x)
        return x


class DeferredNorm(NamedTuple):
    """x (n, channels) and an RMS norm still to be applied: by `packed_matvec`, or before any other operator."""

    x: Array
    weight: Array
    eps: float


class CudaOps(NumpyOps):
    """The operators of a model on the GPU, on activations (n, channels) float32.

    halves: the operators for many rows on tensor cores. Factors of products are then float16: activations are
    rounded where they are made, weights a slab of rows at a time. Products, norms and the residual are float32.
    Numbers beyond the range of float16 become its largest number.
    """

    weights: DeviceWeights

    def __init__(self, weights: DeviceWeights, halves: bool = False) -> None:
        self.weights, self.driver, self.weights_bytes = weights, weights.driver, weights.nbytes
        self._halves, self._dtype = halves, np.float16 if halves else np.float32  # of the factors of products
        self._slab = max(MIN_SLAB, weights.driver.memory_bytes // SLAB_SHARE)
        is_packed = any(w.bits < 32 for w in weights.linears.values())
        has_halves = is_packed and weights.driver.has_half_gemm and not halves
        self.half = CudaOps(weights, halves=True) if has_halves else None
        """The operators for many rows in float16; None where float32 serves."""

    def for_rows(self, n: int) -> CudaOps:
        return self if self.half is None or n <= MATVEC_ROWS else self.half

    def with_lora(self, deltas: LoraDeltas) -> NumpyOps:
        raise lora_refusal()

    def linear(
        self, x: Array | DeferredNorm, name: str, onto: Array | None = None, gate: int | None = None
    ) -> Array:
        """Returns the linear layer's outputs (n, rows) of x (n, columns); added to ``onto``, maybe in place."""
        w = self.weights.linears[name]
        if self._takes_packed(x, name):
            x, norm = (x.x, (x.weight, x.eps)) if isinstance(x, DeferredNorm) else (x, None)
            return packed_matvec(self.driver, contiguous(x), w, onto=onto, norm=norm, gate=gate)
        x = contiguous(self._plain(x, self._dtype))
        if x.dtype != self._dtype:
            x = self._activation(x, "identity", 0)
        is_many = self._halves or len(x) > MATVEC_ROWS
        y = self._matmul(x, w, onto) if is_many else matvec(self.driver, x, w, onto)
        if w.corrections is not None:
            y += self._block_sums(x, w) @ w.corrections.T
        return y

    def add_linear(self, x: Array, y: Array, name: str) -> Array:
        """Returns x plus the linear layer's outputs of y (n, columns)."""
        return self.linear(y, name, onto=contiguous(x))

    def gated_linear(self, x: Array | DeferredNorm, name: str, kind: str) -> Array:
        """Returns activation(gate) * up (n, rows / 2) of a linear layer's two halves."""
        if self._takes_packed(x, name):
            return self.linear(x, name, gate=ACTIVATIONS[kind])
        return self._activation(self.linear(x, name), kind, 1)

    def _takes_packed(self, x: Array | DeferredNorm, name: str) -> bool:
        n = len(x.x if isinstance(x, DeferredNorm) else x)
        return not self._halves and n <= MATVEC_ROWS and takes_packed(self.driver, self.weights.linears[name])

    def _block_sums(self, x: Array, w: Matrix) -> Array:
        """Returns the sums (n, blocks) of the inputs of each block."""
        padded = self.driver.zeros((len(x), w.blocks * w.block), np.float32)
        padded[:, : w.columns] = x
        return padded.reshape(len(x), w.blocks, w.block).sum(axis=2)

    def _matmul(self, x: Array, w: Matrix, onto: Array | None) -> Array:
        """Returns the outputs (n, rows) of x (n, columns), by slabs of the matrix, added to ``onto`` in place."""
        y = self.driver.empty((len(x), w.rows), np.float32) if onto is None else onto
        x = rotated(self.driver, x, w) if w.rotated else x
        slab_rows = self._slab_rows(w)
        for a in range(0, w.rows, slab_rows):
            rows = slice(a, min(a + slab_rows, w.rows))
            slab, out = self._widened(w, rows), y[:, rows]
            if self._halves:
                self.driver.half_gemm(x, slab, out, onto is not None)
            else:
                out[:] = x @ slab.T if onto is None else out + x @ slab.T
        if w.bias is not None:
            y += w.bias
        return y

    def _slab_rows(self, w: Matrix) -> int:
        """Returns the rows of a slab: slabs of about one size, of whole tiles, without which cuBLAS is slow."""
        slabs = -(-w.rows * w.columns // self._slab)
        return -(-w.rows // (slabs * TILE_ROWS)) * TILE_ROWS

    def _widened(self, w: Matrix, rows: slice) -> Array:
        """Returns some rows of a matrix in the dtype of products."""
        if w.bits == 32 and not self._halves:
            return w.data[rows]
        return widen(self.driver, w, rows, self._dtype)

    def rms_norm(self, x: Array, name: str, eps: float) -> DeferredNorm:  # type: ignore[override]
        """Returns x (n, channels) with the RMS norm that is still to be applied."""
        return DeferredNorm(x, self.weights.vectors[name], eps)

    def layer_norm(self, x: Array, name: str, eps: float) -> Array:
        """Returns x (n, channels), normed by its rows' means and deviations."""
        vectors = [self.weights.vectors[f"{name}.{end}"] for end in ("weight", "bias")]
        return self._norm("layer_norm", x, vectors, eps, self._dtype)

    def _norm(self, kernel: str, x: Array, vectors: list[Array], eps: float, dtype: npt.DTypeLike) -> Array:
        x, y = contiguous(x), self.driver.empty(x.shape, dtype)
        launch = Launch(LAYERS, kernel, (len(x),), NORM_THREADS)
        self.driver.launch(launch, x, x.shape[1], *vectors, float(eps), y, int(dtype == np.float16))
        return y

    def _plain(self, x: Array | DeferredNorm, dtype: npt.DTypeLike = np.float32) -> Array:
        """Returns x (n, channels) after its norm, if it has one."""
        return self._norm("rms_norm", x.x, [x.weight], x.eps, dtype) if isinstance(x, DeferredNorm) else x

    def activation(self, x: Array, kind: str) -> Array:
        """Returns the activation of each number of x (n, channels)."""
        return self._activation(x, kind, 0)

    def _activation(self, x: Array, kind: str, gated: int) -> Array:
        """Returns the activation of x (n, channels); gated 1: of its first half, times the second one."""
        x, size = contiguous(x), x.shape[1] // (1 + gated)
        y = self.driver.empty((len(x), size), self._dtype)
        launch = Launch(LAYERS, "activation", (-(-size // 256), len(x)), 256)
        self.driver.launch(launch, x, size, ACTIVATIONS[kind], gated, y, int(self._halves))
        return y

    def split(self, x: Array | DeferredNorm, sizes: Sequence[int]) -> list[Array]:
        """Returns parts (n, size) of x (n, channels), one for each size."""
        x, ends = self._plain(x), list(itertools.accumulate(sizes))
        return [x[:, end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def join(self, parts: Sequence[Array | DeferredNorm]) -> Array:
        """Returns parts (n, channels) side by side."""
        plain = [self._plain(part) for part in parts]
        sizes = [part.shape[1] for part in plain]
        y = self.driver.empty((len(plain[0]), sum(sizes)), np.float32)
        for target, part in zip(self.split(y, sizes), plain, strict=True):
            target[:] = part
        return y

    def add(self, a: Array | DeferredNorm, b: Array | DeferredNorm) -> Array:
        """Returns a + b (n, channels)."""
        return self._plain(a) + self._plain(b)

    def scale(self, x: Array | DeferredNorm, factor: float) -> Array:
        """Returns x (n, channels) times a number."""
        return self._plain(x) * np.float32(factor)
