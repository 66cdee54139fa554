"""Every codec: kernels store the bits that its `encode` does and read what it says; f16 and q8 by hand."""

from __future__ import annotations

import struct
from typing import Any

import numba
import numpy as np
import pytest
from kernel_cases import EITHER_WAY, add_values, assert_close, awkward_rows, normal
from test_attend import PAIRS, PROBLEMS, Problem, filled

from edgekv.codecs.f16 import F16
from edgekv.codecs.ints import Int8
from edgekv.kernels import cpu, reference
from edgekv.kernels.cpu import emit, scalar
from edgekv.kernels.cpu.compile import intrinsic
from edgekv.kernels.cpu.loops import kernels_of

SPECIAL = [0.0, -0.0, 1.0, 65504.0, 65519.0, 65520.0, -1e6, 6e-8, 3e-8, 2.9802322e-8, 2.98e-8, -6.1e-5, 1e-30]
TIES = [2048.0 + i + 0.5 * j for i in (0, 1, 2, 3) for j in (0, 1, 2)]
BOUNDED = {"f16", "rounded"}  # kinds of what large numbers do not fit in
# Of the largest: queries in two bytes; a weight on the border of two 8-bit codes may take the other.
BOUNDS = {"centred_planes": 1e-4, "interleaved": 2e-3}
ODD = Problem(g=2, r=5, d=20, length=128, n=1)  # a vector of channels, or none, and what is left of them
EACH = [
    pytest.param(name, p, EITHER_WAY[(i + k) % 2], id=f"{name}-{k}")
    for i, name in enumerate(PAIRS)
    for k, p in enumerate((PROBLEMS[i % len(PROBLEMS)], PROBLEMS[1] if "vgroup" in name else ODD))
]


@pytest.mark.parametrize(("name", "p", "way"), EACH, indirect=["way"])
def test_kernels_store_the_same_bits(name: str, p: Problem, way: str) -> None:
    x = 3 * normal(np.random.default_rng(0), p.g, p.length, p.d) + normal(np.random.default_rng(1), p.g, 1, p.d)
    stored = []
    for kernels in (reference, cpu):
        pair = PAIRS[name](p)
        for codec in pair:
            filled(codec, np.zeros_like(x))
            given = x.copy()
            if codec.kind not in BOUNDED:
                given[:, :32] = awkward_rows(32, p.d, 8)
            for a, b in ((0, 64), (64, p.length)):
                if a < b:
                    kernels.encode(codec, np.ascontiguousarray(given[:, a:b]), a)
        if kernels is cpu and all("cpu" in codec.backends and kernels_of(codec).put for codec in pair):
            cpu.append(*pair, *[np.ascontiguousarray(x[:, 40:43])] * 2, 40)  # the same tokens once more
        stored.append([codec.arrays for codec in pair])
    for here, there in zip(*stored, strict=True):
        for array, expected in here.items():
            np.testing.assert_array_equal(there[array], expected, err_msg=array)


@pytest.mark.parametrize(("name", "p", "way"), EACH, indirect=["way"])
def test_kernels_read_what_it_says(name: str, p: Problem, way: str) -> None:
    """Kernels read some tokens, into a slice of a longer array, and write nothing beside it."""
    rng, t0, t1, rows = np.random.default_rng(2), 5, p.length - 3, p.r * p.n
    keys, values = (filled(codec, normal(rng, p.g, p.length, p.d)) for codec in PAIRS[name](p))
    q = normal(rng, p.g, rows, p.d)
    s = np.full((p.g, rows + 1, t1 - t0 + 7), np.nan, np.float32)
    part = s[:, :rows, 4 : 4 + t1 - t0]
    cpu.scores(keys, q, t0, t1, part)
    assert_close(part, keys.scores(q, t0, t1), BOUNDS.get(keys.kind, 5e-6))
    assert np.isfinite(s).sum() == part.size
    part[:] = rng.random(part.shape, np.float32) ** 4
    before = normal(rng, p.g, rows, p.d)
    out = before.copy()
    add_values(cpu, values, part, t0, t1, out)
    assert_close(out, before + values.sums(part, t0, t1), BOUNDS.get(values.kind, 5e-6))


def halves(bits: np.ndarray) -> Any:
    """Returns the codec of float16 bits (G, tokens, D)."""
    codec = F16(*bits.shape)
    codec.bind({"half": bits}, cpu)
    return codec


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_halves_are_the_nearest_even(kernels: Any) -> None:
    finite = [x for x in SPECIAL + TIES if abs(x) < 65520]
    store = np.full((1, len(finite), 1), 0xABCD, np.uint16)
    kernels.encode(halves(store), np.array(finite, np.float32).reshape(1, -1, 1), 0)
    assert store.ravel().tolist() == [struct.unpack("<H", struct.pack("<e", x))[0] for x in finite]
    kernels.encode(halves(store[:, :1]), np.full((1, 1, 1), np.nan, np.float32), 0)
    assert np.isnan(store.view(np.float16)[0, 0])


def test_every_half_is_read() -> None:
    """One token at a time has weight 1, so that infinities and NaNs stay where they are."""
    values = np.arange(1 << 16, dtype=np.uint16).reshape(1, 256, 256)
    for t in range(256):
        out = np.zeros((1, 1, 256), np.float32)
        add_values(cpu, halves(values), np.ones((1, 1, 1), np.float32), t, t + 1, out)
        np.testing.assert_array_equal(out[0, 0], values[0, t].view(np.float16).astype(np.float32))


def test_bytes_are_levels_times_a_scale() -> None:
    x, codec = awkward_rows(32, 12, 8), Int8(1, 40, 12)
    poison = {"codes": np.full((1, 40, 12), 0x6B, np.int8), "scale": np.full((1, 40), 0x7BFF, np.uint16)}
    codec.bind({name: array.copy() for name, array in poison.items()}, reference)
    codec.encode(x, 3)
    scale = codec.arrays["scale"].view(np.float16).astype(float)
    for t, row in enumerate(x[0], start=3):
        step, exact = float(scale[0, t]), float(np.abs(row).max() / np.float32(127))
        assert step == 65504 if exact > 65504 else exact <= step <= exact * (1 + 2**-10) + 2**-24
        expected = [round(float(v / np.float32(step))) if step else 0 for v in row]
        np.testing.assert_array_equal(codec.arrays["codes"][0, t], np.clip(expected, -127, 127))
    for name, array in poison.items():
        np.testing.assert_array_equal(np.delete(codec.arrays[name] - array, np.s_[3:35], axis=1), 0)
    decoded = codec.arrays["codes"][0, 3:35] * scale[0, 3:35, None]
    np.testing.assert_allclose(codec.decode(3, 35)[0], decoded, rtol=1e-6)


def test_conversions_without_processor_support(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs what an x86 without F16C runs: every float16, and float32 of every exponent."""
    monkeypatch.setattr(scalar, "HAS_INSTRUCTIONS", False)

    @intrinsic
    def widen_eight(context: Any, bits: Any, x: Any, i: Any) -> Any:
        def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
            source, target = (emit.address(context, b, *each) for each in ((bits, args[::2]), (x, args[1:])))
            emit.store(b, scalar.widen(b, emit.load(b, emit.vector(emit.I16, 8), source)), target)
            return context.get_dummy_value()

        return numba.types.none(bits, x, numba.types.intp), build

    @numba.njit
    def widen(bits, scalars, vectors):
        for i in range(len(bits)):
            scalars[i] = scalar.as_float(bits[i])
        for i in range(0, len(bits), 8):
            widen_eight(bits, vectors, i)

    @numba.njit
    def narrow(x, bits):
        for i in range(len(x)):
            bits[i] = scalar.float_to_half(x[i])

    bits = np.arange(1 << 16, dtype=np.uint16)
    scalars, vectors = np.zeros((2, 1 << 16), np.float32)
    widen(bits, scalars, vectors)
    np.testing.assert_array_equal(scalars, bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(vectors, scalars)
    random = np.random.default_rng(0).integers(0, 1 << 32, 100_000, np.uint32).view(np.float32)
    x = np.concatenate([np.float32([*TIES, *SPECIAL, np.inf, -np.inf, np.nan]), random])
    narrowed = np.zeros(x.shape, np.uint16)
    narrow(x, narrowed)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(narrowed.view(np.float16), expected)
    np.testing.assert_array_equal(np.signbit(narrowed.view(np.float16)), np.signbit(expected))
