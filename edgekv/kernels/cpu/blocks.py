"""Blocks of 256 weights of GGUF files, decoded a few outputs at a time into what products of `gemm` read.

A type is a function that writes a block's codes and returns its scales and offsets, one for each GROUP weights: a
weight is scale * code + offset, or without offsets scale * (code - 128). Sources: llama.cpp's
ggml/src/ggml-common.h (blocks, grid) and ggml-quants.c (dequantize_row_...).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.emit import Value
from edgekv.kernels.cpu.gemm import BYTE_CODES, VECTOR
from edgekv.kernels.cpu.loops import Loop, address_of, exact_loop
from edgekv.kernels.cpu.scalar import widen
from edgekv.kernels.weight_codes import code_of_zero
from edgekv.types import F32, U8

BLOCK_WEIGHTS, GROUP, CODE_OF_ZERO = 256, BYTE_CODES.block, code_of_zero(BYTE_CODES.bits)
GROUPS = BLOCK_WEIGHTS // GROUP
Scales = tuple[Value, Value | None]
"""Vectors of a block's scales and offsets (GROUPS,) float32; None: all 0."""


class BlockType(NamedTuple):
    """A type of blocks: bits of a code, bytes of a block, whether it has offsets.

    loop(blocks, n, codes, scales, offsets): decodes n blocks to codes (n, BLOCK_WEIGHTS) uint8, scales and, where
    the type has them, offsets (n, GROUPS) float32.
    """

    bits: int
    n_bytes: int
    has_offsets: bool
    loop: Loop

    def decode(self, blocks: U8) -> tuple[U8, F32, F32 | None]:
        """Returns codes (rows, columns), scales (rows, groups) and offsets of blocks (rows, bytes)."""
        blocks = np.ascontiguousarray(blocks)
        rows, n = len(blocks), blocks.size // self.n_bytes
        codes = np.empty((rows, n // rows * BLOCK_WEIGHTS), np.uint8)
        scales, offsets = np.empty((2, rows, n // rows * GROUPS), np.float32)
        self.loop.call(address_of(blocks), n, *(address_of(array) for array in (codes, scales, offsets)))
        return codes, scales, offsets if self.has_offsets else None

    def weights(self, blocks: U8) -> F32:
        """Returns the weights (rows, columns) float32 of blocks (rows, bytes)."""
        codes, scales, offsets = self.decode(blocks)
        values: F32 = codes.astype(np.float32).reshape(*scales.shape, GROUP)
        values -= np.float32(0 if self.has_offsets else CODE_OF_ZERO)
        values *= scales[..., None]
        if offsets is not None:
            values += offsets[..., None]
        return values.reshape(codes.shape)


BLOCKS: dict[str, BlockType] = {}
"""The types by their names in GGUF."""


def _block_type(bits: int, n_bytes: int, has_offsets: bool = False) -> Callable[..., Any]:
    """Adds a type; what it decorates is (builder, address of a block, of its codes) -> scales and offsets."""

    def add(write: Callable[[Any, Value, Value], Scales]) -> Callable[[Any, Value, Value], Scales]:
        def blocks(b: Any, blocks: Value, n: Value, codes: Value, scales: Value, offsets: Value) -> None:
            with emit.loop(b, 0, n, 1) as loop:
                results = write(
                    b, emit.at(b, blocks, (loop.i, n_bytes)), emit.at(b, codes, (loop.i, BLOCK_WEIGHTS))
                )
                for result, target in zip(results, (scales, offsets), strict=True):
                    if result is not None:
                        emit.store(b, result, emit.at(b, target, (loop.i, 4 * GROUPS)))

        blocks.__name__ = write.__name__
        decode_blocks = emit.procedure(blocks)

        def decode(blocks: int, n: int, codes: int, scales: int, offsets: int) -> None:
            decode_blocks(blocks, n, codes, scales, offsets)

        BLOCKS[write.__name__.upper()] = BlockType(bits, n_bytes, has_offsets, exact_loop(decode))
        return write

    return add


def _bytes(b: Any, start: Value, offset: int, n: int) -> Value:
    return emit.load(b, emit.vector(emit.I8, n), start, offset)


def _bits(b: Any, x: Value, shift: int | Sequence[int], n_bits: int, to: int = 0) -> Value:
    """Returns n_bits of each byte from bit ``shift`` on, at bit ``to``."""
    shifts = [shift] * x.type.count if isinstance(shift, int) else list(shift)
    x = b.and_(b.lshr(x, ir.Constant(x.type, shifts)), emit.constant(x.type, (1 << n_bits) - 1))
    return b.shl(x, emit.constant(x.type, to)) if to else x


def _plus(b: Any, x: Value, number: int) -> Value:
    return b.add(x, emit.constant(x.type, number))


def _scaled(b: Any, block: Value, offset: int, levels: Value, negative: bool = False) -> Value:
    """Returns signed bytes (GROUPS,), or half as many, each for two groups, times the block's half float."""
    levels = emit.shuffle(b, levels, [i * levels.type.count // GROUPS for i in range(GROUPS)])
    half = widen(b, emit.load(b, emit.I16, block, offset))
    numbers = b.sitofp(b.sext(levels, emit.vector(emit.I32, GROUPS)), emit.vector(emit.F32, GROUPS))
    return b.fmul(emit.splat(b, b.fneg(half) if negative else half, GROUPS), numbers)


@_block_type(2, 84, has_offsets=True)
def q2_k(b: Any, block: Value, codes: Value) -> Scales:
    """Nibbles of 16 scales and 16 minima, 64 bytes of 2 bits, two half floats."""
    for i in range(8):
        two = _bits(b, _bytes(b, block, 16 + 32 * (i // 4), 32), i % 4 * 2, 2)
        emit.store(b, two, codes, 32 * i)
    both = _bytes(b, block, 0, 16)
    return _scaled(b, block, 80, _bits(b, both, 0, 4)), _scaled(b, block, 82, _bits(b, both, 4, 4), negative=True)


@_block_type(3, 110)
def q3_k(b: Any, block: Value, codes: Value) -> Scales:
    """32 bytes of third bits, 64 of 2 bits, 16 scales: 8 bytes of nibbles, 4 of upper 2 bits; a half float."""
    for i in range(8):
        two = _bits(b, _bytes(b, block, 32 + 32 * (i // 4), 32), i % 4 * 2, 2)
        third = _bits(b, _bytes(b, block, 0, 32), i, 1, to=2)
        emit.store(b, _plus(b, b.or_(two, third), CODE_OF_ZERO - 4), codes, 32 * i)
    low = _bits(b, emit.shuffle(b, _bytes(b, block, 96, 8), [*range(8)] * 2), [0] * 8 + [4] * 8, 4)
    shifts = [i // 4 * 2 for i in range(16)]
    high = _bits(b, emit.shuffle(b, _bytes(b, block, 104, 4), [*range(4)] * 4), shifts, 2, to=4)
    return _scaled(b, block, 108, _plus(b, b.or_(low, high), -32)), None


@_block_type(5, 176, has_offsets=True)
def q5_k(b: Any, block: Value, codes: Value) -> Scales:
    """Two half floats, 8 scales and minima of 6 bits in 12 bytes, 32 bytes of fifth bits, 128 of nibbles."""
    for i in range(8):
        four = _bits(b, _bytes(b, block, 48 + 32 * (i // 2), 32), i % 2 * 4, 4)
        fifth = _bits(b, _bytes(b, block, 16, 32), i, 1, to=4)
        emit.store(b, b.or_(four, fifth), codes, 32 * i)
    first, second, third = (_bytes(b, block, offset, 4) for offset in (4, 8, 12))
    scales, minima = (
        emit.concatenate(b, _bits(b, six, 0, 6), b.or_(_bits(b, third, shift, 4), _bits(b, six, 6, 2, to=4)))
        for six, shift in ((first, 0), (second, 4))
    )
    return _scaled(b, block, 0, scales), _scaled(b, block, 2, minima, negative=True)


@_block_type(6, 210)
def q6_k(b: Any, block: Value, codes: Value) -> Scales:
    """128 bytes of nibbles, 64 bytes of upper 2 bits, 16 scales of a byte, a half float."""
    for i in range(8):
        half, part = divmod(i, 4)
        four = _bits(b, _bytes(b, block, 64 * half + 32 * (part % 2), 32), part // 2 * 4, 4)
        two = _bits(b, _bytes(b, block, 128 + 32 * half, 32), 2 * part, 2, to=4)
        emit.store(b, _plus(b, b.or_(four, two), CODE_OF_ZERO - 32), codes, 32 * i)
    return _scaled(b, block, 208, _bytes(b, block, 192, 16)), None


IQ4_LEVELS = -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113


@_block_type(4, 136)
def iq4_xs(b: Any, block: Value, codes: Value) -> Scales:
    """A half float, upper 2 bits of 8 scales, their nibbles, 8 times 16 bytes of nibbles: indices of levels."""
    levels = ir.Constant(emit.vector(emit.I8, 16), [(level + CODE_OF_ZERO) & 255 for level in IQ4_LEVELS])
    half = VECTOR // 2
    order = [
        i for start in range(0, half, 16) for side in (0, half) for i in range(side + start, side + start + 16)
    ]
    for i in range(0, BLOCK_WEIGHTS // 2, half):
        both = _bytes(b, block, 8 + i, half)
        index = emit.shuffle(b, _bits(b, both, 0, 4), order, _bits(b, both, 4, 4))
        emit.store(b, emit.look_up(b, levels, index), codes, 2 * i)
    low = _bits(b, emit.shuffle(b, _bytes(b, block, 4, 4), [i // 2 for i in range(8)]), [0, 4] * 4, 4)
    high = _bits(b, emit.shuffle(b, _bytes(b, block, 2, 2), [i // 4 for i in range(8)]), [0, 2, 4, 6] * 2, 2, to=4)
    return _scaled(b, block, 0, _plus(b, b.or_(low, high), -32)), None


IQ3_GAPS = (
    "$$$&%$$$%%%$')(%&%%%(%*&&$$$%'$'&&'%'*0'()$'%$&&&'&')&%%%0&+)'&%*%&)'%0%'&.'%&))&)2-%/%'()'%2(.&%142*%%"
    "/%'(0'7$$%'$%%%$%*&%1%&,)$%&%'(*&)*%1)%-&%$'))&-&-*&&$&))$'(4).%(%0%*'%'8*&)*%2J'&0%>%(%*/'4)+$%%%$%%%&"
    "%'$%*%%&%0$&%&%)&'&&'&)*;&&-%(*%-'-&'%&',%(%*)1.),&*&'<&*(,0$.0+%(-?'7'0%.(=*%%%&*%%(%&%-)+%%*(%03-'%-)"
    "-%/<*'(%'$,%')1+)('*4)'0*%.(--066C%0%.F'))'&&**3-(%%*)())'7%(('-(2&)/(%(%*'F%5.$</%-D<47;(..)<)')1'&&/)"
    "(%%(*,C),-()0:($20(/))&/-/G/6%ZC%1Z%%/%833*@95).()+/(2X121&<78>L%X'&,%/%/)3*.2%?&')&*4<;&19')(;M3C:J"
)
"""The grid of IQ3_S: 512 ascending numbers of four times 3 bits, stored as gaps, a gap as chr(35 + gap); the
number before the first is -1. Three bits k stand for 2 k + 1."""
IQ3_GRID = [
    sum((2 * (number >> 3 * i & 7) + 1) << 8 * i for i in range(4))
    for number in itertools.accumulate((ord(gap) - 35 for gap in IQ3_GAPS), initial=-1)
][1:]


@_block_type(3, 110)
def iq3_s(b: Any, block: Value, codes: Value) -> Scales:
    """A half float, 64 bytes of indices of the grid, 8 of their ninth bits, 32 of signs, 4 of scales."""
    kind = ir.ArrayType(emit.I32, len(IQ3_GRID))
    grid = b.ptrtoint(cgutils.global_constant(b.module, "iq3_grid", ir.Constant(kind, IQ3_GRID)), emit.I64)
    with emit.loop(b, 0, 8, 1) as loop:
        low, ninths = emit.at(b, block, 2, (loop.i, 8)), emit.load(b, emit.I8, emit.at(b, block, loop.i), 66)
        fours = []
        for i in range(8):
            ninth = b.and_(b.shl(b.zext(ninths, emit.I64), emit.I64(8 - i)), emit.I64(256))
            index = b.or_(b.zext(emit.load(b, emit.I8, low, i), emit.I64), ninth)
            fours.append(emit.load(b, emit.I32, emit.at(b, grid, (index, 4))))
        sizes = b.bitcast(emit.build_vector(b, fours), emit.vector(emit.I8, 32))
        signs = emit.shuffle(b, _bytes(b, emit.at(b, block, (loop.i, 4)), 74, 4), [i // 8 for i in range(32)])
        signs = b.and_(signs, ir.Constant(signs.type, [1 << i for i in range(8)] * 4))
        is_negative = b.icmp_signed("!=", signs, emit.constant(signs.type, 0))
        zeros = emit.constant(sizes.type, CODE_OF_ZERO)
        code = b.select(is_negative, b.sub(zeros, sizes), b.add(zeros, sizes))
        emit.store(b, code, emit.at(b, codes, (loop.i, 32)))
    four = _bits(b, emit.shuffle(b, _bytes(b, block, 106, 4), [i // 2 for i in range(8)]), [0, 4] * 4, 4, to=1)
    return _scaled(b, block, 0, _plus(b, four, 1)), None
