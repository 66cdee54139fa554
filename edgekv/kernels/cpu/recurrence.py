"""Short convolutions and the gated delta rule: loops over tokens, channels or heads shared among threads.

A head's matrix (64 KiB of float32, as a rule) stays in the caches of the core that works on the head, whatever the
number of tokens. For each token it is read for what key and query find in it, and then written.
"""

import numpy as np
from numba import prange

from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.jit import Args, Scalar, fast_jit, inline_jit, parallel_jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.cpu.softmax import exp_of_negative
from edgekv.types import F32

NONE = np.empty(0, np.float32)
CHANNELS = 128  # of a convolution, per item of work
LANES = simd.LANES
ZERO, ONE, LENGTH_EPS = np.array([0, 1, 1e-6], np.float32)


def short_conv(x: F32, out: F32, *, window: F32, weight: F32, bias: F32 | None = None) -> None:
    n, channels = out.shape
    scratch = np.empty(channels, np.float32)
    arrays = (array.reshape(-1) for array in (x, out, window, weight, NONE if bias is None else bias, scratch))
    args = (n, channels, len(weight), *arrays)
    run(_conv_channels, _conv_parallel, -(-channels // CHANNELS), x.size + n * weight.size, args)


def gated_delta(
    x: F32,
    out: F32,
    *,
    window: F32,
    matrix: F32,
    conv: F32,
    log_decay: F32,
    time_bias: F32,
    norm: F32,
    eps: float,
) -> None:
    n, (value_heads, key_dim, value_dim), convolved = len(x), matrix.shape, window.shape[1]
    key_heads = (convolved - value_heads * value_dim) // (2 * key_dim)
    sizes = n, key_heads, key_dim, value_heads, value_dim
    flat_x, y = x.reshape(-1), np.empty(n * convolved, np.float32)
    first = (*sizes, len(conv), flat_x, y, window.reshape(-1), conv.reshape(-1))
    run(_delta_inputs, _inputs_parallel, 2 * key_heads + value_heads, 2 * n * conv.size, first)
    scratch = np.empty(2 * value_heads * value_dim, np.float32)
    weights = log_decay, time_bias, norm, np.float32(eps)
    args = (*sizes, flat_x, y, matrix.reshape(-1), scratch, *weights, out.reshape(-1))
    run(_delta_heads, _heads_parallel, value_heads, 4 * n * matrix.size, args)


@inline_jit
def _sigmoid(x: Scalar) -> Scalar:
    small = exp_of_negative(-abs(x))
    return (ONE if x >= ZERO else small) / (ONE + small)


@fast_jit
def _conv_channels(first: int, last: int, args: Args) -> None:
    """y = c * conv(b * x) of blocks of CHANNELS."""
    n, channels, taps, x, out, window, weight, bias, product = args
    for item in range(first, last):
        begin = item * CHANNELS
        width = min(CHANNELS, channels - begin)
        for t in range(n):
            b = 3 * t * channels + begin
            c, inner, y = b + channels, b + 2 * channels, t * channels + begin
            for d in range(width):
                put(product, begin + d, get(x, b + d) * get(x, inner + d))
            _convolve(product, begin, y, width, channels, taps, begin, window, weight, out)
            if len(bias):
                for d in range(width):
                    put(out, y + d, get(out, y + d) + get(bias, begin + d))
            for d in range(width):
                put(out, y + d, get(out, y + d) * get(x, c + d))


@fast_jit
def _convolve(
    x: F32, at: int, to: int, width: int, channels: int, taps: int, begin: int, window: F32, weight: F32, out: F32
) -> None:
    """out[to:] = a token's values x[at:] with those of the window, which moves on."""
    last = begin + (taps - 1) * channels
    for d in range(width):
        put(out, to + d, get(weight, last + d) * get(x, at + d))
    for j in range(taps - 1):
        i = begin + j * channels
        for d in range(width):
            put(out, to + d, get(out, to + d) + get(weight, i + d) * get(window, i + d))
    for i in range(begin, last - channels, channels):
        for d in range(width):
            put(window, i + d, get(window, i + channels + d))
    for d in range(width):
        put(window, last - channels + d, get(x, at + d))


@fast_jit
def _delta_inputs(first: int, last: int, args: Args) -> None:
    """y (n, channels): convolved queries, keys (both of the length that the rule wants) and values, by head."""
    n, key_heads, key_dim, value_heads, value_dim, taps, x, y, window, weight = args
    n_keys = 2 * key_heads * key_dim
    channels = n_keys + value_heads * value_dim
    projected = channels + value_heads * (value_dim + 2)
    for item in range(first, last):
        is_key = item < 2 * key_heads
        width = key_dim if is_key else value_dim
        begin = item * key_dim if is_key else n_keys + (item - 2 * key_heads) * value_dim
        longest = ONE / np.sqrt(np.float32(key_dim)) if item < key_heads else ONE
        for t in range(n):
            to = t * channels + begin
            _convolve(x, t * projected + begin, to, width, channels, taps, begin, window, weight, y)
            squares = ZERO
            for d in range(width):
                value = get(y, to + d)
                value *= _sigmoid(value)
                squares += value * value
                put(y, to + d, value)
            if is_key:
                factor = longest / np.sqrt(squares + LENGTH_EPS)
                for d in range(width):
                    put(y, to + d, get(y, to + d) * factor)


@fast_jit
def _delta_heads(first: int, last: int, args: Args) -> None:
    n, key_heads, key_dim, value_heads, value_dim = args[:5]
    x, y, matrix, scratch, log_decay, time_bias, norm, eps, out = args[5:]
    n_keys, n_values = key_heads * key_dim, value_heads * value_dim
    channels = 2 * n_keys + n_values
    projected = channels + n_values + 2 * value_heads
    for head in range(first, last):
        state, found, sums = head * key_dim * value_dim, 2 * head * value_dim, (2 * head + 1) * value_dim
        rate = -np.exp(get(log_decay, head))
        for t in range(n):
            q = t * channels + head // (value_heads // key_heads) * key_dim
            value = t * channels + 2 * n_keys + head * value_dim
            z = t * projected + channels + head * value_dim
            b = t * projected + channels + n_values + head
            time = get(x, b + value_heads) + get(time_bias, head)
            softplus = np.log1p(np.exp(-abs(time))) + max(time, ZERO)
            decay = np.exp(rate * softplus)
            _read(y, q, q + n_keys, key_dim, value_dim, matrix, state, scratch, found, sums)
            same = ZERO
            for d in range(key_dim):
                same += get(y, q + d) * get(y, q + n_keys + d)
            _correct(y, value, value_dim, _sigmoid(get(x, b)), decay, same, scratch, found, sums)
            _write(y, q + n_keys, key_dim, value_dim, matrix, state, decay, scratch, found)
            squares = ZERO
            for d in range(value_dim):
                squares += get(scratch, sums + d) * get(scratch, sums + d)
            factor = ONE / np.sqrt(squares / np.float32(value_dim) + eps)
            for d in range(value_dim):
                gate = get(x, z + d)
                gate *= _sigmoid(gate)
                put(
                    out, t * n_values + head * value_dim + d, get(scratch, sums + d) * factor * get(norm, d) * gate
                )


@fast_jit
def _read(
    y: F32,
    q: int,
    k: int,
    key_dim: int,
    value_dim: int,
    matrix: F32,
    state: int,
    scratch: F32,
    found: int,
    sums: int,
) -> None:
    """scratch[found:] = k S and scratch[sums:] = q S."""
    whole = value_dim // (2 * LANES) * (2 * LANES)
    for a in range(0, whole, 2 * LANES):
        of_key, of_query = simd.splat(ZERO), simd.splat(ZERO)
        of_key_2, of_query_2 = simd.splat(ZERO), simd.splat(ZERO)
        for d in range(key_dim):
            row = state + d * value_dim + a
            here, there = simd.load(matrix, row), simd.load(matrix, row + LANES)
            key, query = simd.broadcast(y, k + d), simd.broadcast(y, q + d)
            of_key, of_key_2 = simd.multiply_add(here, key, of_key), simd.multiply_add(there, key, of_key_2)
            of_query = simd.multiply_add(here, query, of_query)
            of_query_2 = simd.multiply_add(there, query, of_query_2)
        simd.store(scratch, found + a, of_key)
        simd.store(scratch, found + a + LANES, of_key_2)
        simd.store(scratch, sums + a, of_query)
        simd.store(scratch, sums + a + LANES, of_query_2)
    for a in range(whole, value_dim):
        key_sum, query_sum = ZERO, ZERO
        for d in range(key_dim):
            number = get(matrix, state + d * value_dim + a)
            key_sum += number * get(y, k + d)
            query_sum += number * get(y, q + d)
        put(scratch, found + a, key_sum)
        put(scratch, sums + a, query_sum)


@fast_jit
def _correct(
    y: F32,
    value: int,
    value_dim: int,
    beta: Scalar,
    decay: Scalar,
    same: Scalar,
    scratch: F32,
    found: int,
    sums: int,
) -> None:
    """scratch[found:] = what k gets, scratch[sums:] = q times the matrix that it then is; same: q times k."""
    for d in range(value_dim):
        change = beta * (get(y, value + d) - decay * get(scratch, found + d))
        put(scratch, found + d, change)
        put(scratch, sums + d, decay * get(scratch, sums + d) + same * change)


@fast_jit
def _write(
    y: F32, k: int, key_dim: int, value_dim: int, matrix: F32, state: int, decay: Scalar, scratch: F32, change: int
) -> None:
    """S = decay * S + outer(k, scratch[change:])."""
    whole, factor = value_dim // LANES * LANES, simd.splat(decay)
    for d in range(key_dim):
        row, key = state + d * value_dim, simd.broadcast(y, k + d)
        for a in range(0, whole, LANES):
            new = simd.multiply(key, simd.load(scratch, change + a))
            simd.store(matrix, row + a, simd.multiply_add(simd.load(matrix, row + a), factor, new))
        for a in range(whole, value_dim):
            put(matrix, row + a, get(matrix, row + a) * decay + get(y, k + d) * get(scratch, change + a))


@parallel_jit
def _conv_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _conv_channels(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@parallel_jit
def _inputs_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _delta_inputs(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@parallel_jit
def _heads_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _delta_heads(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)
