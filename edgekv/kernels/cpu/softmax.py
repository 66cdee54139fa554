"""Softmax over a range of columns per row, and the running softmax of attention.

Its exponential vectorises; Numba's own is scalar.
"""

from typing import Any

import numpy as np
from numba import types

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import CPU_FEATURES, Scalar, fast_jit, inline_jit, intrinsic
from edgekv.kernels.cpu.launch import RangeKernel, rows_view
from edgekv.kernels.cpu.loops import floats, int64s, load_arguments
from edgekv.kernels.cpu.scalar import ROUND, get, maximum, put
from edgekv.kernels.interface import BLOCK
from edgekv.types import F32, I64

STATE = 3
"""Numbers (float32) of a row's state in the running softmax, in this order:"""
M, L, RESCALE = range(STATE)
"""The largest score m so far, the sum l of exp(score - m), and what earlier sums are to be multiplied by."""
WIDE = emit.vector(emit.F32, 16)
UNROLLED = BLOCK if emit.REGISTER == 16 else WIDE.count  # exponentials at a time: more would not fit the registers
EXP_WORK = 3  # in multiply-adds
EXP_UNDERFLOW = np.float32(-87)  # exp below this is taken as 0
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # Cody and Waite: n * high is exact
# exp(x) = 1 + x + x^2 * (C2 + x * (C3 + ...)), least relative error over |x| <= ln(2) / 2: 1e-7
C2, C3, C4, C5 = np.array([0.49999231, 0.16667114, 0.041890144, 0.0083125187], np.float32)
# 2 ** f = 1 + f * (...), least relative error: 9e-8 over |f| <= 1 / 2, and over 0 <= f <= 1
EXP2_COEFFS = 1.0, 0.693146978, 0.240222421, 0.0555073374, 0.00967151264, 0.00132647271
EXP2_COEFFS_ABOVE = 1.0, 0.693151312, 0.24016445, 0.0557999131, 0.0090170303, 0.00186713008
MIN_EXPONENT = -127.0  # 2 to it has no bits: 0
SCALES, DOWN = {"+avx512f", "+avx512dq"} <= set(CPU_FEATURES.split(",")), 9  # what is left above the whole number
ZERO, HALF, ONE, MINUS_INFINITY = np.array([0, 0.5, 1, -np.inf], np.float32)
EXPONENT_BIAS, EXPONENT_SHIFT = np.int32(127), np.int32(23)


def softmax(s: F32, lo: I64, hi: I64) -> None:
    """Takes the softmax over columns lo[m]..hi[m] of each row of s (G, M, columns); lo, hi (M,)."""
    n_groups, n_rows, n_columns = s.shape
    _softmax_rows(n_groups * n_rows, EXP_WORK * s.size, *rows_view(s), lo, hi, n_rows, n_columns)


@RangeKernel
def _softmax_rows(first: int, last: int, thread: int, arguments: int) -> None:
    address, stride_g, stride_m, lo, hi, n_rows, n_columns = load_arguments(arguments, 7)
    s = floats(address)
    for item in range(first, last):
        g, m = item // n_rows, item % n_rows
        row = g * stride_g + m * stride_m
        start = min(max(get(int64s(lo), m), 0), n_columns)
        end = min(max(get(int64s(hi), m), start), n_columns)
        fill(s, row, row + start, ZERO)
        _softmax_row(s, row + start, row + end)
        fill(s, row + end, row + n_columns, ZERO)


@fast_jit
def _softmax_row(s: F32, start: int, end: int) -> None:
    m = MINUS_INFINITY
    for i in range(end - start):
        m = maximum(m, get(s, start + i))
    if m == MINUS_INFINITY:
        fill(s, start, end, ZERO)
        return
    total = ZERO
    for i in range(end - start):
        weight = exp_of_negative(get(s, start + i) - m)
        put(s, start + i, weight)
        total += weight
    scale = ONE / total
    for i in range(end - start):
        put(s, start + i, get(s, start + i) * scale)


@intrinsic
def online_softmax(context: Any, s: Any, stride: Any, rows: Any, n: Any, state: Any) -> Any:
    """Replaces the first n scores of each row of s, ``stride`` elements apart, by exp(score - m).

    n: a multiple of BLOCK. Raises m in state (rows, STATE) to the largest of them, adds them to l, sets RESCALE.
    A score of -inf gets 0. Returns whether any m was raised.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit.call_internal(builder, "online_softmax", _online_softmax_rows, *args, result=emit.I64)

    return types.intp(*[types.intp] * 5), build


def _online_softmax_rows(b: Any, s: Any, stride: Any, rows: Any, n: Any, state: Any) -> Any:
    nothing, offsets = emit.constant(emit.F32, float(MINUS_INFINITY)), range(0, 4 * BLOCK, 4 * WIDE.count)
    with emit.loop(b, emit.I64(0), rows, 1, [emit.I64(0)]) as row:
        x = b.add(s, b.mul(row.i, b.mul(stride, emit.I64(4))))
        m_at, stop = b.add(state, b.mul(row.i, emit.I64(4 * STATE))), b.add(x, b.mul(n, emit.I64(4)))
        with emit.loop(b, x, stop, 4 * BLOCK, [emit.constant(WIDE, float(MINUS_INFINITY))]) as block:
            scores = [emit.load(b, WIDE, block.i, offset) for offset in offsets]
            block.next = [emit.maximum(b, block.values[0], emit.reduce(b, emit.maximum, scores))]
        largest, before = block.values[0], emit.load(b, emit.F32, m_at)
        raised = _any_above(b, largest, before)
        emit.store(b, emit.constant(emit.F32, 1), m_at, 4 * RESCALE)
        with b.if_then(raised, likely=False):
            top = emit.reduce_max(b, largest)
            rescale = _exp_of_negative(b, b.fsub(before, top))
            emit.store(b, top, m_at)
            emit.store(b, b.fmul(emit.load(b, emit.F32, m_at, 4 * L), rescale), m_at, 4 * L)
            emit.store(b, rescale, m_at, 4 * RESCALE)
        m = emit.load(b, emit.F32, m_at)
        m = b.select(b.fcmp_ordered("==", m, nothing), emit.constant(emit.F32, 0), m)
        ms = emit.splat(b, m, WIDE.count)
        with emit.loop(b, x, stop, 4 * UNROLLED, [emit.constant(WIDE, 0)]) as block:
            for offset in range(0, 4 * UNROLLED, 4 * WIDE.count):
                weight = _exp_of_negative(b, b.fsub(emit.load(b, WIDE, block.i, offset), ms))
                emit.store(b, weight, block.i, offset)
                block.next = [b.fadd(block.next[0], weight)]
        total = b.fadd(emit.load(b, emit.F32, m_at, 4 * L), emit.reduce_sum(b, block.values[0]))
        emit.store(b, total, m_at, 4 * L)
        row.next = [b.or_(row.values[0], b.zext(raised, emit.I64))]
    return row.values[0]


def _any_above(b: Any, x: Any, limit: Any) -> Any:
    """Returns whether any lane of x is above the number ``limit``."""
    if emit.REGISTER != 16:
        return b.fcmp_ordered(">", emit.reduce_max(b, x), limit)
    above = b.fcmp_ordered(">", x, emit.splat(b, limit, x.type.count))  # AVX-512 has registers for them
    mask = emit.integer(x.type.count)
    return b.icmp_unsigned("!=", b.bitcast(above, mask), mask(0))


def _exp_of_negative(b: Any, x: Any) -> Any:
    """Returns `exp_of_negative` of a number, or of each lane of a vector."""
    kind, whole = x.type, emit.like(x, emit.I32)
    y = b.fmul(x, emit.constant(kind, float(LOG2_E)))
    if SCALES and kind == WIDE:
        f = _in_lanes(b, "reduce", y, emit.I32(DOWN))
        return _in_lanes(b, "scalef", _exp2(b, f, EXP2_COEFFS_ABOVE), y)
    y = emit.maximum(b, y, emit.constant(kind, MIN_EXPONENT))
    rounded = b.fadd(y, emit.constant(kind, ROUND), flags=emit.CONTRACT)
    f = emit.subtract(b, y, emit.subtract(b, rounded, emit.constant(kind, ROUND)))
    exponent = b.shl(b.bitcast(rounded, whole), emit.constant(whole, int(EXPONENT_SHIFT)))  # ROUND's bits leave
    return b.bitcast(b.add(b.bitcast(_exp2(b, f, EXP2_COEFFS), whole), exponent), kind)


def _exp2(b: Any, f: Any, coeffs: tuple[float, ...]) -> Any:
    """Returns 2 ** f."""
    result = emit.constant(f.type, coeffs[-1])
    for c in coeffs[-2::-1]:
        result = emit.multiply_add(b, result, f, emit.constant(f.type, c))
    return result


def _in_lanes(b: Any, name: str, x: Any, y: Any) -> Any:
    """Returns an operation of AVX-512 on all lanes, in the current rounding mode."""
    mask, mode = emit.integer(WIDE.count)(-1), emit.I32(4)
    return emit.call(b, f"llvm.x86.avx512.mask.{name}.ps.512", WIDE, x, y, x, mask, mode)


@fast_jit
def exp_of_negative(x: Scalar) -> Scalar:
    """Returns exp(x) for x <= 0 with a relative error of 2e-7, and 0 below EXP_UNDERFLOW."""
    clipped = maximum(x, EXP_UNDERFLOW)
    exponent = np.int32(clipped * LOG2_E - HALF)  # truncation rounds, as the argument is negative
    n = np.float32(exponent)
    f = clipped - n * LN2_HIGH - n * LN2_LOW
    mantissa = ONE + f + f * f * (C2 + f * (C3 + f * (C4 + f * C5)))
    power = np.int32((exponent + EXPONENT_BIAS) << EXPONENT_SHIFT).view(np.float32)
    return mantissa * power if x > EXP_UNDERFLOW else ZERO


@inline_jit
def sigmoid(x: Scalar) -> Scalar:
    """Returns 1 / (1 + exp(-x))."""
    small = exp_of_negative(-abs(x))
    return (ONE if x >= ZERO else small) / (ONE + small)


@fast_jit
def fill(s: F32, start: int, end: int, x: Scalar) -> None:
    """Sets s[start:end], (end - start,), to x."""
    for i in range(end - start):
        put(s, start + i, x)
