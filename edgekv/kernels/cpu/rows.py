"""Loops over rows of numbers: signed bytes, float16 bits or float32.

Each number is converted once for up to four query rows; four tokens' scores are computed side by side, so that
their lanes are added up together.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np
from numba import types

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import intrinsic, jit
from edgekv.kernels.cpu.emit import at
from edgekv.kernels.cpu.loops import TOKENS_PER_CALL, CpuCodec, add_loop, int64s, score_loop
from edgekv.kernels.cpu.scalar import get, widen

N = WIDTH = emit.REGISTER
VECTOR = emit.vector(emit.F32, N)
ROW_COUNTS = 4, 2, 1
# Tokens whose scores are made together, and vectors of channels summed together, by rows: to fit the registers.
TOKENS = {1: 4, 2: 4, 4: 2 if emit.FEW_REGISTERS else 4}
COLUMNS = {1: 4, 2: 2 if emit.FEW_REGISTERS else 4, 4: 2 if emit.FEW_REGISTERS else 4}
PREFETCH_TOKENS = 64  # tokens


def score_rows(size: int, batch_invariant: bool = False, adds: bool = False) -> Any:
    """Returns an intrinsic that scores rows of numbers of ``size`` bytes.

    batch_invariant: a score does not depend on how many rows there are. adds: it is added to what is there.
    """
    tokens = dict.fromkeys(TOKENS, 4) if batch_invariant else TOKENS
    row_counts = ROW_COUNTS[1:] if batch_invariant and emit.FEW_REGISTERS else ROW_COUNTS
    name = f"score_{'invariant' if batch_invariant else 'rows'}_{size}_{adds}"

    @intrinsic
    def score(context: Any, q: Any, rows: Any, keys: Any, head_dim: Any, n: Any, s: Any, stride: Any) -> Any:
        """Sets s[m * stride + t] to q[m] times keys[t]."""

        def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
            q, rows, keys, head_dim, n, s, stride = args
            done = emit.I64(0)
            for n_rows in row_counts:
                with emit.loop(b, done, rows, n_rows) as loop:
                    queries = b.add(q, b.mul(loop.i, b.mul(head_dim, emit.I64(4))))
                    target = b.add(s, b.mul(loop.i, b.mul(stride, emit.I64(4))))
                    write = functools.partial(_score, size, adds, n_rows, tokens[n_rows])
                    emit.call_internal(b, f"{name}_{n_rows}", write, queries, keys, head_dim, n, target, stride)
                done = loop.i
            return context.get_dummy_value()

        return types.none(*[types.intp] * 7), build

    return score


def add_rows(size: int) -> Any:
    """Returns an intrinsic that adds up weighted rows of numbers of ``size`` bytes."""

    @intrinsic
    def add(context: Any, p: Any, stride: Any, rows: Any, values: Any, head_dim: Any, n: Any, out: Any) -> Any:
        """Adds p[m * stride + t] times values[t] to out[m]."""

        def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
            p, stride, rows, values, head_dim, n, out = args
            done = emit.I64(0)
            for n_rows in ROW_COUNTS:
                with emit.loop(b, done, rows, n_rows) as loop:
                    weights = b.add(p, b.mul(loop.i, b.mul(stride, emit.I64(4))))
                    target = b.add(out, b.mul(loop.i, b.mul(head_dim, emit.I64(4))))
                    write = functools.partial(_add, size, n_rows)
                    emit.call_internal(
                        b, f"add_rows_{size}_{n_rows}", write, weights, stride, values, head_dim, n, target
                    )
                done = loop.i
            return context.get_dummy_value()

        return types.none(*[types.intp] * 7), build

    return add


def _load(b: Any, size: int, address: Any, offset: int = 0, n: Any = None) -> Any:
    """Returns N numbers as float32; n: how many there are before zeros, None: all."""
    x = emit.masked_load(b, emit.vector({1: emit.I8, 2: emit.I16, 4: emit.F32}[size], N), address, offset, n)
    if size == 1:
        return b.sitofp(b.sext(x, emit.vector(emit.I32, N)), VECTOR)
    return widen(b, x) if size == 2 else x


def _score(size: int, adds: bool, n_rows: int, tokens: int, b: Any, *args: Any) -> None:
    q, keys, head_dim, n, s, stride = args
    row_bytes, query_bytes = b.mul(head_dim, emit.I64(size)), b.mul(head_dim, emit.I64(4))
    done = emit.I64(0)
    for n_tokens in (tokens, 1):
        with emit.loop(b, done, n, n_tokens) as tile:
            first = at(b, keys, (tile.i, row_bytes))
            ahead = at(b, first, (row_bytes, PREFETCH_TOKENS))

            def add_channels(channel: Any, sums: list[Any], n: Any, n_tokens: int, first: Any) -> list[Any]:
                key, query = at(b, first, (channel, size)), at(b, q, (channel, 4))
                xs = [_load(b, size, at(b, key, (row_bytes, t)), 0, n) for t in range(n_tokens)]
                qs = [_load(b, 4, at(b, query, (query_bytes, m)), 0, n) for m in range(n_rows)]
                pairs = ((q, x) for q in qs for x in xs)
                return [emit.multiply_add(b, *pair, acc) for pair, acc in zip(pairs, sums, strict=True)]

            zeros = [emit.constant(VECTOR, 0)] * (n_rows * n_tokens)
            with emit.loop(b, emit.I64(0), head_dim, N, zeros) as loop:
                if size < 4:  # a tile is in the first cache
                    emit.prefetch(b, at(b, ahead, (loop.i, size * n_tokens)), size * n_tokens * N)
                loop.next = add_channels(loop.i, loop.values, None, n_tokens, first)
            with emit.loop(b, loop.i, at(b, head_dim, N - 1), N, loop.values) as rest:
                rest.next = add_channels(rest.i, rest.values, b.sub(head_dim, rest.i), n_tokens, first)
            for m in range(n_rows):
                scores = emit.lane_sums(b, rest.values[m * n_tokens : (m + 1) * n_tokens])
                target = at(b, s, (tile.i, 4), (stride, 4 * m))
                if adds:
                    scores = b.fadd(emit.load(b, scores.type, target), scores)
                emit.store(b, scores, target)
        done = tile.i


def _add(
    size: int, n_rows: int, b: Any, p: Any, stride: Any, values: Any, head_dim: Any, n: Any, out: Any
) -> None:
    row_bytes, out_bytes = b.mul(head_dim, emit.I64(size)), b.mul(head_dim, emit.I64(4))
    stride_bytes, done = b.mul(stride, emit.I64(4)), emit.I64(0)
    for n_columns, is_whole in ((COLUMNS[n_rows], True), (1, True), (1, False)):
        with emit.loop(b, done, head_dim if is_whole else at(b, head_dim, N - 1), n_columns * N) as tile:
            n_left = None if is_whole else b.sub(head_dim, tile.i)
            first, target = b.add(values, b.mul(tile.i, emit.I64(size))), b.add(out, b.mul(tile.i, emit.I64(4)))
            targets = [
                (b.add(target, b.mul(out_bytes, emit.I64(m))), 4 * N * c)
                for m in range(n_rows)
                for c in range(n_columns)
            ]
            acc = [emit.masked_load(b, VECTOR, *to, n_left) for to in targets]
            with emit.loop(b, emit.I64(0), n, 1, acc) as loop:
                value = b.add(first, b.mul(loop.i, row_bytes))
                if size < 4:
                    emit.prefetch(b, at(b, value, (row_bytes, PREFETCH_TOKENS)), size * n_columns * N)
                xs = [_load(b, size, value, size * N * c, n_left) for c in range(n_columns)]
                weight = b.add(p, b.mul(loop.i, emit.I64(4)))
                ws = [
                    emit.splat(b, emit.load(b, emit.F32, b.add(weight, b.mul(stride_bytes, emit.I64(m)))), N)
                    for m in range(n_rows)
                ]
                pairs = ((w, x) for w in ws for x in xs)
                loop.next = [
                    emit.multiply_add(b, *pair, total) for pair, total in zip(pairs, loop.values, strict=True)
                ]
            for to, total in zip(targets, loop.values, strict=True):
                emit.masked_store(b, total, *to, n_left)
        done = tile.i


score_singles, add_singles = score_rows(4), add_rows(4)


@score_loop
def _score_f32(args: int, q: int, rows: int, g: int, t: int, n: int, s: int, stride: int, scratch: int) -> None:
    single, capacity, head_dim = rows_at(args)
    keys = single + 4 * (g * capacity + t) * head_dim
    score_singles(q, rows, keys, head_dim, n, s, stride)


@add_loop
def _add_f32(args: int, p: int, stride: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    single, capacity, head_dim = rows_at(args)
    values = single + 4 * (g * capacity + t) * head_dim
    add_singles(p, stride, rows, values, head_dim, n, out)


@jit
def rows_at(args: int) -> tuple[int, int, int]:
    """Returns the address, capacity and head_dim of rows that a codec stores as they are."""
    x = int64s(args)
    return get(x, 0), get(x, 1), get(x, 2)


KERNELS = {
    "decoded": CpuCodec(
        lambda tokens: (tokens.address, tokens.capacity, tokens.head_dim),
        _score_f32,
        _add_f32,
        at_once=TOKENS_PER_CALL,
    )
}
"""The loops of `DecodedTokens`."""


class DecodedTokens:
    """Tokens t0..t1 of a codec without loops, decoded: (G, t1 - t0, D) float32, maybe its own array."""

    kind = "decoded"
    backends: ClassVar[dict[str, str]] = {"cpu": __name__}

    def __init__(self, codec: Any, t0: int, t1: int) -> None:
        self.n_kv_heads, self.head_dim, self.backend_state = codec.n_kv_heads, codec.head_dim, None
        x = np.asarray(codec.decode(t0, t1), np.float32)
        token = 4 * self.head_dim
        if x.strides[1:] != (token, 4) or x.strides[0] % token:
            x = np.ascontiguousarray(x)
        self.alive, self.capacity = x, x.strides[0] // token  # between heads
        self.address = x.__array_interface__["data"][0] - t0 * token
