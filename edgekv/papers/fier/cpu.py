"""Scores of FIER's index on the CPU: a bit per key element, two levels per channel and group of tokens."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import Scalar, fast_jit, intrinsic
from edgekv.kernels.cpu.loops import CpuCodec, address_of, floats, halves, int64s, score_loop
from edgekv.kernels.cpu.scalar import as_float, get, put
from edgekv.kernels.interface import BLOCK
from edgekv.types import F32, U16

LANES = emit.LANES
VECTOR = emit.vector(emit.F32, LANES)
CHAINS = 4  # independent sums: none waits for another
WORD_TOKENS, WORD_BYTES = 32, 4
PREFETCH_DISTANCE = 2048  # levels, float16
LINE_LEVELS = 32  # levels in a cache line
ZERO, HALF, TWO = np.array([0, 0.5, 2], np.float32)


@score_loop
def _score(args: int, q: int, rows: int, g: int, t: int, n: int, s: int, stride: int, scratch: int) -> None:
    """Scores tokens of whole groups: t and n are multiples of the group."""
    x = int64s(args)
    head_dim, n_groups, group = get(x, 0), get(x, 1), get(x, 2)
    signs, levels, queries = get(x, 3), halves(get(x, 4)), floats(q)
    per_group = group // WORD_TOKENS
    for b in range(t // group, (t + n) // group):
        level, word = (g * n_groups + b) * 2 * head_dim, (g * n_groups + b) * per_group * head_dim
        for d in range(0, 2 * head_dim, LINE_LEVELS):
            emit.prefetch_element(levels, level + PREFETCH_DISTANCE + d)
        for m in range(rows):
            base = _fold(queries, m * head_dim, levels, level, head_dim, floats(scratch))
            for w in range(per_group):
                column = m * stride + b * group - t + w * WORD_TOKENS
                bits = signs + WORD_BYTES * (word + w * head_dim)
                _score_word(bits, scratch, head_dim, base, s + 4 * column)


@fast_jit
def _fold(q: F32, query: int, levels: U16, level: int, head_dim: int, weights: F32) -> Scalar:
    """Fills weights (head_dim,), what a channel's upper level adds to a score; returns all lower levels' score."""
    base = ZERO
    for d in range(head_dim):
        x = get(q, query + d)
        up = TWO * x * as_float(get(levels, level + head_dim + d))
        put(weights, d, up)
        base += x * as_float(get(levels, level + d)) - HALF * up
    return base


@intrinsic
def _score_word(context: Any, signs: Any, weights: Any, head_dim: Any, base: Any, s: Any) -> Any:
    """Sets s (32,) = base + the sum of the weights of the channels whose bit is set, for each token."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        signs, weights, head_dim, base, s = args
        parts = range(WORD_TOKENS // LANES)
        start, done = [emit.splat(b, base, LANES)] * len(parts), emit.I64(0)
        sums = [*start, *[emit.constant(VECTOR, 0)] * ((CHAINS - 1) * len(parts))]
        for n_channels in (CHAINS, 1):
            with emit.loop(b, done, head_dim, n_channels, sums) as loop:
                word = b.add(signs, b.mul(loop.i, emit.I64(WORD_BYTES)))
                weight = b.add(weights, b.mul(loop.i, emit.I64(4)))
                added = []
                for c in range(n_channels):
                    x = emit.splat(b, emit.load(b, emit.F32, weight, 4 * c), LANES)
                    for part in parts:
                        bits = emit.load(b, emit.integer(LANES), word, WORD_BYTES * c + LANES // 8 * part)
                        acc = loop.values[c * len(parts) + part]
                        added.append(b.select(_mask(b, bits), b.fadd(acc, x), acc))
                loop.next = added + loop.values[len(added) :]
            done, sums = loop.i, loop.values
        for part in parts:
            emit.store(b, emit.reduce(b, emit.add, sums[part :: len(parts)]), s, 4 * LANES * part)
        return context.get_dummy_value()

    return types.none(types.intp, types.intp, types.intp, types.float32, types.intp), build


def _mask(b: Any, bits: Any) -> Any:
    """Returns a vector of booleans, a lane for each bit."""
    if LANES == 16:  # AVX-512 has registers for them
        return b.bitcast(bits, emit.vector(emit.integer(1), LANES))
    masks = ir.Constant(emit.vector(emit.I32, LANES), [1 << lane for lane in range(LANES)])
    tested = b.and_(emit.splat(b, b.zext(bits, emit.I32), LANES), masks)
    return b.icmp_unsigned("!=", tested, emit.constant(masks.type, 0))


def _args(index: Any) -> tuple[int, ...]:
    addresses = (address_of(index.arrays[name]) for name in ("signs", "levels"))
    return index.head_dim, index.n_blocks, index.block, *addresses


KERNELS = {
    "sign_index": CpuCodec(
        _args,
        score=_score,
        block=lambda index: max(BLOCK, index.block),
        scratch=lambda index, rows: 4 * index.head_dim,
    )
}
