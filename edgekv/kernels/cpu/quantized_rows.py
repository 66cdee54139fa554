"""Rows of activations rounded to bytes, in the order in which vectors of packed weights are unpacked.

A block of elements gets a scale, max|x| / 127, or NaN where one of them is infinite or NaN. `product_rows` says
what records are made of.
"""

import functools
from typing import Any

import numpy as np
from numba import types

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.emit import Value
from edgekv.kernels.cpu.jit import Scalar, fast_jit, intrinsic
from edgekv.kernels.cpu.product_rows import (
    VECTOR,
    CodeLayout,
    Product,
    before_sums,
    block_size,
    blocks_of_unit,
    fields,
    layout_of,
)
from edgekv.kernels.cpu.rounding import ROUND

TOP = 127
LEAST = np.float32(1e-30)  # of max|x|: all elements are 0 below it
NO_SIGN, INFINITE = 0x7FFFFFFF, 0x7F800000  # numbers without signs are in the order of their bits, NaN behind all
EXACT = ("nsz",)


@fast_jit
def prepare_rows(first: int, last: int, p: Product) -> None:
    """Rows first..last of x into records, padded with zeros."""
    block = block_size(p)
    for m in range(first, last):
        row, target, tail = p.x + 4 * m * p.columns, p.records + m * p.gap, p.records + p.n * p.gap + 4 * block * m
        n_whole = p.columns // block
        for b in range(n_whole):
            _quantize_block(p, row + 4 * b * block, target, b)
        n_left = p.columns - n_whole * block
        for b in range(n_whole, whole_units(p)):
            copy_block(row + 4 * b * block, n_left, tail, block)
            _quantize_block(p, tail, target, b)
            n_left = 0


@fast_jit
def whole_units(p: Product) -> Scalar:
    """Blocks of a row, and those that its last unit lacks."""
    n = blocks_of_unit(p)
    return (p.blocks + n - 1) // n * n


@intrinsic
def copy_block(context: Any, x: Any, n: Any, y: Any, size: Any) -> Any:
    """y (size,) float32 = the n numbers x, then zeros."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, n, y, size = args
        four = emit.I64(4)
        with emit.loop(b, emit.I64(0), n, 1) as turn:
            at = b.mul(turn.i, four)
            emit.store(b, emit.load(b, emit.F32, b.add(x, at)), b.add(y, at))
        with emit.loop(b, n, size, 1) as turn:
            emit.store(b, emit.F32(0.0), b.add(y, b.mul(turn.i, four)))
        return context.get_dummy_value()

    return types.none(*[types.intp] * 4), build


@intrinsic
def _quantize_block(context: Any, product: Any, x: Any, row: Any, block: Any) -> Any:
    """Block ``block`` of a row, x (block size,) float32, into the row's records."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        layout, (p, x, row, block) = layout_of(product), args
        block_sum = b.add(b.add(row, before_sums(b, p)), b.mul(block, emit.I64(4)))
        is_panel = b.icmp_signed("!=", *fields(b, p, "is_panel"), emit.I64(0))
        with b.if_else(is_panel) as cases:
            for panel, case in zip((True, False), cases, strict=True):
                with case:
                    write = functools.partial(_emit_quantized_block, layout, panel)
                    emit.call_own(b, f"quantize_{'panel' if panel else 'rows'}", write, x, row, block, block_sum)
        return context.get_dummy_value()

    return types.none(product, *[types.intp] * 3), build


def _emit_quantized_block(
    layout: CodeLayout, panel: bool, b: Any, x: Value, row: Value, block: Value, block_sum: Value
) -> None:
    """block_sum: where the sum of the block's elements goes, if the format has shifts."""
    n = layout.block
    floats, ints = emit.vector(emit.F32, n), emit.vector(emit.I32, n)
    elements = emit.load(b, floats, x)
    sizes = b.and_(b.bitcast(elements, ints), emit.constant(ints, NO_SIGN))
    top = emit.call(b, f"llvm.vector.reduce.smax.v{n}i32", emit.I32, sizes)
    peak, is_finite = b.bitcast(top, emit.F32), b.icmp_signed("<", top, emit.I32(INFINITE))
    is_nothing = b.icmp_signed("<", top, emit.I32(int(LEAST.view(np.int32))))
    factor = b.select(is_nothing, emit.F32(0.0), b.fdiv(emit.F32(float(TOP)), peak))
    scale = b.select(is_nothing, emit.F32(0.0), b.fmul(peak, emit.F32(float(np.float32(1 / TOP)))))
    scale = b.select(is_finite, scale, emit.F32(float("nan")))
    # Not fused: a fused one would round other halves than processors without it.
    shifted = b.fadd(
        b.fmul(elements, emit.splat(b, factor, n), flags=EXACT), emit.constant(floats, ROUND), flags=EXACT
    )
    rounded = b.sub(b.bitcast(shifted, ints), emit.constant(ints, int(ROUND.view(np.int32))))
    unit = b.sdiv(block, emit.I64(layout.blocks))
    run = layout.block_bytes // layout.vectors  # bytes of codes of the block in a vector
    inside = b.mul(b.srem(block, emit.I64(layout.blocks)), emit.I64(run))
    record = b.add(b.add(row, b.mul(unit, emit.I64(layout.record))), inside)
    sums = emit.constant(emit.vector(emit.I32, run // 4), 0)
    for v in range(layout.vectors):
        for part in range(layout.parts):
            start = v * run * layout.parts + part
            some = emit.lanes(b, rounded, range(start, start + run * layout.parts, layout.parts))
            emit.store(b, b.trunc(some, emit.vector(emit.I8, run)), record, (v * layout.parts + part) * VECTOR)
            for i in range(0 if panel else 4):
                sums = b.add(sums, emit.lanes(b, some, range(i, run, 4)))
    if panel or layout.can_shift:
        total = emit.total(b, rounded if panel else sums)
    if panel:
        sums = emit.splat(b, total, run // 4)
    if layout.can_shift:
        emit.store(b, b.fmul(b.sitofp(total, emit.F32), scale), block_sum)
    minus_zero_point = emit.constant(sums.type, -layout.zero_point)
    emit.store(b, b.mul(sums, minus_zero_point), record, layout.sums_at)
    emit.store(b, emit.splat(b, scale, run // 4), record, layout.scales_at)
