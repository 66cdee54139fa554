"""Uniform levels between given ends, in bit planes."""

from typing import Any

import numpy as np

from edgekv.kernels.cpu.compile import Args, Scalar, fast_jit, jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.loops import address_of, chars, floats, halves, numbers
from edgekv.kernels.cpu.scalar import as_float, clamp, get, put, round_to_even
from edgekv.kernels.cpu.tile import decode_loop, scale_codes, tiled
from edgekv.types import F32, U8, U16

ENCODE_WORK = 4  # of an element, in multiply-adds
BYTE_BITS = 8
ZERO = np.float32(0)


def encode_levels(x: F32, low: U16, step: U16, planes: U8, t0: int) -> None:
    args = np.ascontiguousarray(x), low, step, planes, t0
    run(_encode_tokens, x.shape[0] * x.shape[1], ENCODE_WORK * x.size, args)


@jit
def _encode_tokens(first: int, last: int, args: Args) -> None:
    x, low, step, planes, t0 = args
    (_, n_tokens, head_dim), (n_bits, n_bytes) = x.shape, planes.shape[2:]
    x = x.reshape(-1)
    highest = np.float32((1 << n_bits) - 1)
    for item in range(first, last):
        g, i = item // n_tokens, item % n_tokens
        lo, size = _ends(low, step, g, t0 + i)
        token = planes[g, t0 + i].reshape(-1)
        token[:] = 0
        for d in range(head_dim):
            code = _level(get(x, item * head_dim + d), lo, size, highest)
            for j in range(n_bits):
                bit = (code >> np.int32(j) & np.int32(1)) << np.int32(d % BYTE_BITS)
                token[j * n_bytes + d // BYTE_BITS] |= np.uint8(bit)


@jit
def _level(x: Scalar, low: Scalar, size: Scalar, highest: Scalar) -> Scalar:
    if size == ZERO:
        return np.int32(0)
    position = clamp((x - low) / size, ZERO, highest)
    return np.int32(round_to_even(position))


@jit
def _ends(low: U16, step: U16, g: int, t: int) -> tuple[Scalar, Scalar]:
    """low and step of head g's token t, where all heads or all tokens may share one."""
    row, column = min(g, low.shape[0] - 1), min(t, low.shape[1] - 1)
    return as_float(low[row, column]), as_float(step[row, column])


@decode_loop
def _decode(store: int, g: int, t: int, n: int, tile: int, scratch: int) -> None:
    """low + step * code: the ends of a token, of all tokens, or of each channel."""
    x, to = numbers(store), floats(tile)
    head_dim, n_bits, capacity = get(x, 0), get(x, 1), get(x, 2)
    low, step, n_bytes = halves(get(x, 4)), halves(get(x, 5)), (head_dim + BYTE_BITS - 1) // BYTE_BITS
    gap_head, gap_token, gap_channel = get(x, 6), get(x, 7), get(x, 8)
    _unpack(get(x, 3) + (g * capacity + t) * n_bits * n_bytes, n_bits, n_bytes, n, head_dim, to)
    for i in range(n):
        end = g * gap_head + (t + i) * gap_token
        if gap_channel:
            for d in range(head_dim):
                code = get(to, i * head_dim + d)
                put(to, i * head_dim + d, as_float(get(low, end + d)) + as_float(get(step, end + d)) * code)
        else:
            scale_codes(tile, i * head_dim, head_dim, as_float(get(low, end)), as_float(get(step, end)))


@fast_jit
def _unpack(planes: int, n_bits: int, n_bytes: int, n: int, head_dim: int, codes: F32) -> None:
    """codes (n, head_dim) of n tokens in bit planes."""
    whole = head_dim // BYTE_BITS
    for i in range(n):
        for d in range(head_dim):
            put(codes, i * head_dim + d, ZERO)
        for plane in range(n_bits):
            bits, weight = chars(planes + (i * n_bits + plane) * n_bytes), np.float32(1 << plane)
            for j in range(whole):
                byte, target = np.int32(get(bits, j)), i * head_dim + BYTE_BITS * j
                for k in range(BYTE_BITS):
                    put(codes, target + k, get(codes, target + k) + weight * np.float32(byte >> np.int32(k) & 1))
            for d in range(BYTE_BITS * whole, head_dim):
                bit = np.int32(get(bits, whole)) >> np.int32(d % BYTE_BITS) & 1
                put(codes, i * head_dim + d, get(codes, i * head_dim + d) + weight * np.float32(bit))


def _store(codec: Any) -> tuple[int, ...]:
    """Where all heads or all tokens share their ends, these lie 0 apart."""
    planes, low, step = (codec.arrays[name] for name in ("planes", "low", "step"))
    heads, n = low.shape
    gaps = (n, 0, 1) if codec.group == "channel" else (n if heads > 1 else 0, 1 if n > 1 else 0, 0)
    ends = address_of(low), address_of(step)
    return codec.head_dim, planes.shape[2], planes.shape[1], address_of(planes), *ends, *gaps


LOOPS = {"levels": tiled(_store, _decode)}
