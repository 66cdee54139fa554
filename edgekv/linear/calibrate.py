"""Weights rounded while a text goes through the model: every linear layer as its inputs arrive.

What a layer reads has gone through the rounded layers before it, so each makes up for those too.
"""

from __future__ import annotations

import numpy as np

from edgekv.linear.formats import WeightFormat
from edgekv.linear.quantize import dequantize
from edgekv.linear.reference import NumpyLinear, NumpyOps
from edgekv.linear.rounding import Rounder
from edgekv.linear.store_builder import Write
from edgekv.linear.weights import CheckpointWeights
from edgekv.types import F32

HESSIAN_ROWS = 1 << 12  # inputs added to a hessian at a time
ROUND_ELEMENTS = 1 << 24  # of a matrix rounded at a time


class CalibratingOps(NumpyOps):
    """`NumpyOps` whose linear layers are rounded when they are called, and then compute with what is left."""

    def __init__(self, weights: CheckpointWeights, form: WeightFormat, write: Write) -> None:
        super().__init__(weights)
        self._checkpoint, self._form, self._write = weights, form, write

    def linear(self, x: F32, name: str) -> F32:
        """Keeps no matrix: it is called once for each."""
        self._matrices[name] = self.rounded(x, name)
        try:
            return super().linear(x, name)
        finally:
            del self._matrices[name]

    def rounded(self, x: F32, name: str) -> F32:
        """Hands the layer on and gives its weights (rows, columns) as they will be."""
        own = self._form.of(name)
        is_other = own.bits != 4 or own.zeros or own.offsets or own.e2m1  # than what a `Rounder` gives
        if is_other or self._checkpoint.taken_over(name, own) is not None:
            self._write(name, None)
            return self._checkpoint.matrix(name)
        rounder, columns = Rounder(hessian(x), own.block), x.shape[1]
        parts = [rounder.round(rows) for rows in self._checkpoint.blocks(name, ROUND_ELEMENTS)]
        codes, scales = (np.concatenate(arrays) for arrays in list(zip(*parts, strict=True))[:2])
        self._write(name, (codes, scales))
        return dequantize(codes, scales, own.bits, own.block, columns)


class CalibratingLinear(NumpyLinear):
    """The three blocks of every layer, each of which is to be called once, in order, with a whole text."""

    def __init__(self, weights: CheckpointWeights, form: WeightFormat, write: Write) -> None:
        super().__init__(weights)
        self._ops = self._rounding = CalibratingOps(weights, form, write)

    def head(self, x: F32) -> F32:
        """Rounds the head; gives nothing, since nobody reads what it says."""
        self._rounding.rounded(self.arch.final_norm(self._ops, x), "head")
        return np.empty((0, self.arch.config.vocab_size), np.float32)


def hessian(x: F32) -> F32:
    """(columns, columns): the mean of the outer products of x's rows."""
    total = np.zeros((x.shape[1],) * 2, np.float32)
    for a in range(0, len(x), HESSIAN_ROWS):
        part = x[a : a + HESSIAN_ROWS]
        total += part.T @ part
    total /= np.float32(max(1, len(x)))
    return total
