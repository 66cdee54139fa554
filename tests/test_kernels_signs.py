"""Sign sketches: NumPy against counting signs one by one, Numba against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kernel_cases import (
    SIGN_BITS,
    Case,
    cases,
    codec,
    either_way,
    generator,
    inside,
    normal,
    own,
    poisoned_scores,
)

from edgekv.kernels import cpu, reference
from edgekv.kernels.cpu import launch
from edgekv.papers.h1b import codec as plain
from edgekv.papers.h1b.codec import pack_sign_rows

CASES = cases((*SIGN_BITS, 192))
SMALL = Case(d=128, length=70, g=2, r=3, n=2, t0=60, s0=2)
SCALES = 1 / (256 * np.geomspace(0.01, 0.5, 24 * 24, dtype=np.float32))
POISON = np.uint64(0xABABABABABABABAB)


def scales(case: Case) -> npt.NDArray[np.float32]:
    """Another scale for each head and row."""
    return SCALES[: case.g * case.m].reshape(case.g, case.m)


def test_numpy_packs_one_bit_per_sign() -> None:
    rng = np.random.default_rng(0)
    x = normal(rng, 2, 70, 128)
    x[0, 0, :3] = 0.0, -0.0, np.nan
    codes = np.full((2, 3, 2, 64), POISON)
    own(reference, "signs").pack_signs(x, codes, 60)
    expected = np.full_like(codes, POISON)
    for g, i, w in np.ndindex(2, 70, 2):
        word = sum(1 << j for j in range(64) if x[g, i, 64 * w + j] >= 0)
        expected[g, (60 + i) // 64, w, (60 + i) % 64] = word
    np.testing.assert_array_equal(codes, expected)
    assert int(codes[0, 0, 0, 60]) & 7 == 0b011  # -0 counts as positive, NaN does not
    np.testing.assert_array_equal(pack_sign_rows(x)[1, 69], codes[1, 2, :, 1])


def test_numpy_scores_are_products_of_signs() -> None:
    case, rng = SMALL, generator(SMALL)
    q, keys = normal(rng, case.g, case.m, case.d), normal(rng, case.g, case.length, case.d)
    codes = np.full((case.g, case.capacity // 64, case.d // 64, 64), POISON)
    own(reference, "signs").pack_signs(keys, codes, case.t0)
    s = poisoned_scores(case, contiguous=True)
    scale = scales(case)
    plain.scores_signs(pack_sign_rows(q), codes, case.t0, case.t1, scale, s, case.s0)
    expected = np.full(s.shape, np.nan)
    for g, m, t in np.ndindex(case.g, case.m, case.length):
        expected[g, m, case.s0 + t] = scale[g, m] * (np.sign(q[g, m]) * np.sign(keys[g, t])).sum()
    np.testing.assert_allclose(s, expected, rtol=1e-6)


@either_way(CASES)
def test_numba_equals_numpy_exactly(case: Case, min_parallel_work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)
    rng = generator(case)
    keys, q = normal(rng, case.g, case.length, case.d), normal(rng, case.g, case.m, case.d)
    keys.reshape(-1)[:3] = 0.0, -0.0, np.nan
    codes = np.full((2, case.g, case.capacity // 64, case.d // 64, 64), POISON)
    own(reference, "signs").pack_signs(keys, codes[0], case.t0)
    own(cpu, "signs").pack_signs(keys, codes[1], case.t0)
    np.testing.assert_array_equal(codes[1], codes[0])
    words = pack_sign_rows(q)

    tau = np.linspace(0.01, 0.5, case.g * case.m, dtype=np.float32).reshape(case.g, case.m)
    keys = sketch(codes[0], tau, np.eye(case.d, dtype=np.float32))
    s, expected = poisoned_scores(case, case.g == 1), poisoned_scores(case, True)
    plain.scores_signs(words, codes[0], case.t0, case.t1, 1 / (case.d * tau), expected, case.s0)
    cpu.scores(keys, q, case.t0, case.t1, s[:, :, inside(case)])
    np.testing.assert_array_equal(s, expected)
    assert np.isfinite(s[:, :, inside(case)]).all()


def sketch(
    codes: npt.NDArray[np.uint64], tau: npt.NDArray[np.float32], projection: npt.NDArray[np.float32]
) -> Any:
    """A codec of sign sketches of x times the transpose of ``projection`` (bits, head_dim)."""
    (g, blocks, _, block), (bits, head_dim) = codes.shape, projection.shape
    centre = np.zeros((g, head_dim), np.float32)
    parameters = {"bits": bits, "tau": tau, "projection": projection, "centre": centre}
    return codec("signs", (g, blocks * block, head_dim), {"signs": codes}, **parameters)
