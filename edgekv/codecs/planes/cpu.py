"""Planes on a CPU: encoders, centres of keys in 4 bits, elements in levels for a Gaussian."""

from __future__ import annotations

import dataclasses

import numpy as np

from edgekv.codecs.planes import GAUSS_STEP, N_CENTRES, RUN
from edgekv.codecs.planes.cpu_keys import KEYS
from edgekv.codecs.planes.cpu_values import VALUES
from edgekv.kernels.cpu.compile import Scalar, fast_jit, jit
from edgekv.kernels.cpu.launch import RangeKernel, exact_kernel
from edgekv.kernels.cpu.loops import chars, doubles, floats, halves, load_numbers
from edgekv.kernels.cpu.scalar import as_float, clamp, float_to_half, get, maximum, minimum, put, sign_bits
from edgekv.kernels.interface import BLOCK, LARGEST_F16
from edgekv.types import F32, U8, U16

ZERO, HALF, ONE, EIGHT = np.array([0, 0.5, 1, 8], np.float32)
MIDDLE, HIGHEST = np.array([7.5, 15], np.float32)
STEPS = np.array([0, *GAUSS_STEP.values()])  # by bits


def encode_centres(x: F32, codes: U8, step: U16, t0: int) -> None:
    """Stores means of x (G, n, D) and takes them off; codes (G, cap / 64, N_CENTRES, D / 2)."""
    n_items, (_, n, width) = x.shape[0] * x.shape[1] // BLOCK, x.shape
    scratch = np.empty((n_items, width), np.float32)
    _centre_items(n_items, 8 * x.size, x, n, width, codes, step, step.shape[1], t0, scratch)


@RangeKernel
def _centre_items(first: int, last: int, part: int, arguments: int) -> None:
    x_at, n, width, codes_at, step_at, n_blocks, t0, scratch_at = load_numbers(arguments, 8)
    x, codes, step, scratch = floats(x_at), chars(codes_at), halves(step_at), floats(scratch_at)
    groups = n // BLOCK
    for item in range(first, last):
        target = (item // groups * n_blocks + t0 // BLOCK + item % groups) * N_CENTRES
        for i in range(N_CENTRES):
            token, n_tokens = (item * BLOCK, BLOCK) if i == 0 else (item * BLOCK + (i - 1) * RUN, RUN)
            _encode_mean(x, token * width, n_tokens, width, step, codes, target + i, scratch, item * width)


@jit
def _encode_mean(
    x: F32, row: int, n: int, width: int, step: U16, codes: U8, target: int, scratch: F32, mean: int
) -> None:
    """Stores the mean of n rows of x and subtracts it from them; scratch[mean:][:width] is used up."""
    half, largest = width // 2, ZERO
    for d in range(width):
        put(scratch, mean + d, get(x, row + d))
    for i in range(row + width, row + n * width, width):
        for d in range(width):
            put(scratch, mean + d, get(scratch, mean + d) + get(x, i + d))
    for d in range(mean, mean + width):
        put(scratch, d, get(scratch, d) * (ONE / np.float32(n)))
        largest = maximum(largest, abs(get(scratch, d)))
    bits = float_to_half(minimum(largest / EIGHT, LARGEST_F16))
    put(step, target, bits)
    size = as_float(bits)
    divisor = ONE if size == ZERO else size
    for d in range(mean, mean + half):
        low = clamp(np.floor(get(scratch, d) / divisor) + EIGHT, ZERO, HIGHEST)
        high = clamp(np.floor(get(scratch, d + half) / divisor) + EIGHT, ZERO, HIGHEST)
        put(codes, target * half + d - mean, np.uint8(np.int32(low) | np.int32(high) << 4))
        put(scratch, d, (low - MIDDLE) * size)
        put(scratch, d + half, (high - MIDDLE) * size)
    for i in range(row, row + n * width, width):
        for d in range(width):
            put(x, i + d, get(x, i + d) - get(scratch, mean + d))


def encode_keys(x: F32, planes: U8, scale: U16, t0: int) -> None:
    """Stores x (G, n, D) in planes (G, cap / 64, B, GROUPS, D / 8, 16); scale (G, cap)."""
    n_items, bits, (_, n, width) = x.shape[0] * x.shape[1] // BLOCK, planes.shape[2], x.shape
    scratch = np.empty((n_items, 2, width), np.float32)
    sizes = n, width, bits, scale.shape[1], planes.shape[1], t0
    _encode_keys(n_items, 8 * x.size, *sizes, x, planes, scale, scratch, STEPS)


def encode_interleaved(x: F32, codes: U8, scale: U16, t0: int) -> None:
    """Stores x (G, n, D) in codes (G, cap / 64, 2 * b, D, 4); scale (G, cap)."""
    bits, (n_groups, n, width) = codes.shape[2] // 2, x.shape
    sizes = n, width, bits, scale.shape[1], codes.shape[1], t0
    _encode_values(n_groups * n // BLOCK, 8 * x.size, *sizes, np.ascontiguousarray(x), codes, scale, STEPS)


@exact_kernel
def _encode_keys(first: int, last: int, part: int, arguments: int) -> None:
    n, width, bits, capacity, n_stored, t0 = load_numbers(arguments, 6)
    x_at, planes_at, scale_at, scratch_at, steps_at = load_numbers(arguments + 8 * 6, 5)
    x, planes, scale, scratch = floats(x_at), chars(planes_at), halves(scale_at), floats(scratch_at)
    blocks, block_bytes, gauss_step = n // BLOCK, bits * width * BLOCK // 8, get(doubles(steps_at), bits)
    for item in range(first, last):
        g, block = item // blocks, t0 // BLOCK + item % blocks
        left = 2 * item * width
        for t in range(BLOCK):
            row, place = (item * BLOCK + t) * width, (g * n_stored + block) * block_bytes + place_of(t, width)
            square = _square_of(x, row, width)
            size = np.float32(np.sqrt(square / width) * gauss_step) * np.float32(1 << bits) / np.float32(4)
            for d in range(width):
                put(scratch, left + d, get(x, row + d))
                put(scratch, left + width + d, ZERO)
            for p in range(bits):
                weight = np.float32(1 << (bits - 1 - p))
                for d in range(0, width, 8):
                    put(planes, place + 2 * (p * 4 * width + d), sign_bits(scratch, left + d))
                for d in range(left, left + width):
                    sign = ONE if get(scratch, d) >= ZERO else -ONE
                    put(scratch, width + d, get(scratch, width + d) + sign * weight)
                    put(scratch, d, get(scratch, d) - sign * size)
                size *= HALF
            along = _along(x, row, scratch, left + width, width)
            ratio = square / along if along > 0 else 0.0
            put(scale, g * capacity + block * BLOCK + t, float_to_half(np.float32(min(ratio, LARGEST_F16))))


@jit
def place_of(token: int, width: int) -> int:
    """First byte of token % 64 in its block's plane; the others follow 16 bytes apart."""
    quarter = token // 16 % 4
    return token % 16 // 4 * 2 * width + token % 4 * 4 + (quarter & 1) * 2 + (quarter >> 1)


@fast_jit
def _along(x: F32, row: int, level: F32, start: int, width: int) -> Scalar:
    total = 0.0
    for d in range(width):
        total += np.float64(get(x, row + d)) * np.float64(get(level, start + d))
    return total


@exact_kernel
def _encode_values(first: int, last: int, part: int, arguments: int) -> None:
    n, head_dim, bits, capacity, n_stored, t0 = load_numbers(arguments, 6)
    x_at, codes_at, scale_at, steps_at = load_numbers(arguments + 8 * 6, 4)
    x, codes, scale, gauss_step = floats(x_at), chars(codes_at), halves(scale_at), get(doubles(steps_at), bits)
    blocks, block_bytes = n // BLOCK, 8 * bits * head_dim
    for item in range(first, last):
        g, block = item // blocks, t0 // BLOCK + item % blocks
        start = (g * n_stored + block) * block_bytes
        for i in range(start, start + block_bytes):
            put(codes, i, np.uint8(0))
        for t in range(BLOCK):
            row = (item * BLOCK + t) * head_dim
            square = _square_of(x, row, head_dim)
            step = np.float32(np.sqrt(square / head_dim) * gauss_step)
            along = _add_token(x, row, head_dim, step, bits, codes, start, t)
            size = square / along if along > 0 else 0.0
            put(scale, g * capacity + block * BLOCK + t, float_to_half(np.float32(min(size, LARGEST_F16))))


@fast_jit
def _add_token(x: F32, row: int, head_dim: int, step: Scalar, bits: int, codes: U8, start: int, t: int) -> Scalar:
    """Adds token t's codes to the block's bytes; returns x times its levels."""
    half = np.float32(1 << (bits - 1))
    top = half + half - ONE
    middle = np.float64(half) - 0.5
    divisor = ONE if step == ZERO else step
    along = 0.0
    for d in range(head_dim):
        element = get(x, row + d)
        level = clamp(np.floor(element / divisor) + half, ZERO, top)
        along += np.float64(element) * (np.float64(level) - middle)
        code = np.int32(level)
        if bits == 3:
            _put_code(codes, start, head_dim, d, t, 2, 0, code >> 1)
            _put_code(codes, start, head_dim, d, t, 1, 4, code & 1)
        else:
            _put_code(codes, start, head_dim, d, t, bits, 0, code)
    return along


@jit
def _put_code(codes: U8, start: int, head_dim: int, d: int, t: int, bits: int, first_row: int, code: int) -> None:
    tokens_apart = 8 * bits
    row = first_row + t % tokens_apart // 4
    byte = start + (row * head_dim + d) * 4 + t % 4
    put(codes, byte, np.uint8(get(codes, byte) | code << t // tokens_apart * bits))


@fast_jit
def _square_of(x: F32, row: int, head_dim: int) -> Scalar:
    """The squared length of x[row:][:head_dim], summed in double precision."""
    total = 0.0
    for d in range(row, row + head_dim):
        wide = np.float64(get(x, d))
        total += wide * wide
    return total


KERNELS = {
    "centred_planes": dataclasses.replace(
        KEYS, encode=lambda codec, x, t0: codec.encode_by(encode_centres, encode_keys, x, t0)
    ),
    "interleaved": dataclasses.replace(
        VALUES, encode=lambda codec, x, t0: codec.encode_by(encode_interleaved, x, t0)
    ),
}
