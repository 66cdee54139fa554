"""The operators of `edgekv.models.architecture` on the device: own kernels for a few rows, cuBLAS for many."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from edgekv.kernels.cuda.matvec import MATVEC_ROWS, linear_program, matvec, packed_matvec, stages
from edgekv.kernels.cuda.program import Array, Launch
from edgekv.kernels.memory import contiguous
from edgekv.linear.cuda_half import HalfOps
from edgekv.linear.cuda_weights import ACTIVATIONS, LAYERS, MOST_BLOCKS, NORM_THREADS, DeviceWeights, Matrix
from edgekv.models.architecture import Ops

WIDENED_ELEMENTS = 1 << 24  # of a matrix in float32 at a time, for cuBLAS


class Normed(NamedTuple):
    """x (n, channels) that is to go through a RMS norm: the product with a matrix does that along the way."""

    x: Array
    weight: Array
    eps: float


class CudaOps:
    """Activations (n, channels), float32."""

    def __init__(self, weights: DeviceWeights) -> None:
        self.weights, self.driver = weights, weights.driver

    def linear(self, x: Array | Normed, name: str) -> Array:
        return self._linear(x, name)

    def add_linear(self, x: Array, y: Array, name: str) -> Array:
        if len(x) > MATVEC_ROWS:
            return x + self._linear(y, name)
        return self._linear(y, name, onto=contiguous(x))

    def gated_linear(self, x: Array | Normed, name: str, kind: str) -> Array:
        if self._stages(x, name):
            return self._linear(x, name, gate=ACTIVATIONS[kind])
        y = self._linear(x, name)
        return self._activation(y, y.shape[1] // 2, kind, 1)

    def _stages(self, x: Array | Normed, name: str) -> bool:
        w = self.weights.linears[name]
        return (isinstance(x, Normed) or len(x) <= MATVEC_ROWS) and stages(w.bits, w.scales, w.block)

    def _linear(self, x: Array | Normed, name: str, onto: Array | None = None, gate: int | None = None) -> Array:
        w = self.weights.linears[name]
        if self._stages(x, name):
            x, norm = (x.x, (x.weight, x.eps)) if isinstance(x, Normed) else (x, None)
            given: dict[str, Any] = {"bias": w.bias, "onto": onto, "norm": norm, "gate": gate}
            given |= {"bits": w.bits, "block": w.block, "columns": w.columns}
            return packed_matvec(self.driver, contiguous(x), w.data, w.scales, **given)
        x = self._norm("rms_norm", x.x, [x.weight], x.eps) if isinstance(x, Normed) else x
        if len(x) > MATVEC_ROWS:
            return self._matmul(x, w)
        form = {"bits": w.bits, "block": w.block, "columns": w.columns}
        return matvec(self.driver, contiguous(x), w.data, **form, scales=w.scales, bias=w.bias, onto=onto)

    def _matmul(self, x: Array, w: Matrix) -> Array:
        y = self.driver.empty((len(x), w.rows), np.float32)
        step = min(max(1, WIDENED_ELEMENTS // w.columns), MOST_BLOCKS)
        for a in range(0, w.rows, step):
            part = slice(a, min(a + step, w.rows))
            y[:, part] = x @ self._widened(w, part).T
        if w.bias is not None:
            y += w.bias
        return y

    def _widened(self, w: Matrix, part: slice) -> Array:
        """Rows of the matrix in float32."""
        if w.bits == 32:
            return w.data[part]
        n = part.stop - part.start
        out = self.driver.empty((n, w.columns), np.float32)
        launch = Launch(linear_program(w.bits, w.block), "widen_weights", (-(-w.columns // 256), n), 256)
        scales = self.driver.shift if w.scales is None else w.scales[part]
        self.driver.launch(launch, w.data[part], scales, w.columns, w.blocks, out)
        return out

    def rms_norm(self, x: Array, name: str, eps: float) -> Array | Normed:
        if len(x) <= MATVEC_ROWS:
            return Normed(x, self.weights.vectors[name], eps)
        return self._norm("rms_norm", x, [self.weights.vectors[name]], eps)

    def layer_norm(self, x: Array, name: str, eps: float) -> Array:
        vectors = [self.weights.vectors[f"{name}.{end}"] for end in ("weight", "bias")]
        return self._norm("layer_norm", x, vectors, eps)

    def _norm(self, kernel: str, x: Array, vectors: list[Array], eps: float) -> Array:
        y = self.driver.empty(x.shape, np.float32)
        launch = Launch(LAYERS, kernel, (len(x),), NORM_THREADS)
        self.driver.launch(launch, x, x.shape[1], *vectors, float(eps), y)
        return y

    def activation(self, x: Array, kind: str) -> Array:
        return self._activation(x, x.shape[1], kind, 0)

    def _activation(self, x: Array, size: int, kind: str, gated: int) -> Array:
        y = self.driver.empty((len(x), size), np.float32)
        launch = Launch(LAYERS, "activation", (-(-size // 256), len(x)), 256)
        self.driver.launch(launch, x, size, ACTIVATIONS[kind], gated, y)
        return y


class CudaLinear:
    """The three blocks of every layer; of many rows in halves, where the device and the weights have it so."""

    def __init__(self, weights: DeviceWeights) -> None:
        self.arch, self._ops = weights.arch, CudaOps(weights)
        is_packed = any(w.bits < 32 for w in weights.linears.values())
        self.half = HalfOps(weights) if weights.driver.multiplies_halves and is_packed else None
        """The operators for many rows; None: as for few."""
        self.weights_bytes = weights.nbytes

    def attention_in(self, i: int, x: Array) -> Array:
        return self.arch.attention_in(self._for(x), i, x)

    def attention_out(self, i: int, x: Array, attention: Array) -> Array:
        return self.arch.attention_out(self._for(x), i, x, attention)

    def head(self, x: Array) -> Array:
        return self.arch.head(self._for(x), x)

    def _for(self, x: Array) -> Ops:
        return self._ops if self.half is None or len(x) <= MATVEC_ROWS else self.half
