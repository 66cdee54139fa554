"""Keys in planes and interleaved values by hand, in float64: `test_codecs` holds the compiled kernels to this."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_cases import add_values, assert_close, normal

from edgekv.codecs import planes
from edgekv.codecs.planes import GAUSS_STEP, N_CENTRES, N_GROUPS, RUN, CentredPlanes, InterleavedValues
from edgekv.kernels import cpu, reference
from edgekv.types import F32, F64, U8, U16

SHAPE = 2, 192, 128  # heads, tokens, channels


def half(bits: U16) -> F64:
    return bits.view(np.float16).astype(float)


def bound(codec: Any) -> Any:
    """Puts the codec on arrays whose untouched tokens are NaN."""
    poison = {"uint8": 0xAB, "uint16": 0x7E00}
    arrays = {name: np.full(shape, poison[dtype], dtype) for name, (shape, dtype) in codec.layout().items()}
    codec.bind(arrays, reference)
    return codec


def filled(bits: int) -> tuple[CentredPlanes, F32]:
    """Returns keys with a drift that centres take, and what the centres left of them, rotated."""
    rng, (g, n, d) = np.random.default_rng(bits), SHAPE
    factors = np.exp2(rng.integers(-1, 2, (g, d))).astype(np.float32)
    key_scale = np.linspace(0.8, 1, g)
    codec = bound(CentredPlanes(g, n, d, bits=bits, key_scale=key_scale, seed=1, channel_scales=factors))
    x = normal(rng, g, n, d) + np.repeat(normal(rng, g, n // RUN, d), RUN, axis=1)
    codec.encode(x / factors[:, None], 0)
    left = codec.rotation.forward(x, reference)
    planes.encode_centres(left, *(np.zeros_like(codec.arrays[name]) for name in ("centres", "centre_step")), 0)
    return codec, left


def test_centres_are_the_means_of_64_and_then_of_16_tokens() -> None:
    x = normal(np.random.default_rng(0), 2, 128, 64) + 40 * normal(np.random.default_rng(1), 64)
    x[1, 64:] = 0
    codes, step = np.zeros((2, 4, N_CENTRES, 32), np.uint8), np.zeros((2, 4, N_CENTRES), np.uint16)
    left = x.copy()
    planes.encode_centres(left, codes, step, 64)
    stored = decoded_centres(codes, step)[:, 64:192]
    np.testing.assert_allclose(left, x - stored, atol=2e-5)
    width = np.repeat(half(step[:, 1:3, 1:]).reshape(2, 8), 16, axis=1)[..., None]
    mean = np.repeat(x.astype(float).reshape(2, 8, 16, 64).mean(axis=2), 16, axis=1)
    assert (np.abs(stored - mean) <= width / 2 * 1.01).all()  # half a step
    blocks = x.astype(float).reshape(2, 2, 64, 64).mean(axis=2)
    np.testing.assert_allclose(half(step[:, 1:3, 0]), np.abs(blocks).max(axis=2) / 8, rtol=1e-3, atol=1e-7)
    assert width[0].max() < half(step[0, 1:3, 0]).min() / 4  # the offset is in the first
    assert not codes[:, [0, 3]].any()


def decoded_centres(codes: U8, step: U16) -> F64:
    """Returns the centre of each token, (G, cap, D)."""
    rows = (np.concatenate([codes & 15, codes >> 4], axis=3) - 7.5) * half(step)[..., None]
    both = rows[:, :, :1] + rows[:, :, 1:]
    return np.repeat(both.reshape(len(both), -1, both.shape[3]), RUN, axis=1)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_keys_are_the_nearest_levels_of_a_gaussian_made_unbiased(bits: int) -> None:
    codec, left = filled(bits)
    x, (levels, centres) = left.astype(float), codec._stored(0, 192)
    step = np.sqrt(np.square(x).mean(axis=2, keepdims=True)) * GAUSS_STEP[bits]
    codes = np.clip(np.floor(x / step) + 2 ** (bits - 1), 0, 2**bits - 1)
    level = 2 * codes - (2**bits - 1)
    np.testing.assert_array_equal(levels, level)
    np.testing.assert_allclose(
        centres, decoded_centres(codec.arrays["centres"], codec.arrays["centre_step"]), rtol=1e-5, atol=1e-6
    )
    scale = np.square(x).sum(2) / (x * level).sum(2)
    np.testing.assert_allclose(half(codec.arrays["scale"]), scale, rtol=1e-3)
    error = np.linalg.norm(level * scale[..., None] - x) / np.linalg.norm(x)
    low, high = {1: (0.73, 0.78), 2: (0.35, 0.38), 3: (0.19, 0.21), 4: (0.1, 0.12)}[bits]
    assert low < error < high


def test_a_token_lies_where_the_contract_says() -> None:
    x = np.ones((1, 64, 64), np.float32)
    x[0, 37, 9] = -1
    stored, scale = np.zeros((1, 1, 1, N_GROUPS, 8, 16), np.uint8), np.zeros((1, 64), np.uint16)
    planes.encode_keys(x, stored, scale, 0)
    group, place = planes.place_of(37)
    assert stored[0, 0, 0, group, 1, place] == 0b11111101
    assert (stored == 255).sum() == stored.size - 1
    assert sorted(map(planes.place_of, range(64))) == [(i, j) for i in range(4) for j in range(16)]


def test_scores_are_centre_plus_levels_times_scale() -> None:
    codec, _ = filled(2)
    q = normal(np.random.default_rng(1), 2, 6, 128)
    q[0, 0] = 0
    rotated = codec.rotation.forward(q * codec.query_factors[:, None], reference)
    rounded, step = planes.round_queries(rotated)
    assert not step[0, 0]
    assert (np.abs(rounded * step[..., None] - rotated) <= step[..., None] * 0.5001).all()
    four = np.abs(rounded).reshape(*q.shape[:2], -1, 4).sum(axis=3)
    assert four[step > 0].max(axis=1).min() >= 60
    assert four.max() <= 63
    levels, centres = (x.astype(float) for x in codec._stored(0, 192))
    keys = levels * half(codec.arrays["scale"])[..., None] * codec.key_scale[:, None, None]
    expected = rotated @ centres.transpose(0, 2, 1) + (rounded * step[..., None]) @ keys.transpose(0, 2, 1)
    assert_close(codec.scores(q, 7, 150), expected[:, :, 7:150])
    plain = q @ codec.decode(0, 192).transpose(0, 2, 1)
    assert np.corrcoef(plain.ravel(), expected.ravel())[0, 1] > 0.99


@pytest.mark.parametrize("backend", [reference, cpu], ids=["numpy", "numba"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_values_sum_what_they_stored(backend: Any, bits: int) -> None:
    codec, x = bound(InterleavedValues(*SHAPE, bits=bits, seed=1)), normal(np.random.default_rng(2), *SHAPE)
    x[0, 5] = 0
    backend.encode(codec, x, 0)
    out = codec.sums(np.stack([np.eye(192, dtype=np.float32)] * 2), 0, 192)  # one token a row
    assert_close(out, codec.decode(0, 192))
    assert not out[0, 5].any()
    length = np.square(x.astype(float)).sum(2)
    np.testing.assert_allclose((out * x.astype(float)).sum(2), length, rtol=2e-3)  # not shrunk
    error = np.linalg.norm(out - x) / np.linalg.norm(x)
    low, high = {1: (0.7, 0.8), 2: (0.33, 0.38), 3: (0.18, 0.22), 4: (0.1, 0.13)}[bits]
    assert low < error < high  # of a Gaussian's best uniform levels, made unbiased


@pytest.mark.parametrize(("d", "bits"), [(20, 1), (36, 2), (64, 3), (20, 4)])
def test_sums_of_any_channels_rows_and_blocks_are_the_same(d: int, bits: int) -> None:
    """Vectors of 4, 8 or 16 channels, and what is left of them; several blocks at once."""
    rng, values = np.random.default_rng(bits), bound(InterleavedValues(1, 640, d, bits=bits, seed=1))
    values.encode(normal(rng, 1, 640, d), 0)
    for rows in (1, 2, 3, 4, 7):
        for t0, t1 in ((0, 640), (64, 300), (17, 200), (5, 40)):
            p, out = np.exp(2 * normal(rng, 1, rows, t1 - t0)), np.zeros((1, rows, d), np.float32)
            add_values(cpu, values, p, t0, t1, out)
            assert_close(out, values.sums(p, t0, t1), 2e-3)


@pytest.mark.parametrize("backend", [reference, cpu], ids=["numpy", "numba"])
@pytest.mark.parametrize(("head_dim", "width"), [(64, 64), (80, 128), (128, 128), (3, 4)])
def test_hadamard_is_orthogonal_and_undone(backend: Any, head_dim: int, width: int) -> None:
    rng = np.random.default_rng(5)
    x, flips = normal(rng, 2, 7, head_dim), rng.choice(np.array([-1, 1], np.float32), width)
    out, back = np.full((2, 7, width), np.nan, np.float32), np.ones((2, 7, head_dim), np.float32)
    backend.hadamard(x, flips, out)
    matrix = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(width)] for i in range(width)])
    expected = (x.astype(float) * flips[:head_dim]) @ matrix[:head_dim] / np.sqrt(width)
    np.testing.assert_allclose(np.sort(out, axis=2), np.sort(expected, axis=2), atol=2e-6)
    backend.hadamard_back(out, flips, back)
    np.testing.assert_allclose(back, 1 + x, atol=3e-6)
