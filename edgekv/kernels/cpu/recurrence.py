"""Short convolutions and the gated delta rule: loops over tokens, channels or heads shared among threads.

A head's matrix (64 KiB of float32, as a rule) is worked on in groups of columns, which stay in the nearest cache
of the core that works on the head, whatever the number of tokens.
"""

import numpy as np

from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.compile import Args, fast_jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.cpu.softmax import sigmoid
from edgekv.types import F32

NONE = np.empty(0, np.float32)
CHANNELS = 128  # of a convolution, per item of work
LANES = simd.LANES
WIDTH = 4 * LANES  # columns of a matrix that are worked on together
ZERO, ONE, LENGTH_EPS = np.array([0, 1, 1e-6], np.float32)


def short_conv(x: F32, out: F32, *, window: F32, weight: F32, bias: F32 | None = None) -> None:
    """Fills out (n, C) from x (n, 3C): a short convolution between two gates."""
    n, channels = out.shape
    scratch = np.empty(channels, np.float32)
    arrays = (array.reshape(-1) for array in (x, out, window, weight, NONE if bias is None else bias, scratch))
    args = (n, channels, len(weight), *arrays)
    run(_conv_channels, -(-channels // CHANNELS), x.size + n * weight.size, args)


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
    """Fills out (n, V * Dv) by the gated delta rule; matrix (V, Dk, Dv) is changed."""
    n, (value_heads, key_dim, value_dim), convolved = len(x), matrix.shape, window.shape[1]
    key_heads = (convolved - value_heads * value_dim) // (2 * key_dim)
    sizes = n, key_heads, key_dim, value_heads, value_dim
    flat_x, y = x.reshape(-1), np.empty(n * convolved, np.float32)
    first = (*sizes, len(conv), flat_x, y, window.reshape(-1), conv.reshape(-1))
    run(_delta_inputs, 2 * key_heads + value_heads, 2 * n * conv.size, first)
    rates = np.empty(3 * value_heads * n, np.float32)  # of each token: decay, beta, and query times key
    weights = log_decay, time_bias, norm, np.float32(eps)
    args = (*sizes, flat_x, y, matrix.reshape(-1), rates, *weights, out.reshape(-1))
    run(_delta_heads, value_heads, 4 * n * matrix.size, args)


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
                value *= sigmoid(value)
                squares += value * value
                put(y, to + d, value)
            if is_key:
                factor = longest / np.sqrt(squares + LENGTH_EPS)
                for d in range(width):
                    put(y, to + d, get(y, to + d) * factor)


@fast_jit
def _delta_heads(first: int, last: int, args: Args) -> None:
    """The rule, head by head; the columns of a matrix know nothing of each other."""
    n, key_heads, key_dim, value_heads, value_dim = args[:5]
    x, y, matrix, rates, log_decay, time_bias, norm, eps, out = args[5:]
    n_keys, n_values = key_heads * key_dim, value_heads * value_dim
    channels = 2 * n_keys + n_values
    projected = channels + n_values + 2 * value_heads
    whole = value_dim // WIDTH * WIDTH
    for head in range(first, last):
        key_head, rate = head // (value_heads // key_heads) * key_dim, 3 * head * n
        base = -np.exp(get(log_decay, head))
        for t in range(n):
            b = t * projected + channels + n_values + head
            time = get(x, b + value_heads) + get(time_bias, head)
            same = ZERO
            for d in range(key_dim):
                i = t * channels + key_head + d
                same += get(y, i) * get(y, i + n_keys)
            put(rates, rate + 3 * t, np.exp(base * (np.log1p(np.exp(-abs(time))) + max(time, ZERO))))
            put(rates, rate + 3 * t + 1, sigmoid(get(x, b)))
            put(rates, rate + 3 * t + 2, same)
        state, value, to = head * key_dim * value_dim, 2 * n_keys + head * value_dim, head * value_dim
        for a in range(0, whole, WIDTH):
            _columns(
                n,
                y,
                channels,
                key_head,
                n_keys,
                value + a,
                key_dim,
                value_dim,
                matrix,
                state + a,
                rates,
                rate,
                out,
                to + a,
                n_values,
            )
        for a in range(whole, value_dim):
            _column(
                n,
                y,
                channels,
                key_head,
                n_keys,
                value + a,
                key_dim,
                value_dim,
                matrix,
                state + a,
                rates,
                rate,
                out,
                to + a,
                n_values,
            )
        for t in range(n):
            here, z, squares = t * n_values + to, t * projected + channels + to, ZERO
            for d in range(value_dim):
                squares += get(out, here + d) * get(out, here + d)
            factor = ONE / np.sqrt(squares / np.float32(value_dim) + eps)
            for d in range(value_dim):
                gate = get(x, z + d)
                gate *= sigmoid(gate)
                put(out, here + d, get(out, here + d) * factor * get(norm, d) * gate)


@fast_jit
def _columns(
    n: int,
    y: F32,
    channels: int,
    query_at: int,
    n_keys: int,
    value_at: int,
    key_dim: int,
    value_dim: int,
    matrix: F32,
    state: int,
    rates: F32,
    rate: int,
    out: F32,
    to: int,
    n_values: int,
) -> None:
    """WIDTH columns of a head's matrix, through all tokens: they stay in the nearest cache.

    With the matrix S before a token, q times the one behind it is decay * (q S) + (q k) * change, where the change
    is what the key gets. The matrix is written as the next token reads it.
    """
    decay = simd.splat(ONE)
    change_0, change_1, change_2, change_3 = decay, decay, decay, decay
    for t in range(n):
        query, key = t * channels + query_at, t * channels + query_at + n_keys
        k_0 = k_1 = k_2 = k_3 = q_0 = q_1 = q_2 = q_3 = simd.splat(ZERO)
        for d in range(key_dim):
            row = state + d * value_dim
            s_0, s_1 = simd.load(matrix, row), simd.load(matrix, row + LANES)
            s_2, s_3 = simd.load(matrix, row + 2 * LANES), simd.load(matrix, row + 3 * LANES)
            if t:
                k = simd.broadcast(y, key - channels + d)
                s_0 = simd.multiply_add(s_0, decay, simd.multiply(k, change_0))
                s_1 = simd.multiply_add(s_1, decay, simd.multiply(k, change_1))
                s_2 = simd.multiply_add(s_2, decay, simd.multiply(k, change_2))
                s_3 = simd.multiply_add(s_3, decay, simd.multiply(k, change_3))
                simd.store(matrix, row, s_0)
                simd.store(matrix, row + LANES, s_1)
                simd.store(matrix, row + 2 * LANES, s_2)
                simd.store(matrix, row + 3 * LANES, s_3)
            k, q = simd.broadcast(y, key + d), simd.broadcast(y, query + d)
            k_0, k_1 = simd.multiply_add(s_0, k, k_0), simd.multiply_add(s_1, k, k_1)
            k_2, k_3 = simd.multiply_add(s_2, k, k_2), simd.multiply_add(s_3, k, k_3)
            q_0, q_1 = simd.multiply_add(s_0, q, q_0), simd.multiply_add(s_1, q, q_1)
            q_2, q_3 = simd.multiply_add(s_2, q, q_2), simd.multiply_add(s_3, q, q_3)
        rate_t, v, o = rate + 3 * t, t * channels + value_at, t * n_values + to
        decay, minus = simd.splat(get(rates, rate_t)), simd.splat(-get(rates, rate_t))
        beta, same = simd.splat(get(rates, rate_t + 1)), simd.splat(get(rates, rate_t + 2))
        change_0 = simd.multiply(beta, simd.multiply_add(minus, k_0, simd.load(y, v)))
        change_1 = simd.multiply(beta, simd.multiply_add(minus, k_1, simd.load(y, v + LANES)))
        change_2 = simd.multiply(beta, simd.multiply_add(minus, k_2, simd.load(y, v + 2 * LANES)))
        change_3 = simd.multiply(beta, simd.multiply_add(minus, k_3, simd.load(y, v + 3 * LANES)))
        simd.store(out, o, simd.multiply_add(decay, q_0, simd.multiply(same, change_0)))
        simd.store(out, o + LANES, simd.multiply_add(decay, q_1, simd.multiply(same, change_1)))
        simd.store(out, o + 2 * LANES, simd.multiply_add(decay, q_2, simd.multiply(same, change_2)))
        simd.store(out, o + 3 * LANES, simd.multiply_add(decay, q_3, simd.multiply(same, change_3)))
    last = (n - 1) * channels + query_at + n_keys
    for d in range(key_dim):
        row, k = state + d * value_dim, simd.broadcast(y, last + d)
        s_0, s_1 = simd.load(matrix, row), simd.load(matrix, row + LANES)
        s_2, s_3 = simd.load(matrix, row + 2 * LANES), simd.load(matrix, row + 3 * LANES)
        simd.store(matrix, row, simd.multiply_add(s_0, decay, simd.multiply(k, change_0)))
        simd.store(matrix, row + LANES, simd.multiply_add(s_1, decay, simd.multiply(k, change_1)))
        simd.store(matrix, row + 2 * LANES, simd.multiply_add(s_2, decay, simd.multiply(k, change_2)))
        simd.store(matrix, row + 3 * LANES, simd.multiply_add(s_3, decay, simd.multiply(k, change_3)))


@fast_jit
def _column(
    n: int,
    y: F32,
    channels: int,
    query_at: int,
    n_keys: int,
    value_at: int,
    key_dim: int,
    value_dim: int,
    matrix: F32,
    state: int,
    rates: F32,
    rate: int,
    out: F32,
    to: int,
    n_values: int,
) -> None:
    """One column, as `_columns`."""
    for t in range(n):
        query, key = t * channels + query_at, t * channels + query_at + n_keys
        found, total = ZERO, ZERO
        for d in range(key_dim):
            number = get(matrix, state + d * value_dim)
            found += number * get(y, key + d)
            total += number * get(y, query + d)
        decay, beta, same = (get(rates, rate + 3 * t), get(rates, rate + 3 * t + 1), get(rates, rate + 3 * t + 2))
        change = beta * (get(y, t * channels + value_at) - decay * found)
        put(out, t * n_values + to, decay * total + same * change)
        for d in range(key_dim):
            i = state + d * value_dim
            put(matrix, i, get(matrix, i) * decay + get(y, key + d) * change)
