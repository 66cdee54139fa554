"""Scores of keys in planes on a CPU: a query row against blocks of 64 tokens, in LLVM code.

`edgekv.codecs.planes` draws a block and defines its words: run, group, column, plane, centre. The score of row m
with token t of run r, `CentredPlanes.scores` in NumPy, is

    s[m, t] = q[m] . (centres[0] + centres[1 + r]) + factor[m] * scale[t] * sum over planes p and channels c of
              2 ** (bits - 1 - p) * (+- rounded[m, c], by the sign bit of c in plane p)

Centres (`_emit_centre_scores`): q is taken in integers of two bytes. x86 multiplies pairs of 16 bits, to which the
codes are widened; Arm multiplies bytes in dot products, a query's high and low bytes apart.

Planes (`_emit_plane_sums`): for each four channels of the rounded query a table has the 16 signed sums that four
sign bits can choose, as bytes. A vector of bytes holds a column of as many groups as it has room for, a byte for
each token. One shuffle within 16 bytes looks up the lower four bits of all its tokens, another one the upper four.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from edgekv.codecs.planes import GROUP, MAX_FOUR_SUM, N_CENTRES, N_GROUPS, N_RUNS, RUN
from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import Scalar, fast_jit, intrinsic, jit
from edgekv.kernels.cpu.emit import Value, at
from edgekv.kernels.cpu.loops import (
    TOKENS_PER_CALL,
    CpuCodec,
    address_of,
    chars,
    floats,
    int64s,
    prepare_loop,
    score_loop,
)
from edgekv.kernels.cpu.rope import rotate_row, rotation_args
from edgekv.kernels.cpu.scalar import get, maximum, pointer_to, put, round_to_even, widen
from edgekv.kernels.interface import BLOCK
from edgekv.types import F32, U8

ROW_COUNTS = 4, 2, 1  # rows that are scored together: fours while there are, then a pair, then one
PREFETCH_BLOCKS = 4  # whose planes, scales and centres are fetched
N = emit.REGISTER  # int32 or float32 of a register


class Queries(NamedTuple):
    """Prepared query rows inside a kernel: addresses of what `_prepare` has stored, and the channels of a row."""

    tables: Value  # uint8 (rows, 4 * width): of each 4 channels the 16 signed sums, see `_put_tables`
    integers: Value  # (rows, width) in two bytes, see `_in_two_bytes`
    sizes: Value  # float32 (rows, 2): what an integer of 1 stands for, and the sum of the integers
    factors: Value  # float32 (rows,): what a plane sum of 1 stands for, before a token's scale
    width: Value

    def row(self, b: Any, m: Value | int) -> Queries:
        """Returns the rows from row m on."""
        return Queries(
            at(b, self.tables, (m, 4, self.width)),
            at(b, self.integers, (m, 2, self.width)),
            at(b, self.sizes, (m, 8)),
            at(b, self.factors, (m, 4)),
            self.width,
        )


class Keys(NamedTuple):
    """Blocks of keys inside a kernel: addresses of the first one's arrays, bits of a key, how many there are."""

    planes: Value
    bits: Value
    scale: Value
    centres: Value
    steps: Value
    n_blocks: Value

    def blocks(self, b: Any, width: Value, first: Value, n_blocks: Value) -> Keys:
        """Returns ``n_blocks`` blocks from block ``first`` on."""
        return Keys(
            at(b, self.planes, (first, self.bits, width, BLOCK // 8)),
            self.bits,
            at(b, self.scale, (first, 2 * BLOCK)),
            at(b, self.centres, (first, N_CENTRES, b.lshr(width, emit.I64(1)))),
            at(b, self.steps, (first, 2 * N_CENTRES)),
            n_blocks,
        )


# Scores of centres.

PAIRS = 4 if N == 16 else 2  # of a row and a block, whose products with centres are finished together
CENTRE_ROWS = {1: 1, 2: 2, 4: PAIRS}  # of a pass, by the rows that are scored together, and
CENTRE_BLOCKS = {n_rows: PAIRS // n for n_rows, n in CENTRE_ROWS.items()}  # blocks
BYTE_PRODUCTS = emit.IS_ARM
CODE_BYTES = 4 * N if BYTE_PRODUCTS else 2 * N  # of a centre, that are multiplied at once
MAX_CODE, MIDDLE_CODE = 15, 7.5
INTS, CODES, WORDS = emit.vector(emit.I32, N), emit.vector(emit.I8, CODE_BYTES), emit.vector(emit.I16, 2 * N)
# The scratch of a pass: the results, float32 (rows, blocks, N_RUNS); then of each pair int32 sums of the products
# with the runs' centres, in fours of lanes, those with the block's centre, and float32 steps, the block's last.
RESULT_BYTES, BLOCK_SUMS_AT, STEPS_AT, PAIR_BYTES = 64, 4 * N, 8 * N, 8 * N + 64
CENTRE_SCRATCH = RESULT_BYTES + PAIRS * PAIR_BYTES


def _emit_centre_scores(n_rows: int, b: Any, queries: Queries, keys: Keys, scratch: Value) -> None:
    """scratch[row, block, r] float32 = q . (centres[0] + centres[1 + r]), of n_rows rows and the blocks of a pass.

    q = size * integers and centre = step * (codes - 7.5) make
    q . centre = size * step * (integers . codes - 7.5 * sum(integers)).
    """
    n_blocks = PAIRS // n_rows
    half, rows = b.lshr(queries.width, emit.I64(1)), [queries.row(b, m) for m in range(n_rows)]
    with emit.loop(b, 0, keys.n_blocks, 1) as block:
        codes, steps = at(b, keys.centres, (block.i, N_CENTRES, half)), at(b, keys.steps, (block.i, 2 * N_CENTRES))
        ahead = at(b, codes, (PREFETCH_BLOCKS, N_CENTRES, half))
        with emit.loop(b, ahead, at(b, ahead, (N_CENTRES, half)), emit.LINE // 2) as line:
            emit.prefetch(b, line.i, 1)
        dots = _emit_centre_dots(b, [row.integers for row in rows], queries.width, half, codes)
        run_steps = widen(b, emit.load(b, emit.vector(emit.I16, N_RUNS), steps, 2))
        block_step = widen(b, emit.load(b, emit.I16, steps))
        for m, (of_block, *of_runs) in enumerate(dots):
            pair = at(b, scratch, RESULT_BYTES + PAIR_BYTES * m * n_blocks, (block.i, PAIR_BYTES))
            emit.store(b, emit.reduce_fours(b, emit.add, of_runs), pair)
            emit.store(b, of_block, pair, BLOCK_SUMS_AT)
            emit.store(b, run_steps, pair, STEPS_AT)
            emit.store(b, block_step, pair, STEPS_AT + 4 * N_RUNS)
    pairs = [at(b, scratch, RESULT_BYTES + PAIR_BYTES * i) for i in range(PAIRS)]
    sums = [emit.load(b, INTS, pair, BLOCK_SUMS_AT) for pair in pairs]
    block_dots = emit.shuffle(b, emit.reduce_lanes(b, emit.add, (sums * 2)[:4]), range(PAIRS))
    block_dots = b.sitofp(block_dots, emit.vector(emit.F32, PAIRS))
    run_dots = _all_lanes_in_fours(b, [emit.load(b, INTS, pair) for pair in pairs])
    run_dots = b.sitofp(run_dots, emit.vector(emit.F32, N_RUNS * PAIRS))
    sizes, totals = (
        emit.build_vector(b, [emit.load(b, emit.F32, row.sizes, i) for row in rows for _ in range(n_blocks)])
        for i in (0, 4)
    )
    middles = b.fmul(totals, emit.constant(totals.type, MIDDLE_CODE))
    block_steps = emit.build_vector(b, [emit.load(b, emit.F32, pair, STEPS_AT + 4 * N_RUNS) for pair in pairs])
    of_block = b.fmul(block_steps, b.fsub(block_dots, middles))
    four = emit.vector(emit.F32, N_RUNS)
    run_steps = emit.reduce(b, emit.concatenate, [emit.load(b, four, pair, STEPS_AT) for pair in pairs])
    every_run = [pair for pair in range(PAIRS) for _ in range(N_RUNS)]
    sizes, middles, of_block = (emit.shuffle(b, x, every_run) for x in (sizes, middles, of_block))
    scores = emit.multiply_add(b, run_steps, b.fsub(run_dots, middles), of_block)
    emit.store(b, b.fmul(sizes, scores), scratch)


def _emit_centre_dots(b: Any, rows: Sequence[Value], width: Value, half: Value, codes: Value) -> list[list[Value]]:
    """Returns [row][centre]: int32 vectors whose lanes add up to integers . codes.

    rows: of each the address of its integers; codes (N_CENTRES, width / 2) bytes: the block's centres.
    """
    n_parts = 2 if BYTE_PRODUCTS else 1  # high and low bytes have sums of their own
    zeros = [emit.constant(INTS, 0)] * (n_parts * len(rows) * N_CENTRES)
    with emit.loop(b, 0, half, CODE_BYTES, zeros) as loop:
        factors = [_load_integers(b, row, loop.i, width, half) for row in rows]
        sums = list(loop.values)
        for centre in range(N_CENTRES):
            low, high = _codes_of_centre(b, emit.load(b, CODES, at(b, codes, loop.i, (half, centre))))
            for m, row in enumerate(factors):
                for part, (of_low, of_high) in enumerate(row):
                    i = (part * len(rows) + m) * N_CENTRES + centre
                    sums[i] = _add_code_products(b, high, of_high, _add_code_products(b, low, of_low, sums[i]))
        loop.next = sums
    sums = loop.values
    if BYTE_PRODUCTS:
        eight = emit.constant(INTS, 8)
        both = zip(sums[: len(sums) // 2], sums[len(sums) // 2 :], strict=True)
        sums = [b.add(b.shl(high, eight), low) for high, low in both]
    return [sums[i : i + N_CENTRES] for i in range(0, len(sums), N_CENTRES)]


def _load_integers(b: Any, row: Value, i: Value, width: Value, half: Value) -> list[tuple[Value, Value]]:
    """Returns what the low and the high codes of a centre's bytes i.. are multiplied with: one or two pairs."""
    if BYTE_PRODUCTS:
        starts = [at(b, row, i), at(b, row, i, width)]  # the high bytes, the low ones
        return [(emit.load(b, INTS, x), emit.load(b, INTS, at(b, x, half))) for x in starts]
    start = at(b, row, (i, 2))
    return [(emit.load(b, WORDS, start), emit.load(b, WORDS, at(b, start, width)))]


def _codes_of_centre(b: Any, codes: Value) -> tuple[Value, Value]:
    """Returns the low and the high nibbles: as bytes in int32, or as words."""
    wide = codes if BYTE_PRODUCTS else b.zext(codes, WORDS)
    both = b.and_(wide, emit.constant(wide.type, MAX_CODE)), b.lshr(wide, emit.constant(wide.type, 4))
    low, high = (b.bitcast(x, INTS) for x in both) if BYTE_PRODUCTS else both
    return low, high


def _add_code_products(b: Any, codes: Value, integers: Value, acc: Value) -> Value:
    """Returns acc (N int32) + products with codes: four of bytes to a lane, or two of words."""
    if BYTE_PRODUCTS:
        return emit.add_products(b, codes, integers, acc, "s")
    if emit.HAS_VNNI and N == 16:
        codes, integers = b.bitcast(codes, INTS), b.bitcast(integers, INTS)
        return emit.call(b, "llvm.x86.avx512.vpdpwssd.512", INTS, acc, codes, integers)
    name = {16: "llvm.x86.avx512.pmaddw.d.512", 8: "llvm.x86.avx2.pmadd.wd", 4: "llvm.x86.sse2.pmadd.wd"}[N]
    return b.add(acc, emit.call(b, name, INTS, codes, integers))


def _all_lanes_in_fours(b: Any, vectors: list[Value]) -> Value:
    """Returns four int32 for each vector of `emit.reduce_fours`: the sums over all its fours of lanes."""
    while (n := vectors[0].type.count) > 4 and len(vectors) > 1:
        first = [i + j for i in range(0, 2 * n, 8) for j in range(4)]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [
            b.add(emit.shuffle(b, x, first, y), emit.shuffle(b, x, [i + 4 for i in first], y)) for x, y in pairs
        ]
    return emit.reduce(b, emit.concatenate, vectors)


# Sums of planes.

GROUPS = N // 4  # of a block's N_GROUPS, in a vector of bytes; likewise columns, where a group's are loaded
VECTOR_BYTES, N_VECTORS = GROUPS * GROUP, N_GROUPS // GROUPS  # of a block's columns
# Vectors of a block whose sums are made together, by the rows that are: what the registers hold.
VECTORS_AT_ONCE = {1: N_VECTORS, 2: N_VECTORS, 4: min(N_VECTORS, 1 if emit.FEW_REGISTERS else 2)}
CHUNK = 128  # channels whose sums fit 16 bits in four planes
MIDDLE_ENTRY = 64  # added to each entry of a table, so that it is at least 0
TOKENS = 4 * GROUPS  # of a run, that a vector has: they neighbour each other in a score
BYTES, BYTE_PAIRS, TABLE = (
    emit.vector(kind, n) for kind, n in ((emit.I8, VECTOR_BYTES), (emit.I16, VECTOR_BYTES // 2), (emit.I8, 16))
)
FLOATS, WHOLE = emit.vector(emit.F32, TOKENS), emit.vector(emit.I32, TOKENS)


@jit
def place_of_table(column: int) -> int:
    """Returns where the table of a column's lower four channels is; VECTOR_BYTES on is that of the upper four."""
    return column // GROUPS * 2 * VECTOR_BYTES + column % GROUPS * 16


@intrinsic
def store_table(context: Any, x: Any, i: Any, tables: Any, table: Any) -> Any:
    """tables[table + k] = 64 + the sum of x[i + j], times -1 where bit j of k is 0; k is 0 to 15, j is 0 to 3.

    x are odd halves whose sums are at most 63.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = emit.vector(emit.I16, 16)
        total = emit.constant(kind, 2 * MIDDLE_ENTRY)
        for j in range(4):
            one = builder.load(pointer_to(context, builder, x, (args[0], builder.add(args[1], args[1].type(j)))))
            twice = builder.fptosi(builder.fadd(one, one), emit.I16)  # odd; half of it is added or subtracted
            signs = ir.Constant(kind, [1 if k >> j & 1 else -1 for k in range(16)])
            total = builder.add(total, builder.mul(emit.splat(builder, twice, 16), signs))
        entries = builder.trunc(builder.lshr(total, emit.constant(kind, 1)), TABLE)
        pointer = builder.bitcast(pointer_to(context, builder, tables, args[2:]), TABLE.as_pointer())
        builder.store(entries, pointer, align=1)
        return context.get_dummy_value()

    return types.none(x, types.intp, tables, types.intp), build


def _emit_plane_sums(
    b: Any, n_rows: int, n_vectors: int, tables: Value, width: Value, planes: Value, bits: Value, channels: Value
) -> list[tuple[Value, Value]]:
    """Returns for each vector and row, as 16-bit lanes, the sums over planes and columns of the tokens' entries.

    sum over planes p and columns c of 2 ** (bits - 1 - p) * (low table[byte & 15] + high table[byte >> 4]).
    Two sums for each pair of bytes: that of the first byte plus 256 times that of the second, and of the second.
    """
    # One row: a vector has GROUPS columns of one group, and sums of columns are added up at the end. More rows:
    # it has one column of GROUPS groups, which rows share.
    is_row = n_rows == 1
    n_sums = n_vectors * n_rows * (GROUPS if is_row else 1)
    zeros = [emit.constant(BYTE_PAIRS, 0)] * (2 * n_sums)
    with emit.loop(b, 0, bits, 1, zeros) as plane:
        values = plane.values
        doubled = emit.branch(
            b, b.icmp_signed(">", plane.i, emit.I64(0)), lambda: [b.add(x, x) for x in values], lambda: values
        )
        codes = at(b, planes, (plane.i, width, BLOCK // 8))
        with emit.loop(b, 0, b.lshr(channels, emit.I64(3)), GROUPS, doubled) as column:
            sums = list(column.values)
            table = at(b, tables, (column.i, 2 * 16))
            for v in range(n_vectors):
                first = at(b, codes, (column.i, GROUP))
                groups = [
                    emit.load(b, BYTES, at(b, first, (v * GROUPS + group, width, 2))) for group in range(GROUPS)
                ]
                for i, x in enumerate(groups if is_row else _transpose(b, groups)):
                    low, high = b.and_(x, emit.constant(BYTES, 15)), b.lshr(x, emit.constant(BYTES, 4))
                    for m in range(n_rows):
                        row_table = at(b, table, (m, width, 4))
                        kind, offset = (BYTES, 0) if is_row else (TABLE, 16 * i)
                        entries = b.add(
                            emit.look_up(b, emit.load(b, kind, row_table, offset), low),
                            emit.look_up(b, emit.load(b, kind, row_table, offset + VECTOR_BYTES), high),
                        )
                        pairs, k = (
                            b.bitcast(entries, BYTE_PAIRS),
                            2 * (v * GROUPS + i if is_row else v * n_rows + m),
                        )
                        sums[k] = b.add(sums[k], pairs)
                        sums[k + 1] = b.add(sums[k + 1], b.lshr(pairs, emit.constant(BYTE_PAIRS, 8)))
            column.next = sums
        plane.next = column.values
    both, seconds = plane.values[::2], plane.values[1::2]
    if is_row:
        both, seconds = (
            [_add_columns(b, sums[i : i + GROUPS]) for i in range(0, n_sums, GROUPS)] for sums in (both, seconds)
        )
    return list(zip(both, seconds, strict=True))


def _add_columns(b: Any, groups: list[Value]) -> Value:
    """Returns the sums over columns of GROUPS groups, whose vectors have a column in each 16 bytes."""
    while len(groups) > 1:
        pairs = zip(groups[::2], groups[1::2], strict=True)
        groups = [b.add(*(_chunks(b, x, y, range(i, 2 * GROUPS, 2)) for i in (0, 1))) for x, y in pairs]
    return groups[0]


def _transpose(b: Any, xs: list[Value]) -> list[Value]:
    """Returns vectors of which the i-th has the i-th 16 bytes of each of GROUPS vectors."""
    if GROUPS == 4:
        xs = [_chunks(b, xs[j], xs[j + 1], (i, i + 1, 4 + i, 5 + i)) for i in (0, 2) for j in (0, 2)]
    if GROUPS == 1:
        return xs
    return [_chunks(b, xs[i], xs[i + 1], range(j, 2 * GROUPS, 2)) for i in range(0, GROUPS, 2) for j in (0, 1)]


def _chunks(b: Any, x: Value, y: Value, which: Sequence[int]) -> Value:
    """Returns 16 bytes each of x, and of y behind it."""
    size = x.type.count // GROUPS
    return emit.shuffle(b, x, [size * i + lane for i in which for lane in range(size)], y)


@intrinsic
def score_blocks(context: Any, rows: Any, queries: Any, keys: Any, s: Any, stride: Any, scratch: Any) -> Any:
    """s[m * stride + t] = the score of row m with token t of blocks; `Queries` of the rows, and `Keys`.

    scratch: CENTRE_SCRATCH bytes.
    """

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        rows, queries, keys, s, stride, scratch = args
        queries, keys = Queries(*cgutils.unpack_tuple(b, queries)), Keys(*cgutils.unpack_tuple(b, keys))
        done = emit.I64(0)
        for n_rows in ROW_COUNTS:
            with emit.loop(b, done, rows, n_rows) as row:
                args = queries.row(b, row.i), keys, at(b, s, (row.i, stride, 4)), stride, scratch
                emit.call_internal(b, f"score_planes_{n_rows}", functools.partial(_emit_scores, n_rows), *args)
            done = row.i
        return context.get_dummy_value()

    whole = types.intp
    of_queries, of_keys = (types.UniTuple(whole, len(kind._fields)) for kind in (Queries, Keys))
    return types.none(whole, of_queries, of_keys, whole, whole, whole), build


def _emit_scores(
    n_rows: int, b: Any, queries: Queries, keys: Keys, s: Value, stride: Value, scratch: Value
) -> None:
    """s (n_rows, tokens of all blocks) float32 = scores; rows are ``stride`` float32 apart."""
    together = CENTRE_BLOCKS[n_rows]
    with emit.loop(b, 0, at(b, keys.n_blocks, together - 1), together) as first:
        n_blocks = emit.min_int(b, b.sub(keys.n_blocks, first.i), together)
        some = keys.blocks(b, queries.width, first.i, n_blocks)
        for m in range(0, n_rows, CENTRE_ROWS[n_rows]):
            _emit_centre_scores(CENTRE_ROWS[n_rows], b, queries.row(b, m), some, at(b, scratch, 4 * N_RUNS * m))
        with emit.loop(b, first.i, b.add(first.i, n_blocks), 1) as block:
            centre_scores = at(b, scratch, (b.sub(block.i, first.i), 4 * N_RUNS))
            one, target = keys.blocks(b, queries.width, block.i, emit.I64(1)), at(b, s, (block.i, 4 * BLOCK))
            _emit_block_scores(n_rows, b, queries, one, centre_scores, target, stride)


def _emit_block_scores(
    n_rows: int, b: Any, queries: Queries, keys: Keys, centre_scores: Value, s: Value, stride: Value
) -> None:
    """s (n_rows, BLOCK) = centre scores of the tokens' runs + factor * scale * sums over the block's planes.

    The centre scores of a row lie CENTRE_BLOCKS * N_RUNS float32 behind those of the row before.
    """
    planes, bits, scale, width = keys.planes, keys.bits, keys.scale, queries.width
    emit.prefetch(b, at(b, scale, 2 * BLOCK * PREFETCH_BLOCKS), 2 * BLOCK)
    block_bytes = b.mul(b.mul(bits, width), emit.I64(BLOCK // 8))
    ahead = at(b, planes, (block_bytes, PREFETCH_BLOCKS))
    with emit.loop(b, ahead, at(b, ahead, block_bytes), 4 * emit.LINE) as lines:
        emit.prefetch(b, lines.i, 4 * emit.LINE)
    unit = emit.F32(2.0**-16)  # sums come in the upper 16 bits of 32
    factors = [b.fmul(emit.load(b, emit.F32, queries.factors, 4 * m), unit) for m in range(n_rows)]
    factors = [emit.splat(b, factor, TOKENS) for factor in factors]
    weight = b.sub(b.shl(emit.I64(1), bits), emit.I64(1))  # of all planes together
    with emit.loop(b, 0, at(b, width, CHUNK - 1), CHUNK) as chunk:
        channels = emit.min_int(b, b.sub(width, chunk.i), CHUNK)
        middle = b.trunc(b.mul(b.mul(weight, channels), emit.I64(MIDDLE_ENTRY // 4)), emit.I16)
        middle = emit.splat(b, middle, BYTE_PAIRS.count)
        with emit.loop(b, 0, N_VECTORS, VECTORS_AT_ONCE[n_rows]) as vector:
            first = at(b, planes, (vector.i, width, 2 * GROUPS), (chunk.i, 2))
            tables = at(b, queries.tables, (chunk.i, 4))
            sums = _emit_plane_sums(b, n_rows, VECTORS_AT_ONCE[n_rows], tables, width, first, bits, channels)
            for v in range(VECTORS_AT_ONCE[n_rows]):
                vector_index = at(b, vector.i, v)
                scales_at = at(b, scale, (vector_index, 2 * TOKENS))
                scales = [
                    widen(b, emit.load(b, emit.vector(emit.I16, TOKENS), scales_at, 2 * RUN * run))
                    for run in range(N_RUNS)
                ]
                for m in range(n_rows):
                    target = at(b, s, (stride, 4, m), (vector_index, 4 * TOKENS))
                    acc = emit.branch(
                        b,
                        b.icmp_signed(">", chunk.i, emit.I64(0)),
                        functools.partial(_load_runs, b, target),
                        functools.partial(
                            _spread_centre_scores, b, centre_scores, 4 * CENTRE_BLOCKS[n_rows] * N_RUNS * m
                        ),
                    )
                    for run, x in enumerate(_split_by_run(b, *sums[v * n_rows + m], middle)):
                        product = b.fmul(b.sitofp(x, FLOATS), scales[run])
                        total = emit.multiply_add(b, product, factors[m], acc[run])
                        emit.store(b, total, target, 4 * RUN * run)


def _load_runs(b: Any, s: Value) -> list[Value]:
    """Returns a vector's tokens of each run of a row's scores."""
    return [emit.load(b, FLOATS, s, 4 * RUN * run) for run in range(N_RUNS)]


def _spread_centre_scores(b: Any, scores: Value, offset: int) -> list[Value]:
    """Returns the centre score of each run, in every lane."""
    return [emit.splat(b, emit.load(b, emit.F32, scores, offset + 4 * run), TOKENS) for run in range(N_RUNS)]


def _split_by_run(b: Any, both: Value, second: Value, middle: Value) -> list[Value]:
    """Returns a vector's tokens of each run: int32 sums less ``middle``, times 2 ** 16.

    both, second: of `_emit_plane_sums`. Bytes 0 to 3 of each four are of the runs 0, 2, 1 and 3.
    """
    first = b.sub(both, b.shl(second, emit.constant(BYTE_PAIRS, 8)))
    runs = []
    for x in (first, second):
        words = b.bitcast(b.sub(x, middle), WHOLE)
        runs += [b.shl(words, emit.constant(WHOLE, 16)), b.and_(words, emit.constant(WHOLE, 0xFFFF0000))]
    return runs


# The loops.

ZERO, ONE, HALF = np.array([0, 1, 0.5], np.float32)
MAX_FOUR_STEPS, MAX_INTEGER = np.array([MAX_FOUR_SUM, 127 * 256], np.float32)


class KeyArgs(NamedTuple):
    """What the loops get of a codec: addresses of its arrays, sizes, and its rotation."""

    planes: int
    scale: int
    centres: int
    centre_step: int
    n_blocks: int
    width: int
    bits: int  # the address of each head's, as those of key_scale and first_plane
    key_scale: int
    head_dim: int
    is_hadamard: int
    matrix: int  # of the rotation; its signs if it is a Hadamard transform
    inverse: int
    first_plane: int
    query_factors: int  # (G, head_dim), of the queries before they are rotated


ARG = KeyArgs(*range(len(KeyArgs._fields)))  # where each stands


@jit
def _query_parts(prepared: int, rows: int, width: int) -> tuple[int, int, int]:
    """Returns where a head's prepared queries have their integers, their sizes and their factors.

    One behind the other: tables uint8 (rows, 4 * width), integers of two bytes (rows, width), float32 sizes
    (rows, 2) and factors (rows,), and room for two float32 rows (width,).
    """
    integers = prepared + 4 * rows * width
    sizes = integers + 2 * rows * width
    return integers, sizes, sizes + 8 * rows


@prepare_loop
def _prepare(args: int, q: int, rows: int, g: int, prepared: int) -> None:
    """Rotates and rounds the queries (rows, head_dim) of head g, and makes their tables and integers."""
    x = int64s(args)
    width, head_dim, matrix = get(x, ARG.width), get(x, ARG.head_dim), floats(get(x, ARG.matrix))
    query_factors = floats(get(x, ARG.query_factors) + 4 * g * head_dim)
    key_scale = get(floats(get(x, ARG.key_scale)), g)
    integers, sizes, factors = _query_parts(prepared, rows, width)
    rotated, rounded = floats(factors + 4 * rows), floats(factors + 4 * (rows + width))
    for m in range(rows):
        for d in range(head_dim):
            put(rounded, d, get(floats(q), m * head_dim + d) * get(query_factors, d))
        rotate_row(rounded, 0, head_dim, matrix, matrix, get(x, ARG.is_hadamard), width, rotated, 0)
        step = _round_query(rotated, width, rounded)
        _put_tables(rounded, width, chars(prepared), 4 * m * width)
        size, total = _in_two_bytes(rotated, width, chars(integers), 2 * m * width)
        put(floats(sizes), 2 * m, size)
        put(floats(sizes), 2 * m + 1, np.float32(total))
        put(floats(factors), m, key_scale * step)


@jit
def _round_query(q: F32, width: int, rounded: F32) -> Scalar:
    """rounded (width,) = `edgekv.codecs.planes.round_queries` of q (width,); returns the step."""
    largest = ZERO
    for d in range(0, width, 4):
        four = abs(get(q, d)) + abs(get(q, d + 1)) + abs(get(q, d + 2)) + abs(get(q, d + 3))
        largest = maximum(largest, four)
    step = largest / MAX_FOUR_STEPS
    divisor = ONE if step == ZERO else step
    for d in range(width):
        put(rounded, d, np.float32(np.floor(get(q, d) / divisor)) + HALF)
    return step


@jit
def _put_tables(rounded: F32, width: int, entries: U8, target: int) -> None:
    """Stores from ``target`` on, for each four elements, the 16 sums of + (bit 1) or - (bit 0) each element."""
    for column in range(width // 8):
        table = target + place_of_table(column)
        store_table(rounded, 8 * column, entries, table)
        store_table(rounded, 8 * column + 4, entries, table + VECTOR_BYTES)


@jit
def _in_two_bytes(x: F32, n: int, integers: U8, target: int) -> tuple[Scalar, int]:
    """Stores x (n,) ~ size * integers from ``target`` on; returns the size and the integers' sum.

    For Arm n high bytes, then n low bytes, which have signs (integer = 256 * high + low); else words of two bytes,
    which have a sign. The error is at most 2 ** -16 of the largest element.
    """
    largest, total = ZERO, 0
    for d in range(n):
        largest = maximum(largest, abs(get(x, d)))
    size = largest / MAX_INTEGER
    divisor = ONE if size == ZERO else size
    for d in range(n):
        whole = np.int32(round_to_even(get(x, d) / divisor))
        total += whole
        if BYTE_PRODUCTS:
            put(integers, target + d, np.uint8(np.int32(whole + 128) >> 8 & 255))
            put(integers, target + n + d, np.uint8(whole & 255))
        else:
            put(integers, target + 2 * d, np.uint8(whole & 255))
            put(integers, target + 2 * d + 1, np.uint8(whole >> 8 & 255))
    return size, total


@score_loop
def _score(args: int, prepared: int, rows: int, g: int, t: int, n: int, s: int, stride: int, scratch: int) -> None:
    """Whole blocks go to s; of others the scores of all tokens go to scratch first."""
    done = 0
    while done < n:
        i, block = (t + done) % BLOCK, (t + done) // BLOCK
        if i == 0 and n - done >= BLOCK:
            n_blocks = (n - done) // BLOCK
            _score_head(args, prepared, rows, g, block, n_blocks, s + 4 * done, stride, scratch)
            done += n_blocks * BLOCK
        else:
            n_tokens, scores = min(BLOCK - i, n - done), scratch + CENTRE_SCRATCH
            _score_head(args, prepared, rows, g, block, 1, scores, BLOCK, scratch)
            for m in range(rows):
                for k in range(n_tokens):
                    put(floats(s), m * stride + done + k, get(floats(scores), m * BLOCK + i + k))
            done += n_tokens


@fast_jit
def _score_head(
    args: int, prepared: int, rows: int, g: int, block: int, n_blocks: int, s: int, stride: int, scratch: int
) -> None:
    """`score_blocks` of head g's blocks from ``block`` on."""
    x = int64s(args)
    width, bits = get(x, ARG.width), get(int64s(get(x, ARG.bits)), g)
    of_head = g * get(x, ARG.n_blocks) + block
    first = get(int64s(get(x, ARG.first_plane)), g) * get(x, ARG.n_blocks) + block * bits
    integers, sizes, factors = _query_parts(prepared, rows, width)
    queries = prepared, integers, sizes, factors, width
    keys = (
        get(x, ARG.planes) + first * width * BLOCK // 8,
        bits,
        get(x, ARG.scale) + 2 * BLOCK * of_head,
        get(x, ARG.centres) + of_head * N_CENTRES * width // 2,
        get(x, ARG.centre_step) + 2 * N_CENTRES * of_head,
        n_blocks,
    )
    score_blocks(rows, queries, keys, s, stride, scratch)


def _args(codec: Any) -> KeyArgs:
    a, of_heads = codec.arrays, ("bits", "key_scale", "first_plane", "query_factors")
    return KeyArgs(
        **{name: address_of(a[name]) for name in ("planes", "scale", "centres", "centre_step")},
        **{name: address_of(getattr(codec, name)) for name in of_heads},
        **{"n_blocks": a["planes"].shape[1], "width": codec.width, "head_dim": codec.head_dim},
        **rotation_args(codec.rotation),
    )


def _prepared_bytes(codec: Any, rows: int) -> int:
    size: int = rows * (6 * codec.width + 12) + 8 * codec.width
    return size


KEYS = CpuCodec(
    _args,
    prepare=_prepare,
    score=_score,
    prepared=_prepared_bytes,
    scratch=lambda codec, rows: CENTRE_SCRATCH + 4 * rows * BLOCK,
    at_once=TOKENS_PER_CALL,
)
