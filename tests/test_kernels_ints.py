"""Integers with linear scales: NumPy against the formulas element by element, Numba against NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from kernel_cases import (
    EITHER_PATH,
    Case,
    awkward_rows,
    bound,
    generator,
    inside,
    normal,
    own,
    poisoned_scores,
)

from edgekv.kernels import cpu, reference
from edgekv.kernels.contract.segment import Segment
from edgekv.kernels.cpu import launch
from edgekv.kvcache.codec_ints import Symmetric, SymmetricKeys, SymmetricValues
from edgekv.papers.kivi.codec import KiviKeys, KiviValues

BACKENDS = pytest.mark.parametrize("backend", [cpu, reference], ids=["numba", "numpy"])
POISON, HUGE_F16 = 0xAB, 0x7BFF
KEYS, VALUES = 32, 1  # tokens that lie next to each other

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

Store = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16]]
Kivi = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16], npt.NDArray[np.uint16]]


def sym_store(g: int, capacity: int, d: int, bits: int, block: int) -> Store:
    """codes, scale; decoding an untouched token gives huge numbers."""
    codes = np.full((g, -(-capacity // block), d * bits // 8, block), POISON, np.uint8)
    return codes, np.full((g, capacity), HUGE_F16, np.uint16)


def kivi_keys(g: int, groups: int, d: int, bits: int, group: int) -> Kivi:
    """codes, step, low."""
    ends = np.full((2, g, groups, d), HUGE_F16, np.uint16)
    return np.full((g, groups, d * bits // 8, group), POISON, np.uint8), ends[0], ends[1]


def kivi_values(g: int, capacity: int, d: int, bits: int, spans: int) -> Kivi:
    ends = np.full((2, g, spans, capacity), HUGE_F16, np.uint16)
    return np.full((g, capacity, d * bits // 8), POISON, np.uint8), ends[0], ends[1]


def sym_codec(store: Store, d: int) -> Symmetric:
    codes, scale = store
    kind = SymmetricValues if codes.shape[3] == VALUES else SymmetricKeys
    return bound(kind(*scale.shape, d, 8 * codes.shape[2] // d), codes=codes, scale=scale)


def kivi_keys_codec(store: Kivi) -> KiviKeys:
    codes, step, low = store
    (g, groups, n_bytes, group), d = codes.shape, step.shape[2]
    return bound(KiviKeys(g, groups * group, d, 8 * n_bytes // d, group), codes=codes, step=step, low=low)


def kivi_values_codec(store: Kivi, d: int) -> KiviValues:
    codes, step, low = store
    g, capacity, n_bytes = codes.shape
    span = d // step.shape[1]
    return bound(KiviValues(g, capacity, d, 8 * n_bytes // d, span), codes=codes, step=step, low=low)


def unpacked(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.float64]:
    """Codes of tokens (..., n_bytes), one element after the other."""
    parts = [codes >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
    return np.concatenate(parts, axis=-1).astype(np.float64)


def in_order(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Blocks (G, blocks, n_bytes, B) as tokens (G, T, n_bytes)."""
    g, blocks, n_bytes, block = codes.shape
    return codes.transpose(0, 1, 3, 2).reshape(g, blocks * block, n_bytes)


def widened(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float64]:
    return bits.view(np.float16).astype(np.float64)


def sym_decoded(store: Store, bits: int) -> npt.NDArray[np.float64]:
    codes, scale = store
    levels = unpacked(in_order(codes), bits)[:, : scale.shape[1]]
    return (levels - 2 ** (bits - 1)) * widened(scale)[..., None]


@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_codes_are_as_specified(bits: int) -> None:
    x, top = awkward_rows(32, 12, 8), 2 ** (bits - 1) - 1
    codes, scale = store = sym_store(1, 40, 12, bits, KEYS)
    reference.encode_sym(x, *store, 3)
    levels = unpacked(in_order(codes), bits)[0] - (top + 1)
    for t, row in enumerate(x[0], start=3):
        step, exact = float(widened(scale)[0, t]), float(np.abs(row).max() / np.float32(top))
        assert step == 65504 if exact > 65504 else exact <= step <= exact * (1 + 2**-10) + 2**-24
        for v, level in zip(row, levels[t], strict=True):
            expected = round(float(v / np.float32(step))) if step else 0
            assert level == min(max(expected, -top), top)
    outside = np.r_[0:3, 35:40]
    assert (in_order(codes)[0, outside] == POISON).all()
    assert (scale[0, outside] == HUGE_F16).all()


@BACKENDS
@pytest.mark.parametrize(("bits", "bound"), [(4, 0.5), (8, 0.5)])
def test_symmetric_error_is_half_a_step(backend: object, bits: int, bound: float) -> None:
    x = normal(np.random.default_rng(0), 3, 500, 64) + 0.5
    store = sym_store(3, 500, 64, bits, VALUES)
    backend.encode_sym(x, *store, 0)
    in_steps = np.abs(sym_decoded(store, bits) - x) / widened(store[1])[..., None]
    assert 0.49 < in_steps.max() <= bound + 1e-3


@BACKENDS
@pytest.mark.parametrize("block", [KEYS, VALUES])
def test_zeros_decode_to_zeros(backend: object, block: int) -> None:
    store = sym_store(1, 1, 16, 4, block)
    backend.encode_sym(np.zeros((1, 1, 16), np.float32), *store, 0)
    assert store[1][0, 0] == 0
    assert not sym_decoded(store, 4)[0, 0].any()


@EITHER_PATH
@pytest.mark.parametrize("block", [KEYS, VALUES])
@pytest.mark.parametrize("bits", [4, 8])
def test_numba_encodes_symmetric_codes_to_the_same_bits(
    bits: int, block: int, min_parallel_work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)
    for d in (8, 12, 80, 128):
        for x in (normal(np.random.default_rng(d), 2, 100, d) * 3, awkward_rows(32, d, 8)):
            stores = [sym_store(len(x), 130, d, bits, block) for _ in range(2)]
            reference.encode_sym(x, *stores[0], 7)
            cpu.encode_sym(x, *stores[1], 7)
            for actual, expected in zip(stores[1], stores[0], strict=True):
                np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_scores_and_sums_are_those_of_the_decoded_tokens(bits: int) -> None:
    rng, d = np.random.default_rng(0), 12
    x, q, p = normal(rng, 2, 70, d), normal(rng, 2, 5, d), rng.random((2, 5, 74), np.float32)
    keys, values = sym_store(2, 90, d, bits, KEYS), sym_store(2, 90, d, bits, VALUES)
    reference.encode_sym(x, *keys, 3)
    reference.encode_sym(x, *values, 3)
    np.testing.assert_array_equal(sym_decoded(keys, bits)[:, 3:73], sym_decoded(values, bits)[:, 3:73])
    s, out = np.full((2, 5, 74), np.nan, np.float32), normal(rng, 2, 5, d)
    expected = out + np.einsum("gmt,gtd->gmd", p[:, :, 2:72], sym_decoded(values, bits)[:, 3:73])
    reference.scores(sym_codec(keys, d), q, 3, 73, s[:, :, 2:72])
    reference.sums(sym_codec(values, d), p[:, :, 2:72], 3, 73, out)
    np.testing.assert_allclose(s[:, :, 2:72], q @ sym_decoded(keys, bits)[:, 3:73].transpose(0, 2, 1), atol=1e-4)
    np.testing.assert_allclose(out, expected, atol=1e-4)


@EITHER_PATH
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numba_computes_the_same_on_symmetric_codes(
    case: Case, bits: int, min_parallel_work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)
    rng = generator(case)
    x, q = normal(rng, case.g, case.length, case.d), normal(rng, case.g, case.m, case.d)
    keys, values = (sym_store(case.g, case.capacity, case.d, bits, block) for block in (KEYS, VALUES))
    reference.encode_sym(x, *keys, case.t0)
    reference.encode_sym(x, *values, case.t0)
    s, expected = poisoned_scores(case, case.g == 1), poisoned_scores(case, True)
    for backend, scores in ((reference, expected), (cpu, s)):
        backend.scores(sym_codec(keys, case.d), q, case.t0, case.t1, scores[:, :, inside(case)])
    step = float(widened(keys[1])[:, case.t0 : case.t1].max())
    assert_equal_up_to_codes(s, expected, np.abs(q).sum(axis=2).max() * step * 2**bits)
    p, out = weights(case, rng), normal(rng, case.g, case.m, case.d)
    sums = out.copy()
    for backend, result in ((reference, sums), (cpu, out)):
        backend.sums(sym_codec(values, case.d), p[:, :, inside(case)], case.t0, case.t1, result)
    assert_equal_up_to_codes(out, sums, p[:, :, inside(case)].sum(axis=2).max() * step * 2**bits)


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_codes_are_as_specified(bits: int) -> None:
    """Keys per channel of 32 tokens, and values per token of six channels: the same rule along other axes."""
    x, top, d = awkward_rows(32, 12, 8), 2**bits - 1, 12
    keys, values = kivi_keys(1, 3, d, bits, 32), kivi_values(1, 40, d, bits, 2)
    own(reference, "kivi_keys").encode_kivi_keys(x, *keys, 32)
    own(reference, "kivi_values").encode_kivi_values(x, *values, 3)
    key_codes, value_codes = unpacked(in_order(keys[0]), bits)[0, 32:64], unpacked(values[0], bits)[0, 3:35]
    for channel in range(d):
        ends = widened(keys[1])[0, 1, channel], widened(keys[2])[0, 1, channel]
        check_range(x[0, :, channel], key_codes[:, channel], *ends, top)
    for t in range(32):
        for i, span in enumerate((slice(0, 6), slice(6, 12))):
            ends = widened(values[1])[0, i, 3 + t], widened(values[2])[0, i, 3 + t]
            check_range(x[0, t, span], value_codes[t, span], *ends, top)
    assert (keys[0][:, [0, 2]] == POISON).all()
    assert (values[0][:, np.r_[0:3, 35:40]] == POISON).all()
    for end in (*keys[1:], values[1].transpose(0, 2, 1), values[2].transpose(0, 2, 1)):
        assert (end[:, [0, -1]] == HUGE_F16).all()


def check_range(
    x: npt.NDArray[np.float32], codes: npt.NDArray[np.float64], step: float, low: float, top: int
) -> None:
    """Elements that share a range: low and step as specified, and every code the nearest."""
    least = min(max(float(x.min()), -65504.0), 65504.0)
    assert abs(low - least) <= abs(least) * 2**-11 + 2**-25
    exact = max(float(x.max() - np.float32(low)), 0) / top
    assert step == 65504 if exact > 65504 else exact * (1 - 1e-6) <= step <= exact * (1 + 2**-10) + 2**-24
    if step:
        position = (x - np.float32(low)) / np.float32(step)
        np.testing.assert_array_equal(codes, np.clip(np.rint(position), 0, top))


@EITHER_PATH
@pytest.mark.parametrize("bits", [2, 4])
def test_numba_encodes_kivi_codes_to_the_same_bits(
    bits: int, min_parallel_work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)
    for d, group, spans in ((8, 32, 1), (12, 64, 3), (80, 32, 5), (128, 64, 4)):
        random = normal(np.random.default_rng(d), 2, 128, d) * 3
        for x in (random, np.tile(awkward_rows(32, d, 8), (1, 2, 1))):
            stores = [kivi_keys(len(x), 6, d, bits, group) for _ in range(2)]
            own(reference, "kivi_keys").encode_kivi_keys(x, *stores[0], group)
            own(cpu, "kivi_keys").encode_kivi_keys(x, *stores[1], group)
            tokens = [kivi_values(len(x), 150, d, bits, spans) for _ in range(2)]
            own(reference, "kivi_values").encode_kivi_values(x, *tokens[0], 9)
            own(cpu, "kivi_values").encode_kivi_values(x, *tokens[1], 9)
            for actual, expected in zip((*stores[1], *tokens[1]), (*stores[0], *tokens[0]), strict=True):
                np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_scores_and_sums_are_those_of_the_decoded_tokens(bits: int) -> None:
    rng, d = np.random.default_rng(0), 24
    x, q, p = normal(rng, 2, 64, d), normal(rng, 2, 5, d), rng.random((2, 5, 64), np.float32)
    keys, values = kivi_keys(2, 3, d, bits, 32), kivi_values(2, 70, d, bits, 3)
    own(reference, "kivi_keys").encode_kivi_keys(x, *keys, 0)
    own(reference, "kivi_values").encode_kivi_values(x, *values, 3)
    step, low = (np.repeat(widened(end), 32, axis=1)[:, 5:60] for end in keys[1:])
    decoded = unpacked(in_order(keys[0]), bits)[:, 5:60] * step + low
    s = np.full((2, 5, 57), np.nan, np.float32)
    reference.scores(kivi_keys_codec(keys), q, 5, 60, s[:, :, 2:])
    np.testing.assert_allclose(s[:, :, 2:], q @ decoded.transpose(0, 2, 1), atol=1e-4)
    step, low = (np.repeat(widened(end), 8, axis=1).transpose(0, 2, 1)[:, 3:67] for end in values[1:])
    decoded, out = unpacked(values[0], bits)[:, 3:67] * step + low, normal(rng, 2, 5, d)
    expected = out + p @ decoded
    reference.sums(kivi_values_codec(values, d), p, 3, 67, out)
    np.testing.assert_allclose(out, expected, atol=1e-4)


@EITHER_PATH
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numba_computes_the_same_on_kivi_codes(
    case: Case, bits: int, min_parallel_work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)
    rng, group = generator(case), {64: 64, 80: 64, 128: 128}.get(case.d, 32)
    groups, spans = -(-case.t1 // group), 4 if case.d % 64 == 0 else 1
    x, q = normal(rng, case.g, groups * group, case.d), normal(rng, case.g, case.m, case.d)
    keys, values = (
        kivi_keys(case.g, groups + 1, case.d, bits, group),
        kivi_values(case.g, case.capacity, case.d, bits, spans),
    )
    own(reference, "kivi_keys").encode_kivi_keys(x, *keys, 0)
    own(reference, "kivi_values").encode_kivi_values(x[:, : case.length], *values, case.t0)
    s, expected = poisoned_scores(case, case.g == 1), poisoned_scores(case, True)
    for backend, scores in ((reference, expected), (cpu, s)):
        backend.scores(kivi_keys_codec(keys), q, case.t0, case.t1, scores[:, :, inside(case)])
    assert_equal_up_to_codes(s, expected, np.abs(q).sum(axis=2).max() * np.abs(x).max())
    p, out = weights(case, rng), normal(rng, case.g, case.m, case.d)
    sums = out.copy()
    for backend, result in ((reference, sums), (cpu, out)):
        backend.sums(kivi_values_codec(values, case.d), p[:, :, inside(case)], case.t0, case.t1, result)
    assert_equal_up_to_codes(out, sums, p[:, :, inside(case)].sum(axis=2).max() * np.abs(x).max())


@EITHER_PATH
@pytest.mark.parametrize("n", [1, 3])
def test_keys_in_long_groups_go_with_any_values(
    n: int, min_parallel_work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention walks blocks of the longer of two codecs: here 128 tokens, from the middle of one on."""
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)
    rng, d = np.random.default_rng(n), 24
    x, q = normal(rng, 2, 384, d), normal(rng, 6, n, d)
    keys, rows, spans = kivi_keys(2, 3, d, 2, 128), sym_store(2, 384, d, 8, VALUES), kivi_values(2, 384, d, 4, 3)
    own(reference, "kivi_keys").encode_kivi_keys(x, *keys, 0)
    reference.encode_sym(x, *rows, 0)
    own(reference, "kivi_values").encode_kivi_values(x, *spans, 0)
    visible = np.zeros(n, np.int64), np.arange(300 - n, 300) + 1
    for values in (sym_codec(rows, d), kivi_values_codec(spans, d)):
        results = []
        for backend in (cpu, reference):
            out = np.full(q.shape, np.nan, np.float32)
            backend.attend(q, [Segment(kivi_keys_codec(keys), values, 70, 370)], visible, out)
            results.append(out)
        np.testing.assert_allclose(*results, atol=1e-4)


def weights(case: Case, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    p = poisoned_scores(case, contiguous=case.g == 1)
    p[:, :, inside(case)] = rng.random((case.g, case.m, case.length), np.float32)
    return p


def assert_equal_up_to_codes(actual: npt.ArrayLike, expected: npt.ArrayLike, magnitude: float) -> None:
    """Rounding errors are relative to the sums over codes, before the middle or low end is taken back."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * float(magnitude))
