"""The operators of `edgekv.models.architecture` on the device: own kernels for a few rows, cuBLAS for many."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgekv.errors import ConfigError
from edgekv.kernels.cuda.matvec import MATVEC_ROWS, linear_program, matvec, packed_matvec, takes_packed
from edgekv.kernels.cuda.program import Array, Launch
from edgekv.kernels.memory import contiguous
from edgekv.linear.cuda_weights import ACTIVATIONS, LAYERS, MOST_BLOCKS, NORM_THREADS, DeviceWeights, Matrix
from edgekv.models.architecture import Ops

WIDENED_ELEMENTS = 1 << 24  # of a matrix in float32 at a time, for cuBLAS


class Normed(NamedTuple):
    """x (n, channels) that is to go through a RMS norm: the product with a matrix does that along the way."""

    x: Array
    weight: Array
    eps: float


class CudaOps(Ops):
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
        if self._takes_packed(x, name):
            return self._linear(x, name, gate=ACTIVATIONS[kind])
        return self._activation(self._linear(x, name), kind, 1, np.float32)

    def _takes_packed(self, x: Array | Normed, name: str) -> bool:
        w, n = self.weights.linears[name], len(x.x if isinstance(x, Normed) else x)
        return n <= MATVEC_ROWS and w.shift is None and takes_packed(w.bits, w.scales, w.block)

    def _linear(self, x: Array | Normed, name: str, onto: Array | None = None, gate: int | None = None) -> Array:
        w = self.weights.linears[name]
        if self._takes_packed(x, name):
            x, norm = (x.x, (x.weight, x.eps)) if isinstance(x, Normed) else (x, None)
            given: dict[str, Any] = {"bias": w.bias, "onto": onto, "norm": norm, "gate": gate}
            given |= {"bits": w.bits, "block": w.block, "columns": w.columns}
            return packed_matvec(self.driver, contiguous(x), w.data, w.scales, **given)
        x = self._plain(x)
        if len(x) > MATVEC_ROWS:
            y = self._matmul(x, w)
        else:
            form = {"bits": w.bits, "block": w.block, "columns": w.columns}
            y = matvec(self.driver, contiguous(x), w.data, **form, scales=w.scales, bias=w.bias, onto=onto)
        return y if w.shift is None else y + self._block_sums(x, w) @ w.shift.T

    def _block_sums(self, x: Array, w: Matrix) -> Array:
        """(n, blocks): the sum of the inputs of each block."""
        whole = self.driver.zeros((len(x), w.blocks * w.block), np.float32)
        whole[:, : w.columns] = x
        return whole.reshape(len(x), w.blocks, w.block).sum(axis=2)

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

    def rms_norm(self, x: Array, name: str, eps: float) -> Normed:
        return Normed(x, self.weights.vectors[name], eps)

    def layer_norm(self, x: Array, name: str, eps: float) -> Array:
        return self._layer_norm(x, name, eps, np.float32)

    def _layer_norm(self, x: Array, name: str, eps: float, dtype: npt.DTypeLike) -> Array:
        vectors = [self.weights.vectors[f"{name}.{end}"] for end in ("weight", "bias")]
        return self._norm("layer_norm", x, vectors, eps, dtype)

    def _norm(self, kernel: str, x: Array, vectors: list[Array], eps: float, dtype: npt.DTypeLike) -> Array:
        x, y = contiguous(x), self.driver.empty(x.shape, dtype)
        launch = Launch(LAYERS, _named(kernel, y), (len(x),), NORM_THREADS)
        self.driver.launch(launch, x, x.shape[1], *vectors, float(eps), y)
        return y

    def _plain(self, x: Array | Normed, dtype: npt.DTypeLike = np.float32) -> Array:
        """x, normed where it was to be."""
        return self._norm("rms_norm", x.x, [x.weight], x.eps, dtype) if isinstance(x, Normed) else x

    def activation(self, x: Array, kind: str) -> Array:
        return self._activation(x, kind, 0, np.float32)

    def _activation(self, x: Array, kind: str, gated: int, dtype: npt.DTypeLike) -> Array:
        """Of x, or gated: of its first half, times the second."""
        x, size = contiguous(x), x.shape[1] // (1 + gated)
        y = self.driver.empty((len(x), size), dtype)
        launch = Launch(LAYERS, _named("activation", y), (-(-size // 256), len(x)), 256)
        self.driver.launch(launch, x, size, ACTIVATIONS[kind], gated, y)
        return y

    def split(self, x: Array | Normed, sizes: Sequence[int]) -> list[Array]:
        x, ends = self._plain(x), list(itertools.accumulate(sizes))
        return [x[:, end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def join(self, parts: Sequence[Array | Normed]) -> Array:
        plain = [self._plain(part) for part in parts]
        sizes = [part.shape[1] for part in plain]
        y = self.driver.empty((len(plain[0]), sum(sizes)), np.float32)
        for target, part in zip(self.split(y, sizes), plain, strict=True):
            target[:] = part
        return y

    def add(self, a: Array | Normed, b: Array | Normed) -> Array:
        return self._plain(a) + self._plain(b)

    def mul(self, a: Array | Normed, b: Array | Normed) -> Array:
        return self._plain(a) * self._plain(b)

    def scale(self, x: Array | Normed, factor: float) -> Array:
        return self._plain(x) * np.float32(factor)

    def soft_cap(self, x: Array | Normed, cap: float) -> Array:
        return np.tanh(self._plain(x) * np.float32(1 / cap)) * np.float32(cap)

    def add_experts(self, x: Array, y: Array | Normed, i: int) -> Array:
        raise refuse_experts()


def refuse_experts() -> ConfigError:
    """The error for a mixture of experts on the device."""
    return ConfigError(
        "device='cuda': mixtures of experts do not run on it; use device='cpu' or device='numpy'",
        field="device",
        value="cuda",
        accepted=["cpu", "numpy"],
    )


def _named(kernel: str, y: Array) -> str:
    """The kernel that gives numbers of y's type."""
    return f"{kernel}_half" if y.dtype == np.float16 else kernel
