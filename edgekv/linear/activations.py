"""Activations in NumPy, by the names that `Ops.activation` takes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from edgekv.types import F32


def _gelu(x: F32) -> F32:
    erf: F32 = np.asarray(np.frompyfunc(math.erf, 1, 1)(x / math.sqrt(2.0)), np.float32)
    return (0.5 * x * (1.0 + erf)).astype(np.float32)


def _silu(x: F32) -> F32:
    with np.errstate(over="ignore"):  # exp(-x) -> inf gives the right limit, 0
        return (x / (1.0 + np.exp(-x))).astype(np.float32)


def _sigmoid(x: F32) -> F32:
    with np.errstate(over="ignore"):
        return (1.0 / (1.0 + np.exp(-x))).astype(np.float32)


def _gelu_tanh(x: F32) -> F32:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
    return (0.5 * x * (1.0 + np.tanh(inner))).astype(np.float32)


ACTIVATIONS: dict[str, Callable[[F32], F32]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": _gelu,
    "relu": lambda x: np.maximum(x, 0.0),
    "sigmoid": _sigmoid,
}


def clamped_gate(gate: F32, up: F32, alpha: float, limit: float) -> F32:
    """GPT-OSS's: gate * sigmoid(alpha * gate) * (up + 1), gate at most ``limit``, up within it."""
    gate = np.minimum(gate, np.float32(limit))
    with np.errstate(over="ignore"):
        opened = gate / (1.0 + np.exp(-np.float32(alpha) * gate))
    result: F32 = opened * (np.clip(up, -np.float32(limit), np.float32(limit)) + 1)
    return result
