"""The second stage of attention in bit planes: the tokens of enough probability are read again, in full."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from edgekv.kernels.contract.planes import (
    CENTRE,
    CENTRES,
    FULL_VALUES,
    KEY_STEP,
    LARGEST_CORRECTION,
    LEAST_VARIANCE,
    MOST_SAMPLES,
    PAIR_STEP,
    REACH,
    SIGN_NOISE,
)
from edgekv.kernels.contract.segment import Segment
from edgekv.kernels.cuda.counter import place
from edgekv.kernels.cuda.ints import byte_values
from edgekv.kernels.cuda.loops import Estimates, Loops, Queries, Reader
from edgekv.kernels.cuda.planes import CENTRED
from edgekv.kernels.cuda.program import Array, Launch, Program
from edgekv.kernels.cuda.ranges import RangeKernels
from edgekv.kernels.cuda.tiles import THREADS, TILE, strides

GATHER = (
    ("KEY_STEP", f"{KEY_STEP}f"),
    ("PAIR_STEP", f"{PAIR_STEP}f"),
    ("LARGEST_CORRECTION", f"{LARGEST_CORRECTION}f"),
)


def estimate(
    kernels: RangeKernels, segment: Segment, most: int, reader: Reader, queries: Queries, s: Array
) -> Estimates:
    """Estimates of a segment's tokens, for queries measured on some; s (G, M, most - first) is used up."""
    keys, first = segment.keys, segment.first
    a, tiles, launch = keys.arrays, -(-most // TILE) - first // TILE, kernels.driver.launch
    n_kv_heads, rows, width = queries.x.shape
    sampled = kernels.driver.empty((tiles,), np.uint8)
    program = rescan_program(width)
    stop = place(kernels.driver, segment.stop)
    launch(Launch(program, "sample_tiles", (-(-tiles // THREADS),), THREADS), first, *stop, tiles, sampled)
    kernels.launch_scores(reader, queries, first, most, s, chosen=sampled)
    lengths = kernels.driver.empty((n_kv_heads, rows), np.float32)
    stored = a["centres"], a["centre_step"], a["deviation"], keys.capacity, kernels.constant(keys.key_scale)
    sample = s, *strides(s), first, sampled, tiles
    launch(Launch(program, "measure", (rows, n_kv_heads), THREADS), *sample, queries.x, *stored, lengths)
    arrays = a["deviation"], a["scale"], a["centres"], a["centre_step"]
    estimating = dataclasses.replace(reader, name="EstimatedKeys", arrays=arrays)
    return Estimates(estimating, Queries(queries.x, scale=lengths), sampled)


def select_tiles(
    kernels: RangeKernels, segment: Segment, estimates: Estimates, s: Array, totals: Array, n: int
) -> tuple[Array, Array]:
    """The tiles (G, n, tiles) in which a token can have the threshold, and counts (G, n, 3) of them."""
    keys, values, t0, t1, *_ = segment
    n_kv_heads, rows, width = estimates.queries.x.shape
    n_tiles = -(-t1 // TILE) - t0 // TILE
    chosen = kernels.scratch("planes.selected", (n_kv_heads, n, n_tiles), np.uint8)
    counts = kernels.driver.zeros((n_kv_heads, n, 3), np.int64)
    grid = -(-n_tiles // (THREADS // 32)), n_kv_heads * n
    launch = Launch(rescan_program(width), "select_tiles", grid, THREADS)
    stored = estimates.queries.scale, keys.arrays["deviation"], keys.capacity
    limits = totals, math.log(values.threshold), rows // n, n
    results = estimates.sampled, chosen, counts
    kernels.driver.launch(launch, s, *strides(s), t0, t1, *stored, *limits, *results)
    return chosen, counts


def rescan_program(width: int) -> Program:
    numbers = (("REACH", f"{REACH}f"), ("SIGN_NOISE", f"{SIGN_NOISE}f"), ("LEAST_VARIANCE", f"{LEAST_VARIANCE}f"))
    return Program(
        ("rescan",),
        (("KEY_DIM", width), ("CENTRE", CENTRE), ("CENTRES", CENTRES), ("MOST_SAMPLES", MOST_SAMPLES), *numbers),
    )


def second_stage(
    kernels: RangeKernels, segment: Segment, queries: Queries, p: Array, counts: Array, out: Array
) -> Array:
    """out (G, M, D) += the values of a segment whose keys gave p (G, M, tokens); returns p's change (G, M).

    counts (G, n, 3) of n query tokens, of which the first two are filled. Tokens that are not read count as the
    mean of their block, for which ``tail`` adds them up.
    """
    keys, values, t0, t1, *_ = segment
    a, k, (n_kv_heads, rows, width), n = values.arrays, keys.arrays, queries.x.shape, counts.shape[1]
    b0, b1 = t0 // TILE, -(-t1 // TILE)
    zeros = kernels.driver.zeros
    inner, change = zeros(queries.x.shape, np.float32), zeros((n_kv_heads, rows), np.float32)
    tail = kernels.scratch("planes.tail", (n_kv_heads, rows, b1 - b0))
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


LOOPS = {
    "plane_keys": dataclasses.replace(CENTRED, estimate=estimate),
    "plane_values": Loops(select_tiles=select_tiles, second_stage=second_stage),
}
