"""Tokens of a Huffman-coded block decoded into bytes in the core's own cache.

A table looked up by the next TABLE_BITS bits gives up to seven symbols at once, written as one word whether they
all count or not: no branch depends on the data. Four runs of tokens are decoded side by side, since each lookup
must wait for the one before it.
"""

from typing import Any

import numpy as np
from numba import types

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import Scalar, intrinsic, jit
from edgekv.kernels.cpu.scalar import get
from edgekv.kernels.interface import BLOCK
from edgekv.papers.kvcomp.codebook import TABLE_BITS
from edgekv.types import U8, U16, U64

RUNS = 4
RUN_TOKENS = BLOCK // RUNS
LOOKUPS = 57 // TABLE_BITS  # per load: a word read at a byte border has at least 57 bits to come
OVERRUN = 64  # bytes behind a run: it may be written LOOKUPS * TABLE_SYMBOLS + 7 beyond its end
WORD_BITS, BYTE_BITS, BIT_IN_BYTE = np.uint64(64), np.uint64(3), np.uint64(7)
INDEX = np.uint64((1 << TABLE_BITS) - 1)
LENGTH_SHIFT, LENGTH_MASK, NUMBER_SHIFT = np.uint64(56), np.uint64(15), np.uint64(60)


@jit
def run_gap(head_dim: int) -> int:
    """Bytes from one run of decoded tokens to the next."""
    return RUN_TOKENS * head_dim + OVERRUN


@jit
def decode(
    stream: U8,
    offset: Scalar,
    bits: U16,
    t: int,
    n: int,
    block: int,
    table: U64,
    plain: U64,
    plain_bits: int,
    codes: U8,
    head_dim: int,
) -> Scalar:
    """Decodes n <= BLOCK tokens of one block from token t on, in RUNS runs; returns how many tokens a run has.

    The codes of run r begin at codes[r * run_gap(head_dim)]; a block of plain_bits bits uses the table `plain`.
    bits (capacity,): of each token of the head.
    """
    start = t // block * block
    before = _total(bits, start, t - start)
    if before + _total(bits, t, start + block - t) == plain_bits:
        table = plain
    n_run = (n + RUNS - 1) // RUNS
    n1 = min(n, n_run)
    n2 = min(n, 2 * n_run)
    n3 = min(n, 3 * n_run)
    p0 = np.uint64(offset) * WORD_BITS + np.uint64(before)
    p1 = p0 + np.uint64(_total(bits, t, n1))
    p2 = p1 + np.uint64(_total(bits, t + n1, n2 - n1))
    p3 = p2 + np.uint64(_total(bits, t + n2, n3 - n2))
    w0 = np.uint64(0)
    w1 = np.uint64(run_gap(head_dim))
    w2, w3 = w1 + w1, w1 + w1 + w1
    e0, e1 = w0 + np.uint64(n1 * head_dim), w1 + np.uint64((n2 - n1) * head_dim)
    e2, e3 = w2 + np.uint64((n3 - n2) * head_dim), w3 + np.uint64((n - n3) * head_dim)
    while (w0 < e0) & (w1 < e1) & (w2 < e2) & (w3 < e3):
        a0, a1 = _peek(stream, p0), _peek(stream, p1)
        a2, a3 = _peek(stream, p2), _peek(stream, p3)
        for _ in range(LOOKUPS):
            a0, p0, w0 = _look_up(a0, p0, w0, table, codes)
            a1, p1, w1 = _look_up(a1, p1, w1, table, codes)
            a2, p2, w2 = _look_up(a2, p2, w2, table, codes)
            a3, p3, w3 = _look_up(a3, p3, w3, table, codes)
    _decode_rest(stream, p0, w0, e0, table, codes)
    _decode_rest(stream, p1, w1, e1, table, codes)
    _decode_rest(stream, p2, w2, e2, table, codes)
    _decode_rest(stream, p3, w3, e3, table, codes)
    return n_run


@jit
def _decode_rest(stream: U8, p: Scalar, w: Scalar, end: Scalar, table: U64, codes: U8) -> None:
    while w < end:
        a = _peek(stream, p)
        for _ in range(LOOKUPS):
            a, p, w = _look_up(a, p, w, table, codes)


@jit
def _peek(stream: U8, p: Scalar) -> Scalar:
    """The bits from bit p on, 57 at least."""
    return load_word(stream, p >> BYTE_BITS) >> (p & BIT_IN_BYTE)


@jit
def _look_up(a: Scalar, p: Scalar, w: Scalar, table: U64, codes: U8) -> tuple[Scalar, Scalar, Scalar]:
    """The bits a from bit p on, decoded to codes[w:] as far as one entry goes: the next a, p and w."""
    entry = get(table, a & INDEX)
    store_word(codes, w, entry)
    length = entry >> LENGTH_SHIFT & LENGTH_MASK
    return a >> length, p + length, w + (entry >> NUMBER_SHIFT)


@jit
def _total(bits: U16, start: int, n: int) -> Scalar:
    total = np.int64(0)
    for i in range(n):
        total += np.int64(get(bits, start + i))
    return total


@intrinsic
def load_word(context: Any, array: Any, index: Any) -> Any:
    """Bytes index..index + 8 of a flat uint8 array as a uint64, the first byte lowest."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit.load(builder, emit.I64, emit.address(context, builder, array, args))

    return types.uint64(array, types.uint64), build


@intrinsic
def store_word(context: Any, array: Any, index: Any, word: Any) -> Any:
    """Writes a uint64 to bytes index..index + 8 of a flat uint8 array, the lowest byte first."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit.store(builder, args[2], emit.address(context, builder, array, args))
        return context.get_dummy_value()

    return types.none(array, types.uint64, types.uint64), build
