"""Integers with linear scales: NumPy against the formulas element by element, Numba against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kernel_cases import (
    EITHER_PATH,
    EITHER_WAY,
    Case,
    awkward_rows,
    generator,
    inside,
    normal,
    pairs,
    poisoned_scores,
)

from edgekv.codecs.codec import Codec
from edgekv.codecs.ints import Int8, Symmetric4
from edgekv.kernels import cpu, reference
from edgekv.kernels.cpu import launch
from edgekv.kernels.interface import Segment
from edgekv.papers.h1b.codec import Int4
from edgekv.papers.kivi import KiviKeys, KiviValues

POISON, HUGE_F16 = 0x6B, 0x7BFF
F64 = npt.NDArray[np.float64]

# Every head size with few, many and odd numbers of tokens, on and off block borders, one row to many.
CASES = [
    Case(d=8, length=1, g=1, r=1, n=1, t0=0, s0=0),
    Case(d=12, length=65, g=2, r=5, n=1, t0=3, s0=5),
    Case(d=16, length=200, g=3, r=1, n=3, t0=64, s0=0),
    Case(d=64, length=63, g=1, r=8, n=1, t0=1, s0=5),
    Case(d=80, length=127, g=2, r=2, n=3, t0=0, s0=0),
    Case(d=96, length=2, g=3, r=4, n=1, t0=31, s0=5),
    Case(d=128, length=513, g=2, r=1, n=1, t0=3, s0=0),
    Case(d=256, length=64, g=1, r=7, n=1, t0=64, s0=5),
]
GROUPS = {64: 64, 80: 64, 128: 128}  # of head_dim: tokens that share a range
CODECS: dict[str, Callable[[int, int, int], Codec]] = {  # of heads, tokens, head_dim
    "int8": Int8,
    "4 bits": Symmetric4,
    "4 bits with a zero": Int4,
    "keys in 2 bits": lambda g, n, d: KiviKeys(g, -(-n // 128) * 128, d, 2, GROUPS.get(d, 32)),
    "keys in 4 bits": lambda g, n, d: KiviKeys(g, -(-n // 128) * 128, d, 4, GROUPS.get(d, 32)),
    "values in 2 bits": lambda g, n, d: KiviValues(g, n, d, 2, d),
    "values in 4 bits": lambda g, n, d: KiviValues(g, n, d, 4, d // 4),
}


def filled(codec: Codec, kernels: Any) -> Codec:
    """Bound to arrays whose untouched tokens decode to huge numbers."""
    poison = {"int8": POISON, "uint8": POISON, "uint16": HUGE_F16}
    codec.bind(
        {name: np.full(shape, poison[dtype], dtype) for name, (shape, dtype) in codec.layout().items()}, kernels
    )
    return codec


def unpacked(codes: npt.NDArray[np.uint8], bits: int) -> F64:
    """Codes of tokens (..., n_bytes), one element after the other."""
    parts = [codes >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
    return np.concatenate(parts, axis=-1).astype(np.float64)


def widened(bits: npt.NDArray[np.uint16]) -> F64:
    return bits.view(np.float16).astype(np.float64)


@pytest.mark.parametrize(("make", "top"), [(Int8, 127), (Symmetric4, 7)])
def test_symmetric_codes_are_as_specified(make: type[Int8], top: int) -> None:
    x, codec = awkward_rows(32, 12, 8), filled(make(1, 40, 12), reference)
    codec.encode(x, 3)
    codes, scale = codec.arrays["codes"], codec.arrays["scale"]
    levels = codes[0].astype(float) if top == 127 else unpacked(codes, 4)[0] - 8
    for t, row in enumerate(x[0], start=3):
        step, exact = float(widened(scale)[0, t]), float(np.abs(row).max() / np.float32(top))
        assert step == 65504 if exact > 65504 else exact <= step <= exact * (1 + 2**-10) + 2**-24
        expected = [round(float(v / np.float32(step))) if step else 0 for v in row]
        np.testing.assert_array_equal(levels[t], np.clip(expected, -top, top))
    outside = np.r_[0:3, 35:40]
    assert (codes[0, outside] == POISON).all()
    assert (scale[0, outside] == HUGE_F16).all()
    decoded = levels[3:35] * widened(scale)[0, 3:35, None]
    np.testing.assert_allclose(codec.decode(3, 35)[0], decoded, rtol=1e-6)


def test_codes_with_a_zero_point_are_as_specified() -> None:
    x, codec = awkward_rows(16, 24, 16), filled(Int4(1, 18, 24), reference)
    codec.encode(x, 1)
    codes, delta, zero = (codec.arrays[name][0] for name in ("codes", "delta", "zero"))
    levels, steps = unpacked(codes, 4), widened(delta)
    for t, row in enumerate(x[0], start=1):
        step, lo, hi = float(steps[t]), min(row.min(), np.float32(0)), max(row.max(), np.float32(0))
        exact = float(hi - lo) / 15
        assert step == 65504 if exact > 65504 else exact <= step <= exact * (1 + 2**-10) + 2**-24
        assert zero[t] == (round(float(-lo / np.float32(step))) if step else 0)
        expected = [round(float(v / np.float32(step))) + int(zero[t]) if step else 0 for v in row]
        np.testing.assert_array_equal(levels[t], np.clip(expected, 0, 15))
    assert (codes[[0, 17]] == POISON).all()
    p, out = np.eye(16, dtype=np.float32)[None], np.zeros((1, 16, 24), np.float32)
    reference.sums(codec, p, 1, 17, out)
    decoded = (levels[1:17] - zero[1:17, None]) * steps[1:17, None]
    np.testing.assert_allclose(out[0], decoded, rtol=1e-6)


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_codes_are_as_specified(bits: int) -> None:
    """Keys per channel of 32 tokens, and values per token of six channels: the same rule along other axes."""
    x, top, d = awkward_rows(32, 12, 8), 2**bits - 1, 12
    keys, values = (
        filled(KiviKeys(1, 96, d, bits, 32), reference),
        filled(KiviValues(1, 40, d, bits, 6), reference),
    )
    keys.encode(x, 32)
    values.encode(x, 3)
    a, b = keys.arrays, values.arrays
    key_codes, value_codes = unpacked(a["codes"], bits)[0, 32:64], unpacked(b["codes"], bits)[0, 3:35]
    step, low = widened(a["step"])[0, 1], widened(a["low"])[0, 1]
    for channel in range(d):
        check_range(x[0, :, channel], key_codes[:, channel], step[channel], low[channel], top)
    np.testing.assert_allclose(keys.decode(32, 64)[0], low + step * key_codes, rtol=1e-6)
    step, low = (widened(b[name])[0, :, 3:35].repeat(6, axis=0).T for name in ("step", "low"))
    for t in range(32):
        for span in (slice(0, 6), slice(6, 12)):
            check_range(x[0, t, span], value_codes[t, span], step[t, span][0], low[t, span][0], top)
    np.testing.assert_allclose(values.decode(3, 35)[0], low + step * value_codes, rtol=1e-6)
    assert (a["codes"][:, np.r_[0:32, 64:96]] == POISON).all()
    assert (b["codes"][:, np.r_[0:3, 35:40]] == POISON).all()
    for end in (a["step"], a["low"], b["step"].transpose(0, 2, 1), b["low"].transpose(0, 2, 1)):
        assert (end[:, [0, -1]] == HUGE_F16).all()


def check_range(x: npt.NDArray[np.float32], codes: F64, step: float, low: float, top: int) -> None:
    """Elements that share a range: low and step as specified, and every code the nearest."""
    least = min(max(float(x.min()), -65504.0), 65504.0)
    assert abs(low - least) <= abs(least) * 2**-11 + 2**-25
    exact = max(float(x.max() - np.float32(low)), 0) / top
    assert step == 65504 if exact > 65504 else exact * (1 - 1e-6) <= step <= exact * (1 + 2**-10) + 2**-24
    if step:
        position = (x - np.float32(low)) / np.float32(step)
        np.testing.assert_array_equal(codes, np.clip(np.rint(position), 0, top))


@pytest.mark.parametrize(
    ("name", "d", "min_parallel_work"), pairs(name=list(CODECS), d=[8, 12, 80, 128], work=EITHER_WAY)
)
def test_numba_encodes_to_the_same_bits(
    name: str, d: int, min_parallel_work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)
    random = normal(np.random.default_rng(d), 2, 128, d) * 3
    for x in (random, np.tile(awkward_rows(32, d, 8), (1, 4, 1))):
        t0 = 0 if "keys" in name else 7
        codecs = [filled(CODECS[name](len(x), 150, d), kernels) for kernels in (reference, cpu)]
        for codec in codecs:
            codec.kernels.encode(codec, x, t0)
        for array, expected in codecs[0].arrays.items():
            np.testing.assert_array_equal(codecs[1].arrays[array], expected)


@pytest.mark.parametrize(
    ("name", "case", "min_parallel_work"), pairs(name=list(CODECS), case=CASES, work=EITHER_WAY), ids=str
)
def test_numba_computes_the_same(
    name: str, case: Case, min_parallel_work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)
    rng, codec = generator(case), filled(CODECS[name](case.g, case.capacity, case.d), reference)
    x, q = normal(rng, case.g, codec.capacity, case.d), normal(rng, case.g, case.m, case.d)
    if "keys" in name:
        codec.encode(x, 0)
    else:
        codec.encode(x[:, : case.length], case.t0)
    s, expected = poisoned_scores(case, case.g == 1), poisoned_scores(case, True)
    p, out = poisoned_scores(case, case.g == 1), normal(rng, case.g, case.m, case.d)
    p[:, :, inside(case)] = rng.random((case.g, case.m, case.length), np.float32)
    sums = out.copy()
    for backend, scores, result in ((reference, expected, sums), (cpu, s, out)):
        if codec.kind != "int4":  # of values alone
            backend.scores(codec, q, case.t0, case.t1, scores[:, :, inside(case)])
        backend.sums(codec, p[:, :, inside(case)], case.t0, case.t1, result)
    largest = float(np.abs(x).max())  # rounding errors are relative to the sums over codes
    for got, wanted, weights in ((s, expected, np.abs(q)), (out, sums, p[:, :, inside(case)])):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * weights.sum(axis=2).max() * largest)


@EITHER_PATH
@pytest.mark.parametrize("n", [1, 3])
def test_keys_in_long_groups_go_with_any_values(
    n: int, min_parallel_work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)
    rng, d = np.random.default_rng(n), 24
    x, q = normal(rng, 2, 384, d), normal(rng, 6, n, d)
    keys, *others = (
        filled(codec, reference)
        for codec in (KiviKeys(2, 384, d, 2, 128), Int8(2, 384, d), KiviValues(2, 384, d, 4, 8))
    )
    for codec in (keys, *others):
        codec.encode(x, 0)
    visible = np.zeros(n, np.int64), np.arange(300 - n, 300) + 1
    for values in others:
        results = []
        for backend in (cpu, reference):
            out = np.full(q.shape, np.nan, np.float32)
            backend.attend(q, [Segment(keys, values, 70, 370)], visible, out)
            results.append(out)
        np.testing.assert_allclose(*results, atol=1e-4)
