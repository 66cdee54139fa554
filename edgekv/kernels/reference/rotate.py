"""The Walsh-Hadamard transform behind random signs."""

from typing import Any

import numpy as np

from edgekv.types import F32


def hadamard(x: F32, flips: F32, out: F32) -> None:
    out[...] = 0
    out[..., : x.shape[2]] = x * flips[: x.shape[2]]
    out[...] = _transform(out)


def hadamard_back(x: F32, flips: F32, out: F32) -> None:
    out += (_transform(x) * flips)[..., : out.shape[2]]


def _transform(x: F32) -> F32:
    width = x.shape[2]
    for _ in range(width.bit_length() - 1):
        a, b = x[..., : width // 2], x[..., width // 2 :]
        x = np.stack([a + b, a - b], axis=-1).reshape(x.shape)
    scaled: F32 = x * np.float32(1 / np.sqrt(width))
    return scaled


def rotate(rotation: Any, x: F32) -> F32:
    """P x (A, n, width) of x (A, n, head_dim)."""
    if rotation.flips is None:
        result: F32 = x @ rotation.matrix.T
        return result
    out = np.empty((*x.shape[:2], rotation.width), np.float32)
    hadamard(x, rotation.flips, out)
    return out


def rotate_back(rotation: Any, x: F32, out: F32) -> None:
    """out (A, n, head_dim) += the inverse of P of x (A, n, width)."""
    if rotation.flips is None:
        out += x @ rotation.matrix
    else:
        hadamard_back(x, rotation.flips, out)
