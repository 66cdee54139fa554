"""The second stage of attention in bit planes: the tokens of enough probability are read again, in full."""

from __future__ import annotations

import numpy as np

from edgekv.kernels.contract.planes import FULL_VALUES, KEY_STEP, LARGEST_CORRECTION, PAIR_STEP
from edgekv.kernels.contract.segment import Segment
from edgekv.kernels.cuda.ints import byte_values
from edgekv.kernels.cuda.loops import Loops, Queries
from edgekv.kernels.cuda.program import Array, Launch, Program
from edgekv.kernels.cuda.ranges import RangeKernels
from edgekv.kernels.cuda.tiles import THREADS, TILE, strides

GATHER = (
    ("KEY_STEP", f"{KEY_STEP}f"),
    ("PAIR_STEP", f"{PAIR_STEP}f"),
    ("LARGEST_CORRECTION", f"{LARGEST_CORRECTION}f"),
)


def second_stage(kernels: RangeKernels, segment: Segment, queries: Queries, p: Array, n: int, out: Array) -> Array:
    """out (G, M, D) += the values of a segment whose keys gave p (G, M, tokens); returns p's change (G, M).

    n query tokens. Tokens that are not read count as the mean of their block, for which ``tail`` adds them up.
    """
    keys, values, t0, t1, *_ = segment
    a, k, (n_kv_heads, rows, width) = values.arrays, keys.arrays, queries.x.shape
    b0, b1 = t0 // TILE, -(-t1 // TILE)
    zeros = kernels.driver.zeros
    inner, change = zeros(queries.x.shape, np.float32), zeros((n_kv_heads, rows), np.float32)
    tail = kernels.scratch("planes.tail", (n_kv_heads, rows, b1 - b0))
    counts = zeros((n_kv_heads, n, 2), np.int64)
    splits = kernels.splits(b1 - b0, n_kv_heads * n)
    partial = kernels.scratch("planes.sums", (n_kv_heads, splits, rows, width))
    changes = kernels.scratch("planes.changes", (n_kv_heads, splits, rows))
    program = Program(("gather",), (("ROWS", rows // n), ("KEY_DIM", width), *GATHER))
    launch = Launch(program, "attend_planes", (splits, n_kv_heads * n), THREADS)
    q = queries.x, queries.rounded, kernels.constant(keys.key_scale)
    stored = k["planes"], k["scale"], k["fine"], a["top"], a["low"], a["scale"], keys.capacity
    limits = float(values.threshold), float(FULL_VALUES * values.threshold)
    kernels.driver.launch(launch, p, *strides(p), t0, t1, *q, *stored, *limits, n, partial, changes, tail, counts)
    kernels.add_partial(partial, inner)
    kernels.add_partial(changes, change)
    means = byte_values(a["means"], (a["mean_scale"],), width, "FROM_MIDDLE")
    kernels.launch_values(means, tail, b0, b1, inner)
    kernels.rotate_back(keys.rotation, inner, out)
    values.counts = counts.mean(axis=(0, 1))
    return change


LOOPS = {"plane_values": Loops(second_stage=second_stage)}
