"""CUDA kernels against the NumPy reference: encoders to the bit, sums up to rounding, odd sizes."""

from __future__ import annotations

import inspect
import itertools
import math

import numpy as np
import pytest
from cache_cases import attention
from cuda_cases import OnDevice
from kernel_cases import Case, blank, bound, generator, normal, quantize_numpy
from test_cuda_attend import PAIRS

from edgekv.kernels.arrays import to_host
from edgekv.kernels.cuda.driver import CaptureError, Counter, GraphInputs, by_value
from edgekv.kernels.cuda.kernels import CudaKernels, HalfQKV, padded_width
from edgekv.kernels.cuda.matvec import Matrix, matvec, packed_matvec, takes_packed, widen
from edgekv.kernels.interface import Kernels
from edgekv.papers.fier import SignIndex
from edgekv.papers.h1b.codec import SignSketch
from edgekv.papers.kivi import KiviValues
from edgekv.papers.kvcomp.codec import HuffmanKeys, HuffmanValues
from edgekv.papers.quest import PageIndex
from edgekv.weights import gaussian
from edgekv.weights.formats import WeightFormat

CASES = [
    Case(d=128, length=200, g=2, r=1, n=1, t0=0, s0=0),
    Case(d=64, length=65, g=1, r=4, n=1, t0=3, s0=5),
    Case(d=80, length=130, g=2, r=3, n=3, t0=64, s0=2),
    Case(d=256, length=100, g=2, r=2, n=1, t0=1, s0=0),
    Case(d=12, length=100, g=2, r=2, n=1, t0=1, s0=0),
]


def test_every_kernel_has_the_signature_of_the_specification() -> None:
    for name in [name for name in dir(CudaKernels) if hasattr(Kernels, name) and not name.startswith("_")]:
        specified = list(inspect.signature(getattr(Kernels, name)).parameters)
        parameters = inspect.signature(getattr(CudaKernels, name)).parameters
        assert list(parameters)[: len(specified)] == specified, name
        assert all(parameters[more].default is None for more in list(parameters)[len(specified) :]), name


@pytest.mark.parametrize(
    ("pair", "case"),
    [("f16", case) for case in CASES]
    + [(pair, CASES[i % len(CASES)]) for i, pair in enumerate(PAIRS) if pair != "f16"],
    ids=str,
)
def test_codecs(device: OnDevice, pair: str, case: Case) -> None:
    """Encoders to the bit; scores and sums of a range of tokens, and nothing written beside them."""
    x = normal(generator(case), case.g, case.capacity, case.d)
    x[:, 0], x[:, -1], x[:, 1] = 0, x[:, -1] * np.float32(1e-9), np.float32(-0.0)
    x[:, :32, 0] = 1.5  # a channel that is the same everywhere
    both = (PAIRS[pair](case.g, case.capacity, case.d) for _ in range(2))
    keys, values = (device.encoded(*each, (x[:, :64], 0), (x[:, 64:], 64)) for each in zip(*both, strict=True))
    q, rng = normal(generator(case), case.g, case.m, case.d), generator(case)
    device.check_scores(keys, q, case.t0, case.t1, np.full((case.g, case.m, case.length + 5), np.nan, np.float32))
    p = np.full((case.g, case.m, case.length + 5), np.nan, np.float32)
    p[:, :, 2:-3] = rng.random((case.g, case.m, case.length)) ** 8
    device.check_sums(values, p, case.t0, case.t1, q)


ALONE = (
    "-x +x ~x abs(x) round(x) math.floor(x) math.ceil(x) math.trunc(x) float(x) x+0.5 divmod(x,64) divmod(64,x)"
)


def test_counters_take_sums_alone(device: OnDevice) -> None:
    """Anything else is refused in a capture, by an encoder without counters too."""
    values, x = blank(KiviValues(1, 64, 64, 2, 64), device.kernels, device.driver), device.up(np.ones((1, 1, 64)))
    count = Counter(7, (("n", 1),), GraphInputs(device.driver, "n"))
    sums = 3 + count - 1, np.int64(9) - count, count + count - np.int32(4)
    assert [(int(n), n.terms) for n in sums] == [(9, (("n", 1),)), (2, (("n", -1),)), (10, (("n", 2),))]
    names = {"x": count, "np": np, "math": math, "by_value": by_value, "on": device.kernels, "v": values, "k": x}
    signs = "* / // % ** << >> & | ^".split()  # noqa: SIM905
    both = [text for sign in signs for text in (f"x {sign} 2", f"64 {sign} x", f"np.int64(64) {sign} x")]
    for text in (*ALONE.split(), *both, "pow(x, 2, 3)", "on.encode(v, k, x)", "by_value(x, None)"):
        with pytest.raises(CaptureError):
            eval(text, names)


@pytest.mark.parametrize("columns", [1, 33, 700])
def test_softmax(device: OnDevice, columns: int) -> None:
    rng = np.random.default_rng(columns)
    s = normal(rng, 2, 3, columns) * 20
    s[0, 0] = -np.inf
    s[1, 1, : columns // 2] = -np.inf
    lo = np.array([0, columns // 3, columns])
    device.check("softmax", s, lo, np.array([columns, columns, columns]))
    device.check("softmax", s, np.zeros(3, np.int64), np.full(3, (columns + 1) // 2))


@pytest.mark.parametrize(
    ("heads", "groups", "n", "d", "half", "normed"), [(4, 2, 3, 16, 8, True), (3, 3, 1, 80, 10, False)]
)
def test_split_rope(device: OnDevice, heads: int, groups: int, n: int, d: int, half: int, normed: bool) -> None:
    rng = np.random.default_rng(d)
    norms = [normal(rng, d if normed else 0) for _ in range(2)]
    tables = normal(rng, 2, n, half)
    outs = [np.full((h, n, d), np.nan, np.float32) for h in (heads, groups, groups)]
    qkv = normal(rng, n, (heads + 2 * groups) * d)
    device.check("split_rope", qkv, *tables, *outs, 0.3, *norms, 1e-6)


@pytest.mark.parametrize(("bits", "rows"), [(256, 1), (64, 3), (512, 8)])
def test_sign_sketches(device: OnDevice, bits: int, rows: int) -> None:
    case = Case(d=16, length=130, g=2, r=rows, n=1, t0=5, s0=4)
    rng = generator(case)
    x = normal(rng, case.g, case.length, bits)
    x[0, 0, :3] = 0.0, -0.0, 1e-45
    codes = device.check(
        "pack_signs", x, np.zeros((case.g, case.capacity // 64, bits // 64, 64), np.uint64), case.t0, kind="signs"
    )[1]
    q = normal(rng, case.g, rows, bits)
    device.check("pack_sign_rows", q, kind="signs")
    keys = bound(SignSketch(case.g, case.capacity, case.d, bits, 0), signs=codes)
    keys.tau = rng.random((case.g, rows), np.float32) + 1
    q = normal(rng, case.g, case.m, case.d)
    device.check_scores(keys, q, case.t0, case.t1, np.full((case.g, case.m, case.length + 5), np.nan, np.float32))
    device.check("project", normal(rng, case.g, rows, 24), normal(rng, bits, 24))


@pytest.mark.parametrize(("width", "d"), [(128, 128), (64, 50), (16, 12)])
def test_hadamard(device: OnDevice, width: int, d: int) -> None:
    rng = np.random.default_rng(width)
    flips = rng.choice(np.array([-1, 1], np.float32), width)
    device.check("hadamard", normal(rng, 3, 2, d), flips, np.full((3, 2, width), np.nan, np.float32), tolerance=0)
    device.check("hadamard_back", normal(rng, 3, 2, width), flips, normal(rng, 3, 2, d), tolerance=0)


@pytest.mark.parametrize(("case", "block", "relative_step"), [(CASES[0], 64, 0.25), (CASES[2], 256, 0.4)])
def test_huffman_codes(device: OnDevice, case: Case, block: int, relative_step: float) -> None:
    """Levels, sizes and bit strings are equal; scores and sums on them, with a block in fixed-length codes."""
    rng, capacity = generator(case), -(-case.capacity // block) * block
    x = normal(rng, case.g, capacity, case.d)
    x[:, 5], x[:, :, 1] = 0, x[:, :, 1] * 30
    x[:, :block] = rng.uniform(-1, 1, x[:, :block].shape)  # longer in a Gaussian's code than in a plain one
    q, p = normal(rng, case.g, case.m, case.d), rng.random((case.g, case.m, case.length + 5), np.float32)
    for kind in (HuffmanKeys, HuffmanValues):
        here, there = (kind(case.g, capacity, case.d, block, relative_step) for _ in range(2))
        device.encoded(here, there, (x, 0))
        np.testing.assert_array_equal(to_host(there.pool), here.pool)
        if kind is HuffmanKeys:
            device.check_scores(here, q, case.t0, case.t1, p)
        else:
            device.check_sums(here, p, case.t0, case.t1, q)


@pytest.mark.parametrize(("group", "minmax"), [(32, False), (128, True)])
def test_indexes(device: OnDevice, group: int, minmax: bool) -> None:
    rng, groups, rows, d = np.random.default_rng(group), 640 // group, 3, 80
    keys = normal(rng, 2, 640, d).astype(np.float16).view(np.uint16)
    s, q = np.full((2, rows, 700), np.nan, np.float32), normal(rng, 2, rows, d)
    here, there = (SignIndex(2, 640, d, group, "minmax" if minmax else "mad") for _ in range(2))
    blank(here).encode(keys, 1, groups)
    blank(there, device.kernels, device.driver).encode(device.up(keys), 1, groups)
    device.check_arrays(here, there)
    device.check_scores(here, q, group, 640, s)
    pages = blank(PageIndex(2, 640, d, 16))
    pages.encode(keys, 1, 40)
    device.check_scores(pages, q, 1, 40, s)


@pytest.mark.parametrize("columns", [16, 12])
def test_weights_beyond_float16_become_its_largest_number(
    device: OnDevice, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in more rows than a grid has thread blocks for."""
    monkeypatch.setattr("edgekv.kernels.cuda.matvec.MAX_GRID_Y", 2)
    w = np.tile(np.array([1e5, -1e5, 3, 0], np.float32), (40, columns // 4))
    w[:, 3] = np.arange(40)
    stored = Matrix(40, columns, 32, 1, 0, device.up(w))
    found = to_host(widen(device.driver, stored, slice(0, 40), np.float16))
    np.testing.assert_array_equal(found, np.clip(w, -65504, 65504))


SHAPES = [(37, 96, 32), (40, 300, 32), (24, 640, 128), (300, 2100, 128), (16, 4100, 32)]
ROTATED = [
    *itertools.product([(36, 203, 128), (36, 204, 128), (24, 640, 128), (16, 4100, 128)], [2, 3, 4, 5], [True]),
    ((16, 14336, 128), 4, True),  # the longest rows
]


@pytest.mark.parametrize(
    ("shape", "bits", "rotated"), [*itertools.product(SHAPES, [4, 8], [False]), *ROTATED], ids=str
)
def test_packed_products(device: OnDevice, shape: tuple[int, int, int], bits: int, rotated: bool) -> None:
    """Rows and blocks that fill no tile, with all that is done along the way; inputs of very different sizes."""
    if not device.driver.has_integer_mma:
        pytest.skip("needs sm_80 or later")
    rows, columns, block = shape
    rng = np.random.default_rng(rows)
    w = normal(rng, 2 * (rows // 2), columns)
    codes, scales = gaussian.quantize(w, bits) if rotated else quantize_numpy(w, bits, block)
    form = WeightFormat("", bits, block, rotated=rotated)
    padded = form.dequantize({"codes": codes, "scales": scales}, scales.shape[1] * block)
    w = padded[:, :columns].astype(np.float64)
    widened = gaussian.rotate(padded) if rotated else w
    x = normal(rng, 2, columns) * np.exp(2 * normal(rng, 2, columns))
    bias, onto, norm = normal(rng, len(w)), normal(rng, 2, len(w)), normal(rng, columns)
    driver, there, data = device.driver, device.up(x), device.up(codes)
    stored = data, device.up(scales.view(np.uint16) if rotated else scales)
    plain = Matrix(len(w), columns, bits, block, scales.shape[1], *stored, rotated=rotated)

    error = 2e-4  # inputs of 16 bits

    def close(found: object, expected: np.ndarray) -> None:
        np.testing.assert_allclose(to_host(found), expected, atol=error * np.abs(expected).max(), rtol=0)

    close(matvec(driver, there, plain), x @ w.T)
    close(widen(driver, plain, slice(8, len(w)), np.float32), widened[8:])
    assert takes_packed(driver, plain) == (columns % 4 == 0)
    if columns % 4:
        return
    close(packed_matvec(driver, there, plain), x @ w.T)
    damaged = x.copy()
    damaged[1, 5] = np.nan
    found = to_host(packed_matvec(driver, device.up(damaged), plain))
    assert np.isnan(found).all(axis=1).tolist() == [False, True]
    biased = plain._replace(bias=device.up(bias))
    close(packed_matvec(driver, there, biased, onto=device.up(onto)), x @ w.T + bias + onto)
    root = np.sqrt(np.square(x, dtype=np.float64).mean(axis=1, keepdims=True) + 1e-5)
    normed = (x / root * norm) @ w.T
    found = packed_matvec(driver, there, plain, norm=(device.up(norm), 1e-5), gate=0)
    gate, up = np.split(normed, 2, axis=1)
    close(found, gate / (1 + np.exp(-gate)) * up)


HALF_ERROR = 2e-3  # of attention over values of size 1; measured: 1.1e-3


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None) -> np.ndarray:
    """Returns attention of the last n of m tokens: q (H, n, D), k and v (G, m, D) -> (n, H * D)."""
    return attention(q, k, v, window).transpose(1, 0, 2).reshape(q.shape[1], -1)


@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "n", "earlier", "head_dim", "window"),
    [
        *((2, 1, 130, 0, 64, None), (1, 1, 70, 61, 128, None), (2, 2, 100, 0, 24, 20)),
        *((1, 1, 40, 100, 80, 33), (2, 1, 35, 0, 256, None), (1, 1, 9, 30, 7, 1)),
    ],
)
def test_attention_in_tiles(
    device: OnDevice, n_heads: int, n_kv_heads: int, n: int, earlier: int, head_dim: int, window: int | None
) -> None:
    """Borders of tiles, grouped queries, windows, heads that are padded, queries that follow earlier tokens."""
    rng, width, spare = np.random.default_rng(0), padded_width(head_dim), 5
    m = earlier + n
    q = (rng.standard_normal((n_heads, n, head_dim)) * 2 / np.sqrt(head_dim)).astype(np.float16)
    k, v = (rng.standard_normal((n_kv_heads, m, head_dim)).astype(np.float16) for _ in range(2))
    padded = [np.pad(x, ((0, 0), (0, 0), (0, width - head_dim))) for x in (q, k, v)]
    padded[1:] = [np.pad(x, ((0, 0), (0, spare), (0, 0)), constant_values=np.nan) for x in padded[1:]]
    out = device.driver.empty((n, n_heads * head_dim), np.float16)
    device.kernels.prefill_attention(*map(device.up, padded), earlier, window, out)
    np.testing.assert_allclose(to_host(out).astype(np.float32), exact(q, k, v, window), atol=HALF_ERROR, rtol=0)


def test_scores_of_any_size(device: OnDevice) -> None:
    """A softmax that is one token, and one whose largest score comes last."""
    rng = np.random.default_rng(1)
    q = np.full((1, 80, 16), 16, np.float16)
    k = np.repeat(np.linspace(-40, 40, 80, dtype=np.float16)[None, :, None], 16, axis=2)
    v = rng.standard_normal((1, 80, 16)).astype(np.float16)
    for keys in (k, k[:, ::-1].copy()):
        out = device.driver.empty((80, 16), np.float16)
        device.kernels.prefill_attention(device.up(q), device.up(keys), device.up(v), 0, None, out)
        np.testing.assert_allclose(to_host(out).astype(np.float32), exact(q, keys, v, None), atol=HALF_ERROR)


def test_queries_keys_and_values_also_in_halves(device: OnDevice) -> None:
    rng, (n, h, g, d) = np.random.default_rng(0), (5, 4, 2, 12)
    qkv, cos, sin = (
        device.up(rng.standard_normal((n, size), dtype=np.float32)) for size in ((h + 2 * g) * d, d // 2, d // 2)
    )
    norm = device.up(rng.standard_normal(d, dtype=np.float32))
    plain = [device.driver.empty((heads, n, d), np.float32) for heads in (h, g, g)]
    device.kernels.split_rope(qkv, cos, sin, *plain, 0.5, norm, norm, 1e-5)
    half_q = device.driver.empty((h, n, 16), np.float16)
    half_k, half_v = (device.driver.empty((g, n + 3, 16), np.float16) for _ in range(2))
    for keeps in (True, False):
        both = [device.driver.zeros((heads, n, d), np.float32) for heads in (h, g, g)]
        halves = HalfQKV(half_q, half_k, half_v, 2)
        queries = both[0] if keeps else None
        device.kernels.split_rope(qkv, cos, sin, queries, *both[1:], 0.5, norm, norm, 1e-5, halves)
        for x, y in zip(plain[0 if keeps else 1 :], both[0 if keeps else 1 :], strict=True):
            np.testing.assert_array_equal(to_host(x), to_host(y))
        assert keeps or not to_host(both[0]).any()
    for x, y in zip(plain, (half_q, half_k[:, 2 : n + 2], half_v[:, 2 : n + 2]), strict=True):
        np.testing.assert_array_equal(to_host(y)[:, :, :d], to_host(x).astype(np.float16))
        assert not to_host(y)[:, :, d:].any()
