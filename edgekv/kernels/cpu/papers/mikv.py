"""Scores with keys that have a range per token, as KIVI's values have."""

from typing import Any

import numpy as np

from edgekv.kernels.cpu.codes import (
    EIGHT_BITS,
    FOUR_BITS,
    TWO_BITS,
    Parts,
    dot_four_rows,
    dot_row,
    prepared_bytes,
)
from edgekv.kernels.cpu.half import as_float
from edgekv.kernels.cpu.jit import Scalar, fast_jit, jit
from edgekv.kernels.cpu.loops import (
    Loops,
    address_of,
    chars,
    floats,
    halves,
    numbers,
    prepare_loop,
    score_loop,
)
from edgekv.kernels.cpu.scalar import get, put
from edgekv.types import F32, U16

ROWS = 4  # that share an unpacked code
N_BITS = 8  # of the numbers of a store
ZERO = np.float32(0)


@prepare_loop
def _balance(store: int, q: int, rows: int, g: int, prepared: int) -> None:
    """The queries over the balance, and behind them the sum of each, which a token's low end is multiplied by."""
    head_dim, balance = get(numbers(store), 0), floats(get(numbers(store), 4))
    queries, target = floats(q), floats(prepared)
    for m in range(rows):
        total = ZERO
        for d in range(head_dim):
            x = get(queries, m * head_dim + d) / get(balance, g * head_dim + d)
            put(target, m * head_dim + d, x)
            total += x
        put(target, rows * head_dim + m, total)


@score_loop
def _score(store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    n_bits = get(numbers(store), N_BITS)
    if n_bits == 2:
        _score_blocks(TWO_BITS, store, q, rows, g, t, n, s, gap, scratch)
    elif n_bits == 4:
        _score_blocks(FOUR_BITS, store, q, rows, g, t, n, s, gap, scratch)
    else:
        _score_blocks(EIGHT_BITS, store, q, rows, g, t, n, s, gap, scratch)


@fast_jit
def _score_blocks(
    parts: Parts, store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int
) -> None:
    head_dim, codes_at, step_at, low_at, capacity, n_blocks, block = _numbers(store)
    n_bytes, totals = head_dim // len(parts), rows * head_dim
    queries, dots, to = floats(q), floats(scratch), floats(s)
    codes, step, low = chars(codes_at), halves(step_at), halves(low_at)
    for b in range(t // block, (t + n + block - 1) // block):
        i, end = max(t - b * block, 0), min(t + n - b * block, block)
        token, code = g * capacity + b * block, (g * n_blocks + b) * n_bytes * block
        row, m = b * block - t, 0
        for _ in range(rows // ROWS):
            dot_four_rows(parts, queries, m * head_dim, head_dim, codes, code, n_bytes, block, dots, 0)
            for k in range(ROWS):
                _finish(dots, k * block, i, end, get(queries, totals + m + k), step, low, token, to, row)
                row += gap
            m += ROWS
        for _ in range(rows % ROWS):
            dot_row(parts, queries, m * head_dim, codes, code, n_bytes, block, dots, 0)
            _finish(dots, 0, i, end, get(queries, totals + m), step, low, token, to, row)
            row, m = row + gap, m + 1


@fast_jit
def _finish(
    dots: F32, dot: int, first: int, last: int, total: Scalar, step: U16, low: U16, token: int, s: F32, row: int
) -> None:
    """Scores of tokens first..last of a block from the products with their codes."""
    for t in range(first, last):
        size, least = as_float(get(step, token + t)), as_float(get(low, token + t))
        put(s, row + t, size * get(dots, dot + t) + least * total)


@jit
def _numbers(store: int) -> tuple[int, int, int, int, int, int, int]:
    x = numbers(store)
    return get(x, 0), get(x, 1), get(x, 2), get(x, 3), get(x, 5), get(x, 6), get(x, 7)


def _store(codec: Any) -> tuple[int, ...]:
    a = codec.arrays
    _, n_blocks, n_bytes, block = a["codes"].shape
    addresses = (address_of(array) for array in (a["codes"], a["step"], a["low"], codec.balance))
    return codec.head_dim, *addresses, codec.capacity, n_blocks, block, 8 * n_bytes // codec.head_dim


LOOPS = {
    "token_keys": Loops(
        _store,
        score=_score,
        prepare=_balance,
        prepared=prepared_bytes,
        scratch=lambda codec, rows: 4 * ROWS * codec.arrays["codes"].shape[3],
    )
}
