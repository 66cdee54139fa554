"""Rows of numbers, float16 bits, signed bytes or float32, times queries, and their weighted sums.

Each number is converted once for up to four query rows; four tokens' scores are made side by side, so that their
lanes are added up together.
"""

import functools
from typing import Any

from numba import types

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import intrinsic
from edgekv.kernels.cpu.scalar import widen

N = emit.REGISTER
VECTOR = emit.vector(emit.F32, N)
ROW_COUNTS = 4, 2, 1
# Tokens whose scores are made together, and vectors of channels summed together, by rows: to fit the registers.
TOKENS = {1: 4, 2: 4, 4: 2 if emit.FEW_REGISTERS else 4}
COLUMNS = {1: 4, 2: 2 if emit.FEW_REGISTERS else 4, 4: 2 if emit.FEW_REGISTERS else 4}
AHEAD = 8  # tokens


def score_rows(size: int, alike: bool = False) -> Any:
    """The loop over rows of numbers of `size` bytes; alike: a score does not depend on how many rows there are."""
    tokens = dict.fromkeys(TOKENS, 4) if alike else TOKENS
    row_counts = ROW_COUNTS[1:] if alike and emit.FEW_REGISTERS else ROW_COUNTS
    name = f"score_{'alike' if alike else 'rows'}_{size}"

    @intrinsic
    def score(context: Any, q: Any, rows: Any, keys: Any, head_dim: Any, n: Any, s: Any, gap: Any) -> Any:
        """s[m * gap + t] = q[m] times keys[t], without the channels behind the last whole vector."""

        def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
            q, rows, keys, head_dim, n, s, gap = args
            done = emit.I64(0)
            for together in row_counts:
                with emit.loop(b, done, rows, together) as turn:
                    queries = b.add(q, b.mul(turn.i, b.mul(head_dim, emit.I64(4))))
                    target = b.add(s, b.mul(turn.i, b.mul(gap, emit.I64(4))))
                    write = functools.partial(_score, size, together, tokens[together])
                    emit.call_own(b, f"{name}_{together}", write, queries, keys, head_dim, n, target, gap)
                done = turn.i
            return context.get_dummy_value()

        return types.none(*[types.intp] * 7), build

    return score


def add_rows(size: int) -> Any:
    """The loop over rows of numbers of `size` bytes."""

    @intrinsic
    def add(context: Any, p: Any, gap: Any, rows: Any, values: Any, head_dim: Any, n: Any, out: Any) -> Any:
        """out[m] += p[m * gap + t] times values[t], without the channels behind the last whole vector."""

        def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
            p, gap, rows, values, head_dim, n, out = args
            done = emit.I64(0)
            for together in ROW_COUNTS:
                with emit.loop(b, done, rows, together) as turn:
                    weights = b.add(p, b.mul(turn.i, b.mul(gap, emit.I64(4))))
                    target = b.add(out, b.mul(turn.i, b.mul(head_dim, emit.I64(4))))
                    write = functools.partial(_add, size, together)
                    emit.call_own(
                        b, f"add_rows_{size}_{together}", write, weights, gap, values, head_dim, n, target
                    )
                done = turn.i
            return context.get_dummy_value()

        return types.none(*[types.intp] * 7), build

    return add


def _load(b: Any, size: int, address: Any, offset: int = 0) -> Any:
    if size == 4:
        return emit.load(b, VECTOR, address, offset)
    if size == 1:
        return b.sitofp(
            b.sext(emit.load(b, emit.vector(emit.I8, N), address, offset), emit.vector(emit.I32, N)), VECTOR
        )
    return widen(b, emit.load(b, emit.vector(emit.I16, N), address, offset))


def _score(
    size: int, n_rows: int, tokens: int, b: Any, q: Any, keys: Any, head_dim: Any, n: Any, s: Any, gap: Any
) -> None:
    row_bytes, query_bytes = b.mul(head_dim, emit.I64(size)), b.mul(head_dim, emit.I64(4))
    done = emit.I64(0)
    for n_tokens in (tokens, 1):
        with emit.loop(b, done, n, n_tokens) as tile:
            first = b.add(keys, b.mul(tile.i, row_bytes))
            ahead = b.add(first, b.mul(row_bytes, emit.I64(AHEAD)))
            zeros = [emit.constant(VECTOR, 0)] * (n_rows * n_tokens)
            with emit.loop(b, emit.I64(0), head_dim, N, zeros) as turn:
                emit.prefetch(b, b.add(ahead, b.mul(turn.i, emit.I64(size * n_tokens))), size * n_tokens * N)
                key, query = b.add(first, b.mul(turn.i, emit.I64(size))), b.add(q, b.mul(turn.i, emit.I64(4)))
                xs = [_load(b, size, b.add(key, b.mul(row_bytes, emit.I64(t)))) for t in range(n_tokens)]
                qs = [emit.load(b, VECTOR, b.add(query, b.mul(query_bytes, emit.I64(m)))) for m in range(n_rows)]
                pairs = ((q, x) for q in qs for x in xs)
                turn.following = [
                    emit.multiply_add(b, *pair, so_far) for pair, so_far in zip(pairs, turn.values, strict=True)
                ]
            for m in range(n_rows):
                scores = emit.totals(b, turn.values[m * n_tokens : (m + 1) * n_tokens])
                place = b.add(tile.i, b.mul(gap, emit.I64(m)))
                emit.store(b, scores, b.add(s, b.mul(place, emit.I64(4))))
        done = tile.i


def _add(size: int, n_rows: int, b: Any, p: Any, gap: Any, values: Any, head_dim: Any, n: Any, out: Any) -> None:
    row_bytes, out_bytes = b.mul(head_dim, emit.I64(size)), b.mul(head_dim, emit.I64(4))
    gap_bytes, done = b.mul(gap, emit.I64(4)), emit.I64(0)
    for n_columns in (COLUMNS[n_rows], 1):
        with emit.loop(b, done, head_dim, n_columns * N) as tile:
            first, target = b.add(values, b.mul(tile.i, emit.I64(size))), b.add(out, b.mul(tile.i, emit.I64(4)))
            places = [
                (b.add(target, b.mul(out_bytes, emit.I64(m))), 4 * N * c)
                for m in range(n_rows)
                for c in range(n_columns)
            ]
            so_far = [emit.load(b, VECTOR, *place) for place in places]
            with emit.loop(b, emit.I64(0), n, 1, so_far) as turn:
                value = b.add(first, b.mul(turn.i, row_bytes))
                emit.prefetch(b, b.add(value, b.mul(row_bytes, emit.I64(AHEAD))), size * n_columns * N)
                xs = [_load(b, size, value, size * N * c) for c in range(n_columns)]
                weight = b.add(p, b.mul(turn.i, emit.I64(4)))
                ws = [
                    emit.splat(b, emit.load(b, emit.F32, b.add(weight, b.mul(gap_bytes, emit.I64(m)))), N)
                    for m in range(n_rows)
                ]
                pairs = ((w, x) for w in ws for x in xs)
                turn.following = [
                    emit.multiply_add(b, *pair, total) for pair, total in zip(pairs, turn.values, strict=True)
                ]
            for place, total in zip(places, turn.values, strict=True):
                emit.store(b, total, *place)
        done = tile.i
