"""Integers with linear scales of the papers: NumPy against the formulas, element by element."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kernel_cases import (
    awkward_rows,
)

from edgekv.codecs.codec import Codec
from edgekv.kernels import reference
from edgekv.papers.int4 import Int4
from edgekv.papers.kivi import KiviKeys, KiviValues

POISON, HUGE_F16 = 0x6B, 0x7BFF
F64 = npt.NDArray[np.float64]


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
    decoded = (levels[1:17] - zero[1:17, None]) * steps[1:17, None]
    np.testing.assert_allclose(codec.decode(1, 17)[0], decoded, rtol=1e-6)


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
