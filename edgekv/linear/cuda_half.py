"""The operators for many rows on tensor cores: products of halves, summed in float32.

What enters a product is rounded to half precision, the activations by what makes them and the weights a slab of
rows at a time; what leaves it, the norms and the residual are float32. Numbers beyond a half's range become the
largest half.
"""

from __future__ import annotations

import numpy as np

from edgekv.kernels.cuda.matvec import linear_program
from edgekv.kernels.cuda.program import Array, Launch
from edgekv.kernels.memory import contiguous
from edgekv.linear.cuda_ops import CudaOps, Normed
from edgekv.linear.cuda_weights import LAYERS, MOST_BLOCKS, DeviceWeights, Matrix

LEAST_SLAB = 1 << 23  # weights in half precision at a time; more where the card has more memory
TILE_ROWS = 256
SLAB_SHARE = 2048  # of the card's bytes, a weight each


class HalfOps(CudaOps):
    """What goes into linear layers is halves, what comes out of them float32 (n, channels)."""

    def __init__(self, weights: DeviceWeights) -> None:
        super().__init__(weights)
        self._slab = max(LEAST_SLAB, weights.driver.memory_bytes // SLAB_SHARE)

    def linear(self, x: Array | Normed, name: str) -> Array:
        w, x = self.weights.linears[name], self._plain(x, np.float16)
        y = self.driver.empty((len(x), w.rows), np.float32)
        self._multiply(x, w, y, False)
        return y

    def add_linear(self, x: Array, y: Array, name: str) -> Array:
        """x, changed."""
        self._multiply(y, self.weights.linears[name], x, True)
        return x

    def gated_linear(self, x: Array | Normed, name: str, kind: str) -> Array:
        return self._activation(self.linear(x, name), kind, 1, np.float16)

    def layer_norm(self, x: Array, name: str, eps: float) -> Array:
        return self._layer_norm(x, name, eps, np.float16)

    def activation(self, x: Array, kind: str) -> Array:
        return self._activation(x, kind, 0, np.float16)

    def _multiply(self, x: Array, w: Matrix, y: Array, adds: bool) -> None:
        x = contiguous(x) if x.dtype == np.float16 else self._rounded(x)
        step = self._slab_rows(w)
        for a in range(0, w.rows, step):
            part = slice(a, min(a + step, w.rows))
            self.driver.multiply_halves(x, self._halves(w, part), y[:, part], adds)
        if w.bias is not None:
            y += w.bias
        if w.shift is not None:
            y += self._block_sums(x, w) @ w.shift.T

    def _slab_rows(self, w: Matrix) -> int:
        """Slabs of about the same size, of whole tiles of cuBLAS, which is much slower beside them."""
        slabs = -(-w.rows * w.columns // self._slab)
        return min(-(-w.rows // (slabs * TILE_ROWS)) * TILE_ROWS, MOST_BLOCKS // TILE_ROWS * TILE_ROWS)

    def _halves(self, w: Matrix, part: slice) -> Array:
        """Rows of the matrix in half precision."""
        n = part.stop - part.start
        out = self.driver.empty((n, w.columns), np.float16)
        per_thread = 1 if w.columns % 8 else 8
        grid = -(-w.columns // (256 * per_thread)), n
        scales = self.driver.shift if w.scales is None else w.scales[part]
        launch = Launch(linear_program(w.bits, w.block), "widen_to_half", grid, 256)
        self.driver.launch(launch, w.data[part], scales, w.columns, w.blocks, out)
        return out

    def _rounded(self, x: Array) -> Array:
        y = self.driver.empty(x.shape, np.float16)
        self.driver.launch(Launch(LAYERS, "round_to_half", (-(-x.size // 256),), 256), contiguous(x), x.size, y)
        return y
