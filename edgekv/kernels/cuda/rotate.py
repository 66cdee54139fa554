"""The Walsh-Hadamard transform behind random signs, and rotations of any width."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgekv.kernels.cuda.program import Array, Launch, Program
from edgekv.kernels.cuda.rows import RowKernels
from edgekv.kernels.cuda.tiles import check_width, per_head
from edgekv.kernels.memory import contiguous


class RotateKernels(RowKernels):
    """Launches of rotate.cu, and rotations through a matrix."""

    def hadamard(self, x: Array, flips: Array, out: Array) -> None:
        rows, n, d = x.shape
        x, stride = per_head(x)
        self._transform("hadamard", out.shape[2], rows * n, x, n, stride, d, flips, out)

    def hadamard_back(self, x: Array, flips: Array, out: Array) -> None:
        rows, n, d = out.shape
        stride = out.strides[0] // out.itemsize
        self._transform("hadamard_back", x.shape[2], rows * n, contiguous(x), n, stride, d, flips, out)

    def _transform(self, name: str, width: int, rows: int, *arguments: Any) -> None:
        check_width(width)
        launch = Launch(Program(("rotate",), (("WIDTH", width),), exact=True), name, (rows,), max(width // 2, 1))
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
