"""Weights rounded while a text goes through the model twice: through its own weights, and the rounded ones.

On its second way a text comes to each layer as the rounded layers before have made it. Every linear layer is
rounded so that it makes of these inputs what its own weights make of the exact ones, as far as the text can tell.

Source of the exact outputs as the aim: Li et al., GPTAQ, 2025 (arXiv:2504.02692).
"""

from __future__ import annotations

import numpy as np

from edgekv.errors import EdgeKVError
from edgekv.types import F32
from edgekv.weights.checkpoint_weights import CheckpointWeights
from edgekv.weights.formats import WeightFormat
from edgekv.weights.ops import NumpyOps
from edgekv.weights.quantize import dequantize
from edgekv.weights.rounding import Rounder
from edgekv.weights.store import Write

HESSIAN_ROWS = 1 << 12  # inputs added to a hessian at a time
ROUND_ELEMENTS = 1 << 24  # of a matrix rounded at a time
DAMPING = 0.02  # of the mean of a hessian's diagonal, added to it: inputs that the text lacks
SAMPLE = 8  # of so many rows one tells what is chance


class CalibratingOps(NumpyOps):
    """`NumpyOps` whose linear layers are rounded when they are called, which each is to be once, in order.

    Rows of activations are the exact ones of all tokens, and behind them as many of the rounded model. What the
    head says nobody reads.
    """

    def __init__(self, weights: CheckpointWeights, form: WeightFormat, write: Write) -> None:
        super().__init__(weights)
        self._checkpoint, self._form, self._write = weights, form, write

    def linear(self, x: F32, name: str) -> F32:
        if name == "head":
            self.rounded(x, name)
            return np.empty((0, self.arch.config.vocab_size), np.float32)
        exact, rounded = self._checkpoint.matrix(name), self.rounded(x, name)
        outputs = []
        for part, matrix in zip(np.split(x, 2), (exact, exact if rounded is None else rounded), strict=True):
            self._matrices[name] = matrix
            outputs.append(super().linear(part, name))
        del self._matrices[name]
        return np.concatenate(outputs)

    def rounded(self, x: F32, name: str) -> F32 | None:
        """Hands the layer on and gives its weights (rows, columns) as they will be; None: as they are."""
        form = self._form.of(name)
        is_other = form.bits != 4 or form.zeros or form.offsets or form.e2m1  # than what a `Rounder` gives
        if is_other or self._checkpoint.taken_over(name, form) is not None:
            self._write(name, None)
            return None
        exact, own = np.split(x, 2)
        rounder, products = Rounder(hessian(own), form.block), cross_products(exact - own, own)
        parts = [
            rounder.round(rows, linear_term(rounder, rows, *products))
            for rows in self._checkpoint.blocks(name, ROUND_ELEMENTS)
        ]
        codes, scales = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        self._write(name, (codes, scales))
        return dequantize(codes, scales, form.bits, form.block, x.shape[1])


def hessian(x: F32) -> F32:
    """(columns, columns): the mean of the outer products of x's rows, and of as many more as x has columns.

    Those are of inputs as large that do not depend on each other, so that few rows say little of how they do.
    Raises EdgeKVError where x is not finite.
    """
    n, columns = x.shape
    total = np.zeros((columns, columns), np.float32)
    for a in range(0, n, HESSIAN_ROWS):
        part = x[a : a + HESSIAN_ROWS]
        total += part.T @ part
    diagonal = total.diagonal() / np.float32(max(1, n))
    mean = float(diagonal.mean(dtype=np.float64))
    if not np.isfinite(mean):
        raise EdgeKVError("the model's activations on this text are not finite; calibrate with another text")
    total /= np.float32(n + columns)
    total[np.diag_indices(columns)] = diagonal + np.float32(DAMPING * mean or 1.0)
    return total


def cross_products(lost: F32, own: F32) -> tuple[F32, F32]:
    """(columns, columns) each: the mean of the outer products of the rows of lost and own (tokens, columns).

    And the same with those of the second half negated.
    """
    n, half = len(own), len(own) // 2
    first, second = lost[:half].T @ own[:half], lost[half:].T @ own[half:]
    return (first + second) / np.float32(n), (first - second) / np.float32(n)


def linear_term(rounder: Rounder, rows: F32, mean: F32, apart: F32) -> F32:
    """For `Rounder.round`: rows (r, columns) are to make of inputs ``own`` what they make of own + lost.

    mean, apart: the `cross_products` of lost and own; rounder has the hessian of own. A least-squares change,
    times the share of it that is no chance: in which the text's halves agree.
    """
    both = rows @ mean
    whole, chance = rounder.size(both[::SAMPLE]), rounder.size(rows[::SAMPLE] @ apart)
    both *= np.float32(max(0.0, 1 - chance / whole) if whole > 0 else 0.0)
    return both
