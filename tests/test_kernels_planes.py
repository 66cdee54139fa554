"""Keys and values in planes, and interleaved values: NumPy against float64 by hand, Numba against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kernel_cases import (
    Case,
    assert_close,
    cases,
    codec,
    either_way,
    generator,
    inside,
    normal,
    of_heads,
    poisoned_scores,
)

from edgekv.codecs import planes as plain
from edgekv.codecs.planes import CENTRE, CENTRES, GAUSS_STEP, GROUPS, Rotation, place_of, runs_of_heads
from edgekv.codecs.planes import cpu as compiled
from edgekv.kernels import cpu, reference
from edgekv.kernels.cpu import launch
from edgekv.kernels.interface import Kernels

BLOCK = 64
F64 = npt.NDArray[np.float64]
CASES = cases((64, 128, 192))
SMALL = Case(d=128, length=150, g=2, r=3, n=2, t0=64, s0=2)
BACKENDS = pytest.mark.parametrize("backend", [reference, cpu], ids=["numpy", "numba"])


def encoders(backend: Kernels) -> Any:
    return compiled if backend is cpu else plain


class Store:
    """Arrays for `capacity` tokens, poisoned: what is not written shows."""

    def __init__(self, case: Case, bits: int = 2, k_bits: int = 1) -> None:
        g, c, d = case.g, case.capacity, case.d
        self.bits = k_bits + np.arange(g) % 2 if k_bits < 4 else np.full(g, 4)
        self.planes = np.full((self.bits.sum(), c // BLOCK, GROUPS, d // 8, 16), 0xAB, np.uint8)
        self.scale = np.full((g, c), 0x7E00, np.uint16)  # NaN
        self.centres = np.full((g, c // BLOCK, CENTRES, d // 2), 0xAB, np.uint8)
        self.centre_step = np.full((g, c // BLOCK, CENTRES), 0x7E00, np.uint16)
        self.bits = self.bits.astype(np.int64)
        self.value_scale = self.scale.copy()
        self.quads = np.full((g, c // BLOCK, 2 * bits, d, 4), 0xAB, np.uint8)

    @property
    def keys(self) -> tuple[npt.NDArray[Any], ...]:
        return self.planes, self.scale, self.centres, self.centre_step

    def codecs(self, case: Case, bits: int) -> tuple[Any, Any]:
        """Keys in planes around centres, and interleaved values, for the kernels."""
        shape, rotation = (case.g, case.capacity, case.d), Rotation(case.d, case.d, seed=1)
        names = ("planes", "scale", "centres", "centre_step")
        key_scale = np.linspace(0.8, 1, case.g, dtype=np.float32)
        keys = codec(
            *("centred_planes", shape, dict(zip(names, self.keys, strict=True))),
            **of_heads(self.bits),
            **{"width": case.d, "key_scale": key_scale, "rotation": rotation},
            query_factors=np.exp2(np.random.default_rng(6).integers(-1, 2, (case.g, case.d))).astype(np.float32),
        )
        codes = self.quads.reshape(case.g * bits, -1, 2, case.d, 4)
        arrays = {"codes": codes, "scale": self.value_scale}
        return keys, codec("interleaved", shape, arrays, **of_heads(np.full(case.g, bits)), rotation=rotation)


def filled(backend: Kernels, case: Case, bits: int = 2, k_bits: int = 1) -> tuple[Store, npt.NDArray[np.float32]]:
    """Every token of the capacity stored, keys with a drift that centres take; and what `encode_centres` left."""
    rng = generator(case)
    store = Store(case, bits, k_bits)
    keys = normal(rng, case.g, case.capacity, case.d)
    keys += np.repeat(normal(rng, case.g, case.capacity // CENTRE, case.d), CENTRE, axis=1)
    encoders(backend).encode_centres(keys, store.centres, store.centre_step, 0)
    for heads, planes in runs_of_heads(store.bits, store.planes):
        encoders(backend).encode_keys(keys[heads], planes, store.scale[heads], 0)
    encoders(backend).encode_interleaved(
        normal(rng, case.g, case.capacity, case.d), store.quads, store.value_scale, 0
    )
    return store, keys


def half(bits: npt.NDArray[np.uint16]) -> F64:
    return bits.view(np.float16).astype(float)


def test_centres_are_the_means_of_64_and_then_of_16_tokens() -> None:
    x = normal(np.random.default_rng(0), 2, 128, 64) + 40 * normal(np.random.default_rng(1), 64)
    x[1, 64:] = 0
    codes, step = np.zeros((2, 4, CENTRES, 32), np.uint8), np.zeros((2, 4, CENTRES), np.uint16)
    left = x.copy()
    plain.encode_centres(left, codes, step, 64)
    stored = decoded_centres(codes, step)[:, 64:192]
    np.testing.assert_allclose(left, x - stored, atol=2e-5)
    width = np.repeat(half(step[:, 1:3, 1:]).reshape(2, 8), 16, axis=1)[..., None]
    mean = np.repeat(x.astype(float).reshape(2, 8, 16, 64).mean(axis=2), 16, axis=1)
    assert (np.abs(stored - mean) <= width / 2 * 1.01).all()  # half a step
    blocks = x.astype(float).reshape(2, 2, 64, 64).mean(axis=2)
    np.testing.assert_allclose(half(step[:, 1:3, 0]), np.abs(blocks).max(axis=2) / 8, rtol=1e-3, atol=1e-7)
    assert width[0].max() < half(step[0, 1:3, 0]).min() / 4  # the offset is in the first
    assert not codes[:, [0, 3]].any()


def decoded_centres(codes: npt.NDArray[np.uint8], step: npt.NDArray[np.uint16]) -> F64:
    """The centre of each token, (G, cap, D)."""
    rows = (np.concatenate([codes & 15, codes >> 4], axis=3) - 7.5) * half(step)[..., None]
    both = rows[:, :, :1] + rows[:, :, 1:]
    return np.repeat(both.reshape(len(both), -1, both.shape[3]), CENTRE, axis=1)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_keys_are_the_nearest_levels_of_a_gaussian_made_unbiased(bits: int) -> None:
    case = SMALL
    store, left = filled(reference, case, k_bits=bits)
    x = left.astype(float)[:1]
    step = np.sqrt(np.square(x).mean(axis=2, keepdims=True)) * GAUSS_STEP[bits]
    codes = np.clip(np.floor(x / step) + 2 ** (bits - 1), 0, 2**bits - 1)
    level = 2 * codes - (2**bits - 1)
    np.testing.assert_array_equal(store.codecs(case, 2)[0]._stored(0, case.capacity)[0][:1], level)
    scale = np.square(x).sum(2) / (x * level).sum(2)
    np.testing.assert_allclose(half(store.scale)[:1], scale, rtol=1e-3)
    error = np.linalg.norm(level * scale[..., None] - x) / np.linalg.norm(x)
    low, high = {1: (0.73, 0.78), 2: (0.35, 0.38), 3: (0.19, 0.21), 4: (0.1, 0.12)}[bits]
    assert low < error < high


def test_a_token_lies_where_the_contract_says() -> None:
    x = np.ones((1, 64, 64), np.float32)
    x[0, 37, 9] = -1
    planes, scale = np.zeros((1, 1, 1, GROUPS, 8, 16), np.uint8), np.zeros((1, 64), np.uint16)
    plain.encode_keys(x, planes, scale, 0)
    group, place = place_of(37)
    assert planes[0, 0, 0, group, 1, place] == 0b11111101
    assert (planes == 255).sum() == planes.size - 1
    assert sorted(map(place_of, range(64))) == [(i, j) for i in range(4) for j in range(16)]


def test_scores_are_centre_plus_levels_times_scale() -> None:
    case = SMALL
    store, _ = filled(reference, case, k_bits=2)
    q, key_scale = (
        normal(np.random.default_rng(1), case.g, case.m, case.d),
        np.linspace(0.8, 1, case.g, dtype=np.float32),
    )
    q[0, 0] = 0
    rounded, step = plain.round_queries(q)
    assert not step[0, 0]
    assert (np.abs(rounded * step[..., None] - q) <= step[..., None] * 0.5001).all()
    four = np.abs(rounded).reshape(*q.shape[:2], -1, 4).sum(axis=3)
    assert four[step > 0].max(axis=1).min() >= 60
    assert four.max() <= 63
    s = poisoned_scores(case, True)
    codec = store.codecs(case, 2)[0]
    levels, _ = codec._stored(0, case.capacity)
    unrotated = codec.rotation.backward(q, reference) / codec.query_factors[:, None]
    reference.scores(codec, unrotated, case.t0, case.t1, s[:, :, inside(case)])
    centres = decoded_centres(store.centres, store.centre_step)
    keys = levels.astype(float) * half(store.scale)[..., None] * key_scale[:, None, None]
    expected = q @ centres.transpose(0, 2, 1) + (rounded * step[..., None]) @ keys.transpose(0, 2, 1)
    assert_close(s[:, :, inside(case)], expected[:, :, case.t0 : case.t1], 5e-3)  # q may be rounded the other way
    assert np.isnan(np.delete(s, np.r_[inside(case)], axis=2)).all()


@BACKENDS
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_quads_sum_what_they_stored(backend: Kernels, bits: int) -> None:
    case = SMALL
    store, x = Store(case, bits), normal(np.random.default_rng(2), case.g, case.capacity, case.d)
    x[0, 5] = 0
    encoders(backend).encode_interleaved(x, store.quads, store.value_scale, 0)
    p = np.zeros((case.g, case.capacity, case.capacity), np.float32)
    p[:] = np.eye(case.capacity)
    values = store.codecs(case, bits)[1]
    out = values.rotation.forward(values.sums(p, 0, case.capacity), reference)  # one token a row
    assert not out[0, 5].any()
    length = np.square(x.astype(float)).sum(2)
    np.testing.assert_allclose((out * x.astype(float)).sum(2), length, rtol=2e-3)  # not shrunk
    error = np.linalg.norm(out - x) / np.linalg.norm(x)
    low, high = {1: (0.7, 0.8), 2: (0.33, 0.38), 3: (0.18, 0.22), 4: (0.1, 0.13)}[bits]
    assert low < error < high  # of a Gaussian's best uniform levels, made unbiased


@either_way(CASES)
def test_numba_stores_the_same_bits(case: Case, min_parallel_work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)
    k_bits = 1 + case.length % 4
    (expected, left), (got, got_left) = (filled(backend, case, k_bits=k_bits) for backend in (reference, cpu))
    np.testing.assert_array_equal(got_left, left)
    for name, array in vars(expected).items():
        np.testing.assert_array_equal(getattr(got, name), array, err_msg=name)


@either_way(CASES)
def test_numba_computes_the_same_scores_and_sums(
    case: Case, min_parallel_work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)
    bits = 1 + case.length % 4
    store, _ = filled(reference, case, bits, k_bits=5 - bits)
    rng, columns = generator(case), inside(case)
    q = normal(rng, case.g, case.m, case.d)
    keys, values = store.codecs(case, bits)
    s, expected = poisoned_scores(case, case.g == 1), poisoned_scores(case, True)
    reference.scores(keys, q, case.t0, case.t1, expected[:, :, columns])
    cpu.scores(keys, q, case.t0, case.t1, s[:, :, columns])
    assert_close(s, expected, 1e-4)  # q in two bytes
    p = np.exp(expected - expected[:, :, columns].max(axis=2, keepdims=True))
    sums = [normal(np.random.default_rng(3), case.g, case.m, case.d) for _ in range(2)]
    for backend, out in zip((reference, cpu), sums, strict=True):
        backend.sums(values, p[:, :, columns], case.t0, case.t1, out)
    assert_close(sums[1], sums[0], 2e-3)  # a weight on the border of two 8-bit codes may take the other


@pytest.mark.parametrize(("d", "bits"), [(20, 1), (36, 2), (64, 3), (20, 4), (36, 4), (64, 1)])
def test_sums_of_any_channels_rows_and_blocks_are_the_same(d: int, bits: int) -> None:
    """Vectors of 4, 8 or 16 channels, and what is left of them."""
    rng, capacity = np.random.default_rng(bits), 640
    codes, scale = np.zeros((1, capacity // BLOCK, 2 * bits, d, 4), np.uint8), np.zeros((1, capacity), np.uint16)
    plain.encode_interleaved(normal(rng, 1, capacity, d), codes, scale, 0)
    arrays = {"codes": codes.reshape(bits, -1, 2, d, 4), "scale": scale}
    values = codec(
        "interleaved", (1, capacity, d), arrays, **of_heads(np.full(1, bits)), rotation=Rotation(d, d, 1)
    )
    for rows in (1, 2, 3, 4, 7):
        for t0, t1 in ((0, 640), (64, 300), (17, 200), (5, 40)):
            p = np.exp(2 * normal(rng, 1, rows, t1 - t0))
            sums = [np.zeros((1, rows, d), np.float32) for _ in range(2)]
            for backend, out in zip((reference, cpu), sums, strict=True):
                backend.sums(values, p, t0, t1, out)
            assert_close(sums[1], sums[0], 2e-3)


@BACKENDS
@pytest.mark.parametrize(("head_dim", "width"), [(64, 64), (80, 128), (128, 128), (3, 4)])
def test_hadamard_is_orthogonal_and_undone(backend: Kernels, head_dim: int, width: int) -> None:
    rng = np.random.default_rng(5)
    x, flips = normal(rng, 2, 7, head_dim), rng.choice(np.array([-1, 1], np.float32), width)
    out, back = np.full((2, 7, width), np.nan, np.float32), np.ones((2, 7, head_dim), np.float32)
    backend.hadamard(x, flips, out)
    matrix = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(width)] for i in range(width)])
    expected = (x.astype(float) * flips[:head_dim]) @ matrix[:head_dim] / np.sqrt(width)
    np.testing.assert_allclose(np.sort(out, axis=2), np.sort(expected, axis=2), atol=2e-6)
    backend.hadamard_back(out, flips, back)
    np.testing.assert_allclose(back, 1 + x, atol=3e-6)
