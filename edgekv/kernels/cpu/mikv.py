"""Scores with keys that have a range per token, as KIVI's values have."""

import numpy as np
from numba import prange

from edgekv.kernels.contract.evict import F32, U8, U16
from edgekv.kernels.cpu.codes import dot_four_rows, dot_row, parts_of
from edgekv.kernels.cpu.half import as_float
from edgekv.kernels.cpu.jit import Args, Scalar, fast_jit, parallel_jit
from edgekv.kernels.cpu.launch import flat, run, token_span, token_splits
from edgekv.kernels.cpu.scalar import address, get, put

ROWS = 4  # that share an unpacked code


def scores_tokens(q: F32, codes: U8, step: U16, low: U16, t0: int, t1: int, s: F32, s0: int) -> None:
    work = q.size * (t1 - t0)
    splits = token_splits(q.shape[0], work)
    n_items = q.shape[0] * splits
    dots = np.empty((n_items, ROWS * codes.shape[3]), np.float32)
    totals = q.sum(axis=2)  # what a token's low end is multiplied by
    parts = parts_of(q.shape[2], codes.shape[2])
    args = splits, np.ascontiguousarray(q), totals, codes, step, low, t0, t1, dots, *flat(s), s0, *parts
    run(_scores_items, _scores_parallel, n_items, work, args)


@fast_jit
def _scores_items(first: int, last: int, args: Args) -> None:
    splits, q, totals, codes, step, low, t0, t1, dots, s, gap_g, gap_m, s0 = args[:13]
    parts = args[13:]
    (_, n_rows, head_dim), capacity = q.shape, step.shape[1]
    n_blocks, n_bytes, block = codes.shape[1:]
    q, totals, dots, s = address(q), address(totals), address(dots), address(s)
    codes, step, low = address(codes), address(step), address(low)
    for item in range(first, last):
        g, dot = item // splits, item * ROWS * block
        start, end = token_span(t0, t1, splits, item % splits)
        for b in range(start // block, (end + block - 1) // block):
            i, n = max(start - b * block, 0), min(end - b * block, block)
            token, code = g * capacity + b * block, (g * n_blocks + b) * n_bytes * block
            row, m = g * gap_g + s0 + b * block - t0, g * n_rows
            for _ in range(n_rows // ROWS):
                dot_four_rows(parts, q, m * head_dim, head_dim, codes, code, n_bytes, block, dots, dot)
                for k in range(ROWS):
                    _finish(dots, dot + k * block, i, n, get(totals, m + k), step, low, token, s, row)
                    row += gap_m
                m += ROWS
            for _ in range(n_rows % ROWS):
                dot_row(parts, q, m * head_dim, codes, code, n_bytes, block, dots, dot)
                _finish(dots, dot, i, n, get(totals, m), step, low, token, s, row)
                row, m = row + gap_m, m + 1


@parallel_jit
def _scores_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _scores_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@fast_jit
def _finish(
    dots: F32, dot: int, first: int, last: int, total: Scalar, step: U16, low: U16, token: int, s: F32, row: int
) -> None:
    """Scores of tokens first..last of a block from the products with their codes."""
    for t in range(first, last):
        size, least = as_float(get(step, token + t)), as_float(get(low, token + t))
        put(s, row + t, size * get(dots, dot + t) + least * total)
