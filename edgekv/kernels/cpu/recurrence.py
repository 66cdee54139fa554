"""Short convolutions and the gated delta rule; threads share channels or heads.

A head's matrix (64 KiB of float32, as a rule) is read in groups of columns, which stay in the nearest cache of the
core through all tokens.
"""

import functools
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import fast_jit, intrinsic
from edgekv.kernels.cpu.launch import RangeKernel
from edgekv.kernels.cpu.loops import float_of, floats, load_arguments
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.cpu.softmax import sigmoid
from edgekv.types import F32

CHANNELS = 128  # of a convolution, per item of work
LANES = emit.LANES
VECTOR = emit.vector(emit.F32, LANES)
WIDTH = 4 * LANES  # columns of a matrix that are worked on together
ZERO, ONE, LENGTH_EPS = np.array([0, 1, 1e-6], np.float32)


def short_conv(x: F32, out: F32, *, window: F32, weight: F32, bias: F32 | None = None) -> None:
    """Fills out (n, C) from x (n, 3C): a short convolution between two gates."""
    n, channels = out.shape
    scratch = np.empty(channels, np.float32)
    arguments = n, channels, len(weight), x, out, window, weight, 0 if bias is None else bias, scratch
    _conv_channels(-(-channels // CHANNELS), x.size + n * weight.size, *arguments)


def gated_delta(
    x: F32, out: F32, *, window: F32, matrix: F32, conv: F32, log_decay: F32, time_bias: F32, norm: F32, eps: float
) -> None:
    """Fills out (n, V * Dv) by the gated delta rule; matrix (V, Dk, Dv) is changed."""
    n, (value_heads, key_dim, value_dim), convolved = len(x), matrix.shape, window.shape[1]
    key_heads = (convolved - value_heads * value_dim) // (2 * key_dim)
    sizes = n, key_heads, key_dim, value_heads, value_dim
    y = np.empty(n * convolved, np.float32)
    n_heads = 2 * key_heads + value_heads
    _delta_inputs(n_heads, 2 * n * conv.size, *sizes, len(conv), x, y, window, conv)
    rates = np.empty(3 * value_heads * n, np.float32)  # of each token: decay, beta, and query times key
    arrays = x, y, matrix, rates, log_decay, time_bias, norm, out
    _delta_heads(value_heads, 4 * n * matrix.size, *sizes, float(eps), *arrays)


@RangeKernel
def _conv_channels(first: int, last: int, thread: int, arguments: int) -> None:
    """Computes y = c * conv(b * x) of blocks of CHANNELS."""
    n, channels, taps, x_at, out_at, window_at, weight_at, bias, product_at = load_arguments(arguments, 9)
    x, out, product = floats(x_at), floats(out_at), floats(product_at)
    window, weight = floats(window_at), floats(weight_at)
    for item in range(first, last):
        begin = item * CHANNELS
        width = min(CHANNELS, channels - begin)
        for t in range(n):
            b = 3 * t * channels + begin
            c, inner, y = b + channels, b + 2 * channels, t * channels + begin
            for d in range(width):
                put(product, begin + d, get(x, b + d) * get(x, inner + d))
            _convolve(product, begin, y, width, channels, taps, begin, window, weight, out)
            if bias:
                for d in range(width):
                    put(out, y + d, get(out, y + d) + get(floats(bias), begin + d))
            for d in range(width):
                put(out, y + d, get(out, y + d) * get(x, c + d))


@fast_jit
def _convolve(
    x: F32, at: int, to: int, width: int, channels: int, taps: int, begin: int, window: F32, weight: F32, out: F32
) -> None:
    """Sets out[to:] to the convolution of a token's values x[at:] with the window, which moves on."""
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


@RangeKernel
def _delta_inputs(first: int, last: int, thread: int, arguments: int) -> None:
    """Fills y (n, channels) with convolved queries and keys, both normalised, and values, by head."""
    n, key_heads, key_dim, value_heads, value_dim, taps = load_arguments(arguments, 6)
    x_at, y_at, window_at, weight_at = load_arguments(arguments + 8 * 6, 4)
    x, y, window, weight = floats(x_at), floats(y_at), floats(window_at), floats(weight_at)
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


@RangeKernel
def _delta_heads(first: int, last: int, thread: int, arguments: int) -> None:
    """Applies the rule head by head; the columns of a matrix do not depend on each other."""
    n, key_heads, key_dim, value_heads, value_dim, eps = load_arguments(arguments, 6)
    x_at, y_at, matrix_at, rates_at, decay_at, bias_at, norm_at, out_at = load_arguments(arguments + 8 * 6, 8)
    x, y, matrix, rates, out = floats(x_at), floats(y_at), floats(matrix_at), floats(rates_at), floats(out_at)
    log_decay, time_bias, norm = floats(decay_at), floats(bias_at), floats(norm_at)
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
        places = channels, key_head, n_keys, value, key_dim, value_dim, state, rate, to, n_values
        for a in range(0, whole, WIDTH):
            _columns(n, a, y, matrix, rates, out, places)
        for a in range(whole, value_dim):
            _column(n, a, y, matrix, rates, out, places)
        for t in range(n):
            here, z, squares = t * n_values + to, t * projected + channels + to, ZERO
            for d in range(value_dim):
                squares += get(out, here + d) * get(out, here + d)
            factor = ONE / np.sqrt(squares / np.float32(value_dim) + float_of(eps))
            for d in range(value_dim):
                gate = get(x, z + d)
                gate *= sigmoid(gate)
                put(out, here + d, get(out, here + d) * factor * get(norm, d) * gate)


@intrinsic
def _columns(context: Any, n: Any, first: Any, y: Any, matrix: Any, rates: Any, out: Any, places: Any) -> Any:
    """Takes WIDTH columns of a head's matrix through all tokens, while they are in the nearest cache.

    With the matrix S before a token, q times the one behind it is decay * (q S) + (q k) * change, where the change
    is what the key gets. The matrix is written as the next token reads it. places: as `_column` takes them apart.
    """

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        n, first, y, matrix, rates, out, packed = args
        channels, query, n_keys, value, key_dim, value_dim, state, rate, to, n_values = cgutils.unpack_tuple(
            b, packed
        )

        def element(kind: Any, array: Any, *indices: Any) -> Any:
            return emit.address(context, b, kind, (array, functools.reduce(b.add, indices)))

        parts, (_, _, of_y, of_matrix, of_rates, of_out, _) = range(WIDTH // LANES), signature.args
        token_bytes, row_bytes = b.mul(channels, emit.I64(4)), b.mul(value_dim, emit.I64(4))
        queries, values = element(of_y, y, query), element(of_y, y, value, first)
        rows, rates = element(of_matrix, matrix, state, first), element(of_rates, rates, rate)
        outs = element(of_out, out, to, first)

        def splat(address: Any, offset: int = 0) -> Any:
            return emit.splat(b, emit.load(b, emit.F32, address, offset), LANES)

        def row_after(d: Any, query: Any, before: list[Any]) -> list[Any]:
            """Row d of the columns, written behind the token whose query lies at an address."""
            address = b.add(rows, b.mul(d, row_bytes))
            k = splat(b.add(query, b.mul(b.add(n_keys, d), emit.I64(4))))
            row = []
            for part, change in zip(parts, before[1:], strict=True):
                x = emit.load(b, VECTOR, address, 4 * LANES * part)
                row.append(emit.multiply_add(b, x, before[0], b.fmul(k, change)))
                emit.store(b, row[-1], address, 4 * LANES * part)
            return row

        def token(t: Any, before: list[Any]) -> list[Any]:
            """The token's decay and changes; before: those of the one before it."""
            query = b.add(queries, b.mul(t, token_bytes))
            with emit.loop(b, emit.I64(0), key_dim, 1, [emit.constant(VECTOR, 0)] * (2 * len(parts))) as loop:
                if before:
                    row = row_after(loop.i, b.sub(query, token_bytes), before)
                else:
                    address = b.add(rows, b.mul(loop.i, row_bytes))
                    row = [emit.load(b, VECTOR, address, 4 * LANES * part) for part in parts]
                q = splat(b.add(query, b.mul(loop.i, emit.I64(4))))
                k = splat(b.add(query, b.mul(b.add(n_keys, loop.i), emit.I64(4))))
                pairs = [(x, k) for x in row] + [(x, q) for x in row]
                loop.next = [emit.multiply_add(b, *pair, x) for pair, x in zip(pairs, loop.values, strict=True)]
            known, found = loop.values[: len(parts)], loop.values[len(parts) :]
            decay, beta, same = (splat(b.add(rates, b.mul(t, emit.I64(12))), 4 * i) for i in range(3))
            v, o = b.add(values, b.mul(t, token_bytes)), b.add(outs, b.mul(b.mul(t, n_values), emit.I64(4)))
            changes = []
            for part in parts:
                wanted = emit.load(b, VECTOR, v, 4 * LANES * part)
                changes.append(b.fmul(beta, emit.multiply_add(b, b.fneg(decay), known[part], wanted)))
                result = emit.multiply_add(b, decay, found[part], b.fmul(same, changes[-1]))
                emit.store(b, result, o, 4 * LANES * part)
            return [decay, *changes]

        with emit.loop(b, emit.I64(1), n, 1, token(emit.I64(0), [])) as loop:
            loop.next = token(loop.i, loop.values)
        last = b.add(queries, b.mul(b.sub(n, emit.I64(1)), token_bytes))
        with emit.loop(b, emit.I64(0), key_dim, 1) as row:
            row_after(row.i, last, loop.values)
        return context.get_dummy_value()

    return types.none(types.intp, types.intp, y, matrix, rates, out, places), build


@fast_jit
def _column(n: int, first: int, y: F32, matrix: F32, rates: F32, out: F32, places: tuple[int, ...]) -> None:
    """Takes one column through all tokens, as `_columns` does."""
    channels, query_at, n_keys, value, key_dim, value_dim, state, rate, to, n_values = places
    for t in range(n):
        query, key = t * channels + query_at, t * channels + query_at + n_keys
        found, total = ZERO, ZERO
        for d in range(key_dim):
            number = get(matrix, state + first + d * value_dim)
            found += number * get(y, key + d)
            total += number * get(y, query + d)
        decay, beta, same = (get(rates, rate + 3 * t), get(rates, rate + 3 * t + 1), get(rates, rate + 3 * t + 2))
        change = beta * (get(y, t * channels + value + first) - decay * found)
        put(out, t * n_values + to + first, decay * total + same * change)
        for d in range(key_dim):
            i = state + first + d * value_dim
            put(matrix, i, get(matrix, i) * decay + get(y, key + d) * change)
