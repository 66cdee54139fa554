"""What lies between the products of a layer: norms, activations, and the routing of experts."""

from __future__ import annotations

import math

import numpy as np

from edgekv.kernels import threads
from edgekv.kernels.cpu import launch
from edgekv.kernels.cpu.compile import Scalar, jit
from edgekv.kernels.cpu.loops import Loop, address_of, floats, numbers, scratch_memory
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.cpu.softmax import sigmoid
from edgekv.types import F32, I64

ZERO, ONE, HALF = np.array([0, 1, 0.5], np.float32)
LARGE = np.float32(1e30)
SIGMOIDS = {"silu": (1.0, 0.0), "gelu_tanh": (2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715)}
"""Activations x * sigmoid(x * (a + b * x * x)), and their a and b."""
WORK = 8  # multiply-adds that an element's exponential is worth


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """Divide x (n, channels) by sqrt(mean(x^2) + eps) and multiply it by weight (channels,)."""
    return _norm(x, weight, None, eps)


def layer_norm(x: F32, weight: F32, bias: F32, eps: float) -> F32:
    """(x - mean) / sqrt(variance + eps) * weight + bias of x (n, channels), weight and bias (channels,)."""
    return _norm(x, weight, bias, eps)


def activation(x: F32, kind: str) -> F32:
    """Apply one of SIGMOIDS, or "gelu", to x (n, channels)."""
    x = np.ascontiguousarray(x)
    out = np.empty_like(x)
    if kind == "gelu":
        _run(_GELU, len(x), WORK * x.size, (address_of(x), address_of(out), x.shape[1]))
    else:
        a, b = (_bits(each) for each in SIGMOIDS[kind])
        _run(_SIGMOIDS, len(x), WORK * x.size, (address_of(x), address_of(out), x.shape[1], 0, a, b))
    return out


def gated(x: F32, kind: str) -> F32:
    """An activation of SIGMOIDS of the first half of the channels of x (n, 2 * m), times the second: (n, m)."""
    n, m = x.shape[0], x.shape[1] // 2
    out = np.empty((n, m), np.float32)
    a, b = (_bits(each) for each in SIGMOIDS[kind])
    _run(_SIGMOIDS, n, WORK * x.size, (address_of(x), address_of(out), m, 1, a, b))
    return out


def clamped_gate(x: F32, alpha: float, limit: float) -> F32:
    """`edgekv.weights.ops.clamped_gate` of the two halves of the channels of x (n, 2 * m): (n, m)."""
    n, m = x.shape[0], x.shape[1] // 2
    out = np.empty((n, m), np.float32)
    _run(_CLAMPED, n, WORK * x.size, (address_of(x), address_of(out), m, _bits(alpha), _bits(limit)))
    return out


def _norm(x: F32, weight: F32, bias: F32 | None, eps: float) -> F32:
    x = np.ascontiguousarray(x)
    out = np.empty_like(x)
    given = (address_of(x), address_of(weight), address_of(out), x.shape[1], _bits(eps))
    _run(_NORM, len(x), x.size, (*given, 0 if bias is None else address_of(bias)))
    return out


def _bits(x: float) -> int:
    """Of x as float32: what kernels get is whole numbers."""
    return int(np.float32(x).view(np.int32))


def _run(stage: launch.Stage, n: int, work: int, given: tuple[int, ...]) -> None:
    parallel = n >= threads.count() and work >= launch.MIN_PARALLEL_WORK
    stage.run(n, np.array(given, np.int64), threads.count() if parallel else 1)


def _norm_rows(first: int, last: int, part: int, place: int) -> None:
    """Without a bias (0) the RMS norm, else the layer norm."""
    given = numbers(place)
    x, weight, out, channels = floats(get(given, 0)), floats(get(given, 1)), floats(get(given, 2)), get(given, 3)
    eps, place_of_bias = np.int32(get(given, 4)).view(np.float32), get(given, 5)
    bias = floats(place_of_bias)
    for row in range(first, last):
        start, mean, total = row * channels, ZERO, ZERO
        if place_of_bias:
            for i in range(channels):
                mean += get(x, start + i)
            mean /= np.float32(channels)
        for i in range(channels):
            value = get(x, start + i) - mean
            total += value * value
        factor = ONE / np.sqrt(total / np.float32(channels) + eps)
        for i in range(channels):
            put(out, start + i, (get(x, start + i) - mean) * factor * get(weight, i))
        if place_of_bias:
            for i in range(channels):
                put(out, start + i, get(out, start + i) + get(bias, i))


def _sigmoid_rows(first: int, last: int, part: int, place: int) -> None:
    given = numbers(place)
    x, out, m, is_gated = floats(get(given, 0)), floats(get(given, 1)), get(given, 2), get(given, 3)
    a, b = np.int32(get(given, 4)).view(np.float32), np.int32(get(given, 5)).view(np.float32)
    for row in range(first, last):
        start = (1 + is_gated) * row * m
        for i in range(m):
            gate = get(x, start + i)
            square = gate * gate
            square = LARGE if square > LARGE else square  # times b = 0 it is to be 0
            put(out, row * m + i, gate * sigmoid(gate * (a + b * square)))
        if is_gated:
            for i in range(m):
                put(out, row * m + i, get(out, row * m + i) * get(x, start + m + i))


def _gelu_rows(first: int, last: int, part: int, place: int) -> None:
    given = numbers(place)
    x, out, m = floats(get(given, 0)), floats(get(given, 1)), get(given, 2)
    for i in range(first * m, last * m):
        value = get(x, i)
        put(out, i, HALF * value * np.float32(1 + math.erf(value * math.sqrt(0.5))))


def _clamped_rows(first: int, last: int, part: int, place: int) -> None:
    given = numbers(place)
    x, out, m = floats(get(given, 0)), floats(get(given, 1)), get(given, 2)
    alpha, limit = np.int32(get(given, 3)).view(np.float32), np.int32(get(given, 4)).view(np.float32)
    for row in range(first, last):
        for i in range(m):
            gate, up = get(x, 2 * row * m + i), get(x, (2 * row + 1) * m + i)
            gate = limit if gate > limit else gate  # NaN stays
            up = limit if up > limit else -limit if up < -limit else up
            put(out, row * m + i, gate * sigmoid(alpha * gate) * (up + ONE))


_NORM, _CLAMPED = launch.Stage(_norm_rows), launch.Stage(_clamped_rows)
_SIGMOIDS, _GELU = launch.Stage(_sigmoid_rows), launch.Stage(_gelu_rows)


def route(logits: F32, per_token: int, renormalized: bool) -> tuple[I64, I64, F32]:
    """Of logits (n, experts), the pairs in ascending order of experts, then of tokens: their experts, their tokens
    and their weights, each (n * per_token,). Those that `edgekv.weights.ops.choose` chooses.
    """
    logits = np.ascontiguousarray(logits)
    (n, count), m = logits.shape, len(logits) * per_token
    experts, tokens, weights = np.empty(m, np.int64), np.empty(m, np.int64), np.empty(m, np.float32)
    memory = scratch_memory("routing", 12 * m + 8 * count)
    addresses = (address_of(array) for array in (logits, experts, tokens, weights))
    _ROUTE.call(n, count, per_token, renormalized, memory, *addresses)
    return experts, tokens, weights


def add_results(x: F32, results: F32, tokens: I64, weights: F32) -> F32:
    """x (n, channels) plus each pair's result (m, channels) times its weight (m,), in the order of the pairs."""
    total: F32 = x.copy()
    m, channels = results.shape
    addresses = (address_of(array) for array in (results, tokens, weights, total))
    _run(_ADD, channels, results.size, (*addresses, m, channels))
    return total


def _route(
    n: int,
    count: int,
    per_token: int,
    renormalized: int,
    memory: int,
    logits: int,
    experts: int,
    tokens: int,
    weights: int,
) -> None:
    """memory: each token's experts, each expert's next place among the pairs, and each token's weights."""
    m = n * per_token
    chosen, places, own_weights = numbers(memory), numbers(memory + 8 * m), floats(memory + 8 * (m + count))
    for e in range(count):
        put(places, e, 0)
    for token in range(n):
        row, first, last = floats(logits + 4 * token * count), token * per_token, (token + 1) * per_token
        _put_largest(row, count, numbers(memory + 8 * first), per_token)
        largest, total = get(row, get(chosen, first)), ZERO
        for i in range(first, last):
            e = get(chosen, i)
            put(places, e, get(places, e) + 1)
            put(own_weights, i, np.exp(get(row, e) - largest))
            total += get(own_weights, i)
        if not renormalized:
            total = ZERO
            for e in range(count):
                total += np.exp(get(row, e) - largest)
        for i in range(first, last):
            put(own_weights, i, get(own_weights, i) / total)
    before = 0
    for e in range(count):
        n_pairs = get(places, e)
        put(places, e, before)
        before += n_pairs
    for i in range(m):
        e = get(chosen, i)
        place = get(places, e)
        put(places, e, place + 1)
        put(numbers(experts), place, e)
        put(numbers(tokens), place, i // per_token)
        put(floats(weights), place, get(own_weights, i))


@jit
def _put_largest(row: F32, count: int, chosen: I64, k: int) -> None:
    """chosen (k,) = where the k largest of row (count,) are, in descending order; NaN is behind all numbers."""
    for e in range(count):
        i = min(e, k)
        while i > 0 and _is_before(get(row, e), get(row, get(chosen, i - 1))):
            if i < k:
                put(chosen, i, get(chosen, i - 1))
            i -= 1
        if i < k:
            put(chosen, i, e)


@jit
def _is_before(x: Scalar, y: Scalar) -> bool:
    return x > y or (np.isnan(y) and not np.isnan(x))


def _add_channels(first: int, last: int, part: int, place: int) -> None:
    """Of channels first..last: threads share them, as a token's pairs are far apart."""
    given = numbers(place)
    results, tokens, weights, total = get(given, 0), numbers(get(given, 1)), floats(get(given, 2)), get(given, 3)
    m, channels = get(given, 4), get(given, 5)
    for pair in range(m):
        result, weight = floats(results + 4 * pair * channels), get(weights, pair)
        row = floats(total + 4 * get(tokens, pair) * channels)
        for i in range(first, last):
            put(row, i, get(row, i) + weight * get(result, i))


_ROUTE = Loop(_route, exact=True)
_ADD = launch.Stage(_add_channels, exact=True)  # a channel's sum is the same in whichever share it is
