"""Keys of two stages: what their centres and deviations tell of scores, before any bit of them is read."""

import dataclasses

import numpy as np

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.contract.planes import CENTRE, CENTRES, LEAST_VARIANCE, MOST_SAMPLES, REACH, SIGN_NOISE
from edgekv.kernels.cpu.centre_products import SCRATCH as NEAR_BYTES
from edgekv.kernels.cpu.estimates import PER_BLOCK, estimate_blocks
from edgekv.kernels.cpu.half import as_float
from edgekv.kernels.cpu.jit import fast_jit
from edgekv.kernels.cpu.loops import floats, halves, measure_loop, numbers, score_loop
from edgekv.kernels.cpu.planes import AT as KEY
from edgekv.kernels.cpu.planes import CENTRED, parts_of, scan_blocks
from edgekv.kernels.cpu.scalar import get, maximum, minimum, put
from edgekv.kernels.cpu.softmax import fill

ZERO, HALF, OF_CENTRE = np.array([0, 0.5, CENTRE], np.float32)
REACHED, NOISE, LEAST = np.array([REACH, SIGN_NOISE, LEAST_VARIANCE], np.float32)


@score_loop
def _estimate(
    store: int, prepared: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int
) -> None:
    """Of all the blocks that tokens t..t + n are in, PER_BLOCK numbers each."""
    _estimate_blocks(store, prepared, rows, g, t // BLOCK, (t + n + BLOCK - 1) // BLOCK, s, gap, scratch)


@fast_jit
def _estimate_blocks(
    store: int, prepared: int, rows: int, g: int, block: int, end: int, s: int, gap: int, scratch: int
) -> None:
    x, of_head = numbers(store), g * get(numbers(store), KEY.n_blocks) + block
    _, _, _, words, sizes, lengths = parts_of(prepared, rows, get(x, KEY.width))
    estimate_blocks(
        *(words, sizes, lengths, rows, get(x, KEY.width)),
        get(x, KEY.centres) + of_head * CENTRES * get(x, KEY.width) // 2,
        *(get(x, KEY.centre_step) + 2 * CENTRES * of_head, get(x, KEY.deviation) + 8 * of_head),
        *(end - block, s, gap, scratch),
    )


@measure_loop
def _measure(store: int, prepared: int, rows: int, g: int, first: int, stop: int, scratch: int) -> None:
    """Multiplies the rows' lengths with what `reference.gather.deviations` finds in sampled blocks."""
    x = numbers(store)
    _, _, _, _, _, lengths_at = parts_of(prepared, rows, get(x, KEY.width))
    lengths, deviation = floats(lengths_at), halves(get(x, KEY.deviation))
    scores = scratch + NEAR_BYTES
    estimates = scores + 4 * rows * BLOCK
    sums = floats(estimates + 4 * rows * PER_BLOCK)  # of squares (rows,): found, then expected
    fill(sums, 0, 2 * rows, ZERO)
    start = (first + BLOCK - 1) // BLOCK
    n_whole = stop // BLOCK - start
    n = min(MOST_SAMPLES, n_whole)
    for i in range(n):
        block = start + i * n_whole // n
        scan_blocks(store, prepared, rows, g, block, 1, scores, BLOCK, scratch)
        _estimate_blocks(store, prepared, rows, g, block, block + 1, estimates, PER_BLOCK, scratch)
        for m in range(rows):
            for c in range(BLOCK // CENTRE):
                at = (g * get(x, KEY.n_blocks) + block) * (BLOCK // CENTRE) + c
                expected, found = get(lengths, m) * as_float(get(deviation, at)), ZERO
                added = minimum(expected * expected * HALF, REACHED * expected)
                near = get(floats(estimates), m * PER_BLOCK + 2 * c) - added
                for k in range(m * BLOCK + c * CENTRE, m * BLOCK + (c + 1) * CENTRE):
                    left = get(floats(scores), k) - near
                    found += left * left
                put(sums, m, get(sums, m) + found)
                put(sums, rows + m, get(sums, rows + m) + OF_CENTRE * expected * expected)
    scale = get(floats(get(x, KEY.key_scale)), g)
    for m in range(rows):
        if get(sums, rows + m) > ZERO:
            variance = get(sums, m) / (get(sums, rows + m) * scale * scale) - NOISE
            put(lengths, m, get(lengths, m) * np.sqrt(maximum(variance, LEAST)))


ESTIMATED_KEYS = dataclasses.replace(
    CENTRED,
    estimate=_estimate,
    measure=_measure,
    scratch=lambda codec, rows: NEAR_BYTES + 4 * rows * (BLOCK + PER_BLOCK + 2),
)
