"""Rotations on a GPU, by position and of keys and values, and exact attention within a prompt."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from edgekv.kernels.arrays import contiguous
from edgekv.kernels.cuda.driver import Array, Launch, Program
from edgekv.kernels.cuda.loops import THREADS, Backend, check_width, per_head
from edgekv.kernels.cuda.matvec import MATVEC_ROWS, Matrix, matvec


class Halves(NamedTuple):
    """Where `split_rope` also puts queries, keys and values in float16, zeros behind a head's channels.

    q (n_heads, n, width); k, v (n_kv_heads, capacity, width), from token ``first`` on.
    """

    q: Array
    k: Array
    v: Array
    first: int


BLOCK_ROWS = 64  # queries of a block of prompt_attention.cu
MOST_WIDTH = 256


def padded_width(head_dim: int) -> int:
    """Channels of a head with which prompt_attention.cu computes: a multiple of 16."""
    return -(-head_dim // 16) * 16


class RopeKernels(Backend):
    """Rotations by position, of keys and of values, products with small matrices, exact attention of prompts."""

    def split_rope(
        self,
        qkv: Array,
        cos: Array,
        sin: Array,
        q: Array | None,
        k: Array,
        v: Array,
        scale: float,
        q_norm: Array,
        k_norm: Array,
        eps: float,
        halves: Halves | None = None,
    ) -> None:
        """Splits qkv (n, (H + 2 G) * D) into q (H, n, D), k and v (G, n, D), rotated by position; also in halves.

        q None: queries are wanted as halves only.
        """
        n_kv_heads, n, head_dim = k.shape
        n_heads, shift = qkv.shape[1] // head_dim - 2 * n_kv_heads, self.driver.shift
        tables = (cos, sin) if cos.size else (shift, shift)
        norms = (q_norm, k_norm, 1) if q_norm.size else (shift, shift, 0)
        outs = *([shift, 0] if q is None else _rows(q)), *_rows(k), *_rows(v)
        more: tuple[Any, ...] = shift, shift, shift, 0, 0, 0
        if halves is not None:
            _, capacity, width = halves.k.shape
            more = halves.q, halves.k, halves.v, width, capacity, halves.first
        sizes = n_heads, n_kv_heads, head_dim, float(scale)
        grid = n, n_heads + 2 * n_kv_heads
        launch = Launch(Program(("layers",)), "split_rope", grid, THREADS, early=halves is None)
        self.driver.launch(launch, qkv, *tables, cos.shape[1], shift, *outs, *sizes, *norms, float(eps), *more)

    def hadamard(self, x: Array, flips: Array, out: Array) -> None:
        """out (A, n, width) = the rotation of x (A, n, D)."""
        rows, n, d = x.shape
        x, stride = per_head(x)
        self._transform("hadamard", out.shape[2], rows * n, x, n, stride, d, flips, out)

    def hadamard_back(self, x: Array, flips: Array, out: Array) -> None:
        """out (A, n, D) += the inverse rotation of x (A, n, width)."""
        rows, n, d = out.shape
        stride = out.strides[0] // out.itemsize
        self._transform("hadamard_back", x.shape[2], rows * n, contiguous(x), n, stride, d, flips, out)

    def _transform(self, name: str, width: int, rows: int, *arguments: Any) -> None:
        check_width(width)
        launch = Launch(Program(("exact",), (("WIDTH", width),), exact=True), name, (rows,), max(width // 2, 1))
        self.driver.launch(launch, *arguments[:-1], float(np.float32(1 / np.sqrt(width))), arguments[-1])

    def rotate(self, rotation: Any, x: Array) -> Array:
        """P x (A, n, width) of x (A, n, head_dim)."""
        if rotation.flips is None:
            return self.project(x, rotation.matrix)
        out = self.driver.empty((*x.shape[:2], rotation.width), np.float32)
        self.hadamard(x, rotation.flips, out)
        return out

    def rotate_back(self, rotation: Any, x: Array, out: Array) -> None:
        """out (A, n, head_dim) += the inverse of P of x (A, n, width)."""
        if rotation.flips is None:
            out += self.project(x, rotation.inverse)
        else:
            self.hadamard_back(x, rotation.flips, out)

    def project(self, x: Array, matrix: Array) -> Array:
        """x (G, n, D) times matrix (m, D) -> (G, n, m)."""
        n_kv_heads, n = x.shape[:2]
        if n > MATVEC_ROWS:
            return x @ matrix.T
        rows, columns = matrix.shape
        w = Matrix(rows, columns, 32, 1, 0, matrix)
        return matvec(self.driver, contiguous(x), w).reshape(n_kv_heads, n, -1)

    def attend_prompt(self, q: Array, k: Array, v: Array, earlier: int, window: int | None, out: Array) -> None:
        """out (n, n_heads * head_dim) = causal attention of queries q (n_heads, n, width), already scaled.

        All are float16. The queries are those of the last n of ``earlier`` + n tokens, the first of k and v
        (n_kv_heads, capacity, width). Token t sees max(0, t + 1 - window)..t. Channels from head_dim on are 0.
        """
        n_heads, n, width = q.shape
        n_kv_heads, capacity, _ = k.shape
        macros = ("WIDTH", width), ("HEAD_DIM", out.shape[1] // n_heads)
        program = Program(("prompt_attention",), macros)
        launch = Launch(program, "prompt_attention", (-(-n // BLOCK_ROWS), n_heads), THREADS)
        sizes = n, earlier, capacity, n_heads // n_kv_heads, window or 0
        self.driver.launch(launch, q, k, v, *sizes, out)


def _rows(x: Array) -> list[Any]:
    """x (heads, n, head_dim) and the elements between its heads."""
    return [x, x.strides[0] // x.itemsize]
