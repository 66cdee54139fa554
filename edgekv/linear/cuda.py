"""The operators of `edgekv.models.architecture` on the device: own kernels for a few rows, cuBLAS for many."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from edgekv.kernels.cuda.matvec import MATVEC_ROWS, linear_program, matvec
from edgekv.kernels.cuda.program import Array, Launch
from edgekv.kernels.memory import contiguous
from edgekv.linear.cuda_weights import LAYERS, DeviceWeights, Matrix

WIDENED_ELEMENTS = 1 << 24  # of a matrix in float32 at a time, for cuBLAS
MOST_BLOCKS = 65535  # in a grid's second direction
NORM_THREADS = 512
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}


class CudaOps:
    """Activations (n, channels), float32."""

    def __init__(self, weights: DeviceWeights) -> None:
        self.weights, self.driver = weights, weights.driver

    def linear(self, x: Array, name: str) -> Array:
        w = self.weights.linears[name]
        y = self._product(x, w)
        return y if w.shift is None else y + self._block_sums(x, w) @ w.shift.T

    def _block_sums(self, x: Array, w: Matrix) -> Array:
        """(n, blocks): the sum of the inputs of each block."""
        whole = self.driver.zeros((len(x), w.blocks * w.block), np.float32)
        whole[:, : w.columns] = x
        return whole.reshape(len(x), w.blocks, w.block).sum(axis=2)

    def _product(self, x: Array, w: Matrix) -> Array:
        if len(x) > MATVEC_ROWS:
            return self._matmul(x, w)
        form = {"bits": w.bits, "block": w.block, "columns": w.columns}
        return matvec(self.driver, contiguous(x), w.data, **form, scales=w.scales, bias=w.bias)

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

    def rms_norm(self, x: Array, name: str, eps: float) -> Array:
        return self._norm("rms_norm", x, (name,), eps)

    def layer_norm(self, x: Array, name: str, eps: float) -> Array:
        return self._norm("layer_norm", x, (f"{name}.weight", f"{name}.bias"), eps)

    def _norm(self, kernel: str, x: Array, names: tuple[str, ...], eps: float) -> Array:
        x, y = contiguous(x), self.driver.empty(x.shape, np.float32)
        vectors = [self.weights.vectors[name] for name in names]
        launch = Launch(LAYERS, kernel, (len(x),), NORM_THREADS)
        self.driver.launch(launch, x, x.shape[1], *vectors, float(eps), y)
        return y

    def activation(self, x: Array, kind: str) -> Array:
        n, size = x.shape
        y = self.driver.empty(x.shape, np.float32)
        stride = x.strides[0] // x.itemsize
        launch = Launch(LAYERS, "activation", (-(-size // 256), n), 256)
        self.driver.launch(launch, x, stride, size, ACTIVATIONS[kind], y)
        return y

    def split(self, x: Array, sizes: Sequence[int]) -> list[Array]:
        ends = list(itertools.accumulate(sizes))
        return [x[:, end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def join(self, parts: Sequence[Array]) -> Array:
        sizes = [part.shape[1] for part in parts]
        y = self.driver.empty((len(parts[0]), sum(sizes)), np.float32)
        for target, part in zip(self.split(y, sizes), parts, strict=True):
            target[:] = part
        return y

    def add(self, a: Array, b: Array) -> Array:
        return a + b

    def mul(self, a: Array, b: Array) -> Array:
        return a * b

    def scale(self, x: Array, factor: float) -> Array:
        return x * np.float32(factor)

    def soft_cap(self, x: Array, cap: float) -> Array:
        return np.tanh(x * np.float32(1 / cap)) * np.float32(cap)


class CudaLinear:
    """The three blocks of every layer."""

    def __init__(self, weights: DeviceWeights) -> None:
        self.arch, self._ops = weights.arch, CudaOps(weights)
        self.weights_bytes = weights.nbytes

    def attention_in(self, i: int, x: Array) -> Array:
        return self.arch.attention_in(self._ops, i, x)

    def attention_out(self, i: int, x: Array, attention: Array) -> Array:
        return self.arch.attention_out(self._ops, i, x, attention)

    def head(self, x: Array) -> Array:
        return self.arch.head(self._ops, x)
