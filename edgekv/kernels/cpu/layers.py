"""What lies between the products of a layer: RMS norms, and activations of gated layers."""

from __future__ import annotations

import numpy as np

from edgekv.kernels import threads
from edgekv.kernels.cpu import launch
from edgekv.kernels.cpu.loops import address_of, floats
from edgekv.kernels.cpu.loops import numbers as integers
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.cpu.softmax import sigmoid
from edgekv.types import F32

ZERO, ONE = np.array([0, 1], np.float32)
CUBIC, DOUBLE_ROOT = np.float32(0.044715), np.float32(2 * np.sqrt(2 / np.pi))
WORK = 8  # multiply-adds that an element's exponential is worth


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """x (n, channels) / sqrt(mean(x^2) + eps) * weight (channels,)."""
    n, channels = x.shape
    out = np.empty_like(x)
    _run(_NORM, n, x.size, (address_of(x), address_of(weight), address_of(out), channels, _bits(eps)))
    return out


def gated(x: F32, kind: str) -> F32:
    """The activation, one of GATED, of the first half of the channels of x (n, 2 * m) times the second half."""
    n, m = x.shape[0], x.shape[1] // 2
    out = np.empty((n, m), np.float32)
    _run(GATED[kind], n, WORK * x.size, (address_of(x), address_of(out), m))
    return out


def clamped_gate(x: F32, alpha: float, limit: float) -> F32:
    """`edgekv.linear.activations.clamped_gate` of the two halves of the channels of x (n, 2 * m): (n, m)."""
    n, m = x.shape[0], x.shape[1] // 2
    out = np.empty((n, m), np.float32)
    _run(_CLAMPED, n, WORK * x.size, (address_of(x), address_of(out), m, _bits(alpha), _bits(limit)))
    return out


def warm_up() -> None:
    """Compiles all of them."""
    x = np.zeros((1, 2), np.float32)
    clamped_gate(x, 1.0, 1.0)
    rms_norm(x, x[0], 1.0)
    for kind in GATED:
        gated(x, kind)


def _bits(x: float) -> int:
    """Of x as float32: what kernels get is whole numbers."""
    return int(np.float32(x).view(np.int32))


def _run(stage: launch.Stage, n: int, work: int, given: tuple[int, ...]) -> None:
    numbers = np.array(given, np.int64)
    if n < threads.count() or work < launch.MIN_PARALLEL_WORK:
        stage.run(n, numbers)
    else:
        stage.run_parallel(n, numbers)


def _norm_rows(first: int, last: int, part: int, place: int) -> None:
    given = integers(place)
    x, weight, out, channels = floats(get(given, 0)), floats(get(given, 1)), floats(get(given, 2)), get(given, 3)
    eps = np.int32(get(given, 4)).view(np.float32)
    for row in range(first, last):
        start, total = row * channels, ZERO
        for i in range(channels):
            value = get(x, start + i)
            total += value * value
        factor = ONE / np.sqrt(total / np.float32(channels) + eps)
        for i in range(channels):
            put(out, start + i, get(x, start + i) * factor * get(weight, i))


def _silu_rows(first: int, last: int, part: int, place: int) -> None:
    given = integers(place)
    x, out, m = floats(get(given, 0)), floats(get(given, 1)), get(given, 2)
    for row in range(first, last):
        for i in range(m):
            gate = get(x, 2 * row * m + i)
            put(out, row * m + i, gate * sigmoid(gate) * get(x, (2 * row + 1) * m + i))


def _gelu_rows(first: int, last: int, part: int, place: int) -> None:
    given = integers(place)
    x, out, m = floats(get(given, 0)), floats(get(given, 1)), get(given, 2)
    for row in range(first, last):
        for i in range(m):
            gate = get(x, 2 * row * m + i)
            inner = DOUBLE_ROOT * (gate + CUBIC * gate * gate * gate)
            put(out, row * m + i, gate * sigmoid(inner) * get(x, (2 * row + 1) * m + i))


def _clamped_rows(first: int, last: int, part: int, place: int) -> None:
    given = integers(place)
    x, out, m = floats(get(given, 0)), floats(get(given, 1)), get(given, 2)
    alpha, limit = np.int32(get(given, 3)).view(np.float32), np.int32(get(given, 4)).view(np.float32)
    for row in range(first, last):
        for i in range(m):
            gate, up = get(x, 2 * row * m + i), get(x, (2 * row + 1) * m + i)
            gate = limit if gate > limit else gate  # NaN stays
            up = limit if up > limit else -limit if up < -limit else up
            put(out, row * m + i, gate * sigmoid(alpha * gate) * (up + ONE))


_NORM = launch.Stage(_norm_rows)
_CLAMPED = launch.Stage(_clamped_rows)
GATED = {"silu": launch.Stage(_silu_rows), "gelu_tanh": launch.Stage(_gelu_rows)}
