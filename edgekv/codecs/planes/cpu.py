"""Encoders of keys in planes and of interleaved values on a CPU; `edgekv.codecs.planes` draws the layout."""

from __future__ import annotations

import dataclasses

import numpy as np

from edgekv.codecs.planes import GAUSS_STEP, GROUP, N_CENTRES, N_RUNS, RUN
from edgekv.codecs.planes.cpu_keys import KEYS
from edgekv.codecs.planes.cpu_values import VALUES
from edgekv.kernels.cpu.compile import Scalar, fast_jit, jit
from edgekv.kernels.cpu.launch import RangeKernel, exact_kernel
from edgekv.kernels.cpu.loops import chars, doubles, floats, halves, load_arguments
from edgekv.kernels.cpu.scalar import as_float, clamp, float_to_half, get, maximum, minimum, put, sign_bits
from edgekv.kernels.interface import BLOCK, MAX_F16
from edgekv.types import F32, U8, U16

ZERO, HALF, ONE, EIGHT = np.array([0, 0.5, 1, 8], np.float32)
MIDDLE_CODE, MAX_CODE = np.array([7.5, 15], np.float32)  # of a centre
GAUSS_STEPS = np.array([0, *GAUSS_STEP.values()])  # by bits


def encode_centres(x: F32, codes: U8, step: U16, t0: int) -> None:
    """Stores centres of tokens t0.. and subtracts them from x (G, n, D): `planes.encode_centres`."""
    n_items, (_, n, width) = x.shape[0] * x.shape[1] // BLOCK, x.shape
    scratch = np.empty((n_items, width), np.float32)
    _encode_centres(n_items, 8 * x.size, x, n, width, codes, step, step.shape[1], t0, scratch)


@RangeKernel
def _encode_centres(first: int, last: int, thread: int, arguments: int) -> None:
    x, n, width, codes, steps, n_blocks, t0, scratch = load_arguments(arguments, 8)
    blocks = n // BLOCK
    for item in range(first, last):
        block = item // blocks * n_blocks + t0 // BLOCK + item % blocks
        for i in range(N_CENTRES):
            token, n_tokens = (item * BLOCK, BLOCK) if i == 0 else (item * BLOCK + (i - 1) * RUN, RUN)
            centre = block * N_CENTRES + i
            rows, mean = floats(x + 4 * token * width), floats(scratch + 4 * item * width)
            step, centre_codes = halves(steps + 2 * centre), chars(codes + centre * width // 2)
            _encode_mean(rows, n_tokens, width, step, centre_codes, mean)


@jit
def _encode_mean(x: F32, n: int, width: int, step: U16, codes: U8, mean: F32) -> None:
    """Stores the mean of x (n, width) in codes (width / 2,) and step, and subtracts it; mean (width,): scratch."""
    half, largest = width // 2, ZERO
    for d in range(width):
        put(mean, d, get(x, d))
    for row in range(width, n * width, width):
        for d in range(width):
            put(mean, d, get(mean, d) + get(x, row + d))
    for d in range(width):
        put(mean, d, get(mean, d) * (ONE / np.float32(n)))
        largest = maximum(largest, abs(get(mean, d)))
    bits = float_to_half(minimum(largest / EIGHT, MAX_F16))
    put(step, 0, bits)
    size = as_float(bits)
    divisor = ONE if size == ZERO else size
    for d in range(half):
        low = clamp(np.floor(get(mean, d) / divisor) + EIGHT, ZERO, MAX_CODE)
        high = clamp(np.floor(get(mean, d + half) / divisor) + EIGHT, ZERO, MAX_CODE)
        put(codes, d, np.uint8(np.int32(low) | np.int32(high) << 4))
        put(mean, d, (low - MIDDLE_CODE) * size)
        put(mean, d + half, (high - MIDDLE_CODE) * size)
    for row in range(0, n * width, width):
        for d in range(width):
            put(x, row + d, get(x, row + d) - get(mean, d))


def encode_keys(x: F32, planes: U8, scale: U16, t0: int) -> None:
    """Stores x (G, n, D) as tokens t0.. in planes and scale: `planes.encode_keys`."""
    n_items, bits, (_, n, width) = x.shape[0] * x.shape[1] // BLOCK, planes.shape[2], x.shape
    scratch = np.empty((n_items, 2, width), np.float32)
    sizes = n, width, bits, scale.shape[1], planes.shape[1], t0
    _encode_keys(n_items, 8 * x.size, *sizes, x, planes, scale, scratch, GAUSS_STEPS)


@exact_kernel
def _encode_keys(first: int, last: int, thread: int, arguments: int) -> None:
    n, width, bits, capacity, n_stored, t0 = load_arguments(arguments, 6)
    x_at, planes_at, scale_at, scratch_at, steps_at = load_arguments(arguments + 8 * 6, 5)
    blocks, block_bytes, gauss_step = n // BLOCK, bits * width * BLOCK // 8, get(doubles(steps_at), bits)
    for item in range(first, last):
        g, block = item // blocks, t0 // BLOCK + item % blocks
        left, level = floats(scratch_at + 8 * item * width), floats(scratch_at + 8 * item * width + 4 * width)
        for t in range(BLOCK):
            x = floats(x_at + 4 * (item * BLOCK + t) * width)
            planes = chars(planes_at + (g * n_stored + block) * block_bytes + place_of(t, width))
            square = _dot(x, x, width)
            size = np.float32(np.sqrt(square / width) * gauss_step) * np.float32(1 << bits) / np.float32(4)
            for d in range(width):
                put(left, d, get(x, d))
                put(level, d, ZERO)
            for p in range(bits):
                weight = np.float32(1 << (bits - 1 - p))
                for d in range(0, width, 8):
                    put(planes, (p * BLOCK * width + GROUP * d) // 8, sign_bits(left, d))
                for d in range(width):
                    sign = ONE if get(left, d) >= ZERO else -ONE
                    put(level, d, get(level, d) + sign * weight)
                    put(left, d, get(left, d) - sign * size)
                size *= HALF
            along = _dot(x, level, width)
            ratio = square / along if along > 0 else 0.0
            token = g * capacity + block * BLOCK + t
            put(halves(scale_at), token, float_to_half(np.float32(min(ratio, MAX_F16))))


@jit
def place_of(token: int, width: int) -> int:
    """Returns a token's byte of the first column in its block's plane: `planes.place_of`."""
    run = token // RUN % N_RUNS
    return token % RUN // 4 * 2 * width + token % 4 * 4 + (run & 1) * 2 + (run >> 1)


@fast_jit
def _dot(x: F32, y: F32, n: int) -> Scalar:
    """Returns the product of x and y (n,), summed in double precision."""
    total = 0.0
    for d in range(n):
        total += np.float64(get(x, d)) * np.float64(get(y, d))
    return total


def encode_interleaved(x: F32, codes: U8, scale: U16, t0: int) -> None:
    """Stores x (G, n, D) as tokens t0.. in codes and scale: `planes.encode_interleaved`."""
    bits, (n_groups, n, width) = codes.shape[2] // 2, x.shape
    sizes = n, width, bits, scale.shape[1], codes.shape[1], t0
    _encode_values(n_groups * n // BLOCK, 8 * x.size, *sizes, np.ascontiguousarray(x), codes, scale, GAUSS_STEPS)


@exact_kernel
def _encode_values(first: int, last: int, thread: int, arguments: int) -> None:
    n, head_dim, bits, capacity, n_stored, t0 = load_arguments(arguments, 6)
    x_at, codes_at, scale_at, steps_at = load_arguments(arguments + 8 * 6, 4)
    blocks, block_bytes, gauss_step = n // BLOCK, 8 * bits * head_dim, get(doubles(steps_at), bits)
    for item in range(first, last):
        g, block = item // blocks, t0 // BLOCK + item % blocks
        codes = chars(codes_at + (g * n_stored + block) * block_bytes)
        for i in range(block_bytes):
            put(codes, i, np.uint8(0))
        for t in range(BLOCK):
            x = floats(x_at + 4 * (item * BLOCK + t) * head_dim)
            square = _dot(x, x, head_dim)
            step = np.float32(np.sqrt(square / head_dim) * gauss_step)
            along = _add_token(x, head_dim, step, bits, codes, t)
            size = square / along if along > 0 else 0.0
            token = g * capacity + block * BLOCK + t
            put(halves(scale_at), token, float_to_half(np.float32(min(size, MAX_F16))))


@fast_jit
def _add_token(x: F32, head_dim: int, step: Scalar, bits: int, codes: U8, t: int) -> Scalar:
    """Adds token t's codes to the block's bytes, which are 0 where they go; returns x times its levels."""
    half = np.float32(1 << (bits - 1))
    highest = half + half - ONE
    middle = np.float64(half) - 0.5
    divisor = ONE if step == ZERO else step
    along = 0.0
    for d in range(head_dim):
        element = get(x, d)
        level = clamp(np.floor(element / divisor) + half, ZERO, highest)
        along += np.float64(element) * (np.float64(level) - middle)
        code = np.int32(level)
        if bits == 3:
            _add_field(codes, 0, 2, head_dim, d, t, code >> 1)
            _add_field(codes, 4, 1, head_dim, d, t, code & 1)
        else:
            _add_field(codes, 0, bits, head_dim, d, t, code)
    return along


@jit
def _add_field(codes: U8, first_line: int, bits: int, head_dim: int, d: int, t: int, field: int) -> None:
    """Adds channel d of token t to a field of ``bits`` bits, whose lines begin with ``first_line``."""
    tokens_apart = 8 * bits
    line = first_line + t % tokens_apart // 4
    byte = (line * head_dim + d) * 4 + t % 4
    put(codes, byte, np.uint8(get(codes, byte) | field << t // tokens_apart * bits))


KERNELS = {
    "centred_planes": dataclasses.replace(
        KEYS, encode=lambda codec, x, t0: codec.encode_by(encode_centres, encode_keys, x, t0)
    ),
    "interleaved": dataclasses.replace(
        VALUES, encode=lambda codec, x, t0: codec.encode_by(encode_interleaved, x, t0)
    ),
}
