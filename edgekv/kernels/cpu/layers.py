"""Norms, activations and the routing of experts, between the products of a layer."""

from __future__ import annotations

import math

import numpy as np

from edgekv.kernels.cpu.compile import Scalar, jit
from edgekv.kernels.cpu.launch import RangeKernel, exact_kernel
from edgekv.kernels.cpu.loops import (
    address_of,
    exact_loop,
    float_of,
    floats,
    int64s,
    load_arguments,
    scratch_memory,
)
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.cpu.softmax import sigmoid
from edgekv.types import F32, I64

ZERO, ONE, HALF = np.array([0, 1, 0.5], np.float32)
MAX_SQUARE = np.float32(1e30)
SIGMOIDS = {"silu": (1.0, 0.0), "gelu_tanh": (2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715)}
"""a and b of activations x * sigmoid(x * (a + b * x * x))."""
ACTIVATION_WORK = 8  # multiply-adds that an element's exponential is worth


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """Divides x (n, channels) by sqrt(mean(x^2) + eps) and multiplies it by weight (channels,)."""
    return _norm(x, weight, None, eps)


def layer_norm(x: F32, weight: F32, bias: F32, eps: float) -> F32:
    """Returns (x - mean) / sqrt(variance + eps) * weight + bias of x (n, channels); weight, bias (channels,)."""
    return _norm(x, weight, bias, eps)


def activation(x: F32, kind: str) -> F32:
    """Applies one of SIGMOIDS, or "gelu", to x (n, channels)."""
    x = np.ascontiguousarray(x)
    out = np.empty_like(x)
    if kind == "gelu":
        _gelu_rows(len(x), ACTIVATION_WORK * x.size, x, out, x.shape[1])
    else:
        a, b = SIGMOIDS[kind]
        _sigmoid_rows(len(x), ACTIVATION_WORK * x.size, x, out, x.shape[1], False, a, b)
    return out


def apply_gate(x: F32, kind: str) -> F32:
    """Returns an activation of SIGMOIDS of the first half of x (n, 2 * m), times the second half: (n, m)."""
    n, m = x.shape[0], x.shape[1] // 2
    out, (a, b) = np.empty((n, m), np.float32), SIGMOIDS[kind]
    _sigmoid_rows(n, ACTIVATION_WORK * x.size, np.ascontiguousarray(x), out, m, True, a, b)
    return out


def clamped_gate(x: F32, alpha: float, limit: float) -> F32:
    """Returns `edgekv.weights.ops.clamped_gate` of the two halves of the channels of x (n, 2 * m): (n, m)."""
    n, m = x.shape[0], x.shape[1] // 2
    out = np.empty((n, m), np.float32)
    _clamped_rows(n, ACTIVATION_WORK * x.size, np.ascontiguousarray(x), out, m, float(alpha), float(limit))
    return out


def _norm(x: F32, weight: F32, bias: F32 | None, eps: float) -> F32:
    x = np.ascontiguousarray(x)
    out = np.empty_like(x)
    _norm_rows(len(x), x.size, x, weight, out, x.shape[1], float(eps), 0 if bias is None else bias)
    return out


@RangeKernel
def _norm_rows(first: int, last: int, thread: int, arguments: int) -> None:
    """Computes the RMS norm if there is no bias (0), else the layer norm."""
    x_at, weight_at, out_at, channels, eps, bias_at = load_arguments(arguments, 6)
    x, weight, out, bias = floats(x_at), floats(weight_at), floats(out_at), floats(bias_at)
    for row in range(first, last):
        start, mean, total = row * channels, ZERO, ZERO
        if bias_at:
            for i in range(channels):
                mean += get(x, start + i)
            mean /= np.float32(channels)
        for i in range(channels):
            value = get(x, start + i) - mean
            total += value * value
        factor = ONE / np.sqrt(total / np.float32(channels) + float_of(eps))
        for i in range(channels):
            put(out, start + i, (get(x, start + i) - mean) * factor * get(weight, i))
        if bias_at:
            for i in range(channels):
                put(out, start + i, get(out, start + i) + get(bias, i))


@RangeKernel
def _sigmoid_rows(first: int, last: int, thread: int, arguments: int) -> None:
    x_at, out_at, m, is_gated, a_bits, b_bits = load_arguments(arguments, 6)
    x, out, a, b = floats(x_at), floats(out_at), float_of(a_bits), float_of(b_bits)
    for row in range(first, last):
        start = (1 + is_gated) * row * m
        for i in range(m):
            gate = get(x, start + i)
            square = gate * gate
            square = MAX_SQUARE if square > MAX_SQUARE else square  # times b = 0 it is to be 0
            put(out, row * m + i, gate * sigmoid(gate * (a + b * square)))
        if is_gated:
            for i in range(m):
                put(out, row * m + i, get(out, row * m + i) * get(x, start + m + i))


@RangeKernel
def _gelu_rows(first: int, last: int, thread: int, arguments: int) -> None:
    x, out, m = load_arguments(arguments, 3)
    for i in range(first * m, last * m):
        value = get(floats(x), i)
        put(floats(out), i, HALF * value * np.float32(1 + math.erf(value * math.sqrt(0.5))))


@RangeKernel
def _clamped_rows(first: int, last: int, thread: int, arguments: int) -> None:
    x_at, out_at, m, alpha_bits, limit_bits = load_arguments(arguments, 5)
    x, out, alpha, limit = floats(x_at), floats(out_at), float_of(alpha_bits), float_of(limit_bits)
    for row in range(first, last):
        for i in range(m):
            gate, up = get(x, 2 * row * m + i), get(x, (2 * row + 1) * m + i)
            gate = limit if gate > limit else gate  # NaN stays
            up = limit if up > limit else -limit if up < -limit else up
            put(out, row * m + i, gate * sigmoid(alpha * gate) * (up + ONE))


def route(logits: F32, per_token: int, renormalized: bool) -> tuple[I64, I64, F32]:
    """Chooses each token's experts by its logits (n, experts), as `edgekv.weights.ops.choose` does.

    Returns the pairs of a token and an expert in ascending order of experts, then of tokens: their experts, tokens
    and weights, each (n * per_token,).
    """
    logits = np.ascontiguousarray(logits)
    (n, count), m = logits.shape, len(logits) * per_token
    experts, tokens, weights = np.empty(m, np.int64), np.empty(m, np.int64), np.empty(m, np.float32)
    memory = scratch_memory("routing", 12 * m + 8 * count)
    addresses = (address_of(array) for array in (logits, experts, tokens, weights))
    _route.call(n, count, per_token, renormalized, memory, *addresses)
    return experts, tokens, weights


def add_results(x: F32, results: F32, tokens: I64, weights: F32) -> F32:
    """Returns x (n, channels) plus each pair's result (m, channels) times its weight (m,), in the pairs' order."""
    total: F32 = x.copy()
    _add_channels(results.shape[1], results.size, results, tokens, weights, total, *results.shape)
    return total


@exact_loop
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
    """Fills experts, tokens and weights; memory: each token's experts, each expert's next pair, weights."""
    m = n * per_token
    chosen, starts, unsorted = int64s(memory), int64s(memory + 8 * m), floats(memory + 8 * (m + count))
    for e in range(count):
        put(starts, e, 0)
    for token in range(n):
        row, first, last = floats(logits + 4 * token * count), token * per_token, (token + 1) * per_token
        _top_k(row, count, int64s(memory + 8 * first), per_token)
        largest, total = get(row, get(chosen, first)), ZERO
        for i in range(first, last):
            e = get(chosen, i)
            put(starts, e, get(starts, e) + 1)
            put(unsorted, i, np.exp(get(row, e) - largest))
            total += get(unsorted, i)
        if not renormalized:
            total = ZERO
            for e in range(count):
                total += np.exp(get(row, e) - largest)
        for i in range(first, last):
            put(unsorted, i, get(unsorted, i) / total)
    before = 0
    for e in range(count):
        n_pairs = get(starts, e)
        put(starts, e, before)
        before += n_pairs
    for i in range(m):
        e = get(chosen, i)
        pair = get(starts, e)
        put(starts, e, pair + 1)
        put(int64s(experts), pair, e)
        put(int64s(tokens), pair, i // per_token)
        put(floats(weights), pair, get(unsorted, i))


@jit
def _top_k(row: F32, count: int, chosen: I64, k: int) -> None:
    """Fills chosen (k,) with the places of the k largest of row (count,), descending; NaN is below all numbers."""
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


@exact_kernel  # a channel's sum is the same whichever thread makes it
def _add_channels(first: int, last: int, thread: int, arguments: int) -> None:
    """Threads share the channels, as a token's pairs are far apart."""
    results, tokens, weights, total, m, channels = load_arguments(arguments, 6)
    for pair in range(m):
        result, weight = floats(results + 4 * pair * channels), get(floats(weights), pair)
        row = floats(total + 4 * get(int64s(tokens), pair) * channels)
        for i in range(first, last):
            put(row, i, get(row, i) + weight * get(result, i))
