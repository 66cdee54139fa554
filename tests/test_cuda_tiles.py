"""What needs sm_80 on CUDA: products of whole numbers on tensor cores, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import test_cuda_attend
from cuda_cases import OnDevice
from kernel_cases import normal, quantize_numpy
from test_cuda_attend import TOLERANCE, Both, causal

from edgekv.codecs.planes.cuda import FOLDER
from edgekv.kernels.arrays import to_host
from edgekv.kernels.cuda.matvec import Matrix, packed_matvec
from edgekv.weights.formats import WeightFormat

PLANES = [  # the pair, queries per KV head, head_dim
    *(("signs", (rows, width)) for rows, width in ((1, 128), (2, 64), (4, 128), (7, 64))),
    ("2-bit keys, 3-bit values", (1, 64)),
    ("4-bit keys", (2, 128)),
    ("1- and 3-bit keys of heads", (4, 64)),
    ("4- and 2-bit keys of heads", (1, 128)),
]
TOKENS = 704  # of which two tiles at a time are two rounds of some warps, the second of one tile


@pytest.fixture
def kernels(device: OnDevice, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are launched, and their files."""
    files: list[str] = []
    launch = device.driver.launch
    monkeypatch.setattr(
        device.driver,
        "launch",
        lambda *a: (files.extend((*map(str, a[0].program.files), a[0].kernel)), launch(*a)),
    )
    if not device.driver.has_whole_tiles:
        pytest.skip("needs sm_80 or later")
    return files


@pytest.mark.parametrize(("pair", "shape"), PLANES, ids=str)
def test_planes(
    device: OnDevice, kernels: list[str], pair: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles that are cut anywhere; a window; two pairs in a launch each; a query that sees nothing."""
    monkeypatch.setitem(test_cuda_attend.SHAPES, "some", shape)
    monkeypatch.setattr(test_cuda_attend, "CAPACITY", TOKENS)
    monkeypatch.setattr(device.driver, "multiprocessors", 2)  # several rounds to a warp
    both = Both(device, "some")
    both.add("f16", 0, 3, 0)
    both.add(pair, 0, TOKENS - 64, 3)
    both.add("f16", 1, 38, TOKENS - 61)
    kernels.clear()
    both.check(1, *causal(1, TOKENS - 24, None), False, TOLERANCE)
    both.check(1, *causal(1, TOKENS - 24, 150), False, TOLERANCE, cap=1.5 if shape == (2, 64) else None)
    both.check(1, np.array([70]), np.array([80]), False, TOLERANCE)
    assert str(FOLDER / "tiled") in kernels
    assert "hadamard" not in kernels
    assert not both.check(1, np.array([9]), np.array([9]), False, 0).any()


def test_planes_before_sm_80(device: OnDevice, kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.driver, "has_whole_tiles", False)
    both = Both(device, "mha")
    both.add("signs", 0, 192, 0)
    both.add("f16", 1, 38, 192)
    both.check(1, *causal(1, 229, None), False, TOLERANCE)
    assert str(FOLDER / "read") in kernels


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("rows", "columns", "block"), [(37, 96, 32), (40, 300, 32), (24, 640, 128), (300, 2100, 128), (16, 4100, 32)]
)
def test_packed_products(
    device: OnDevice,
    kernels: list[str],
    rows: int,
    columns: int,
    block: int,
    bits: int,
) -> None:
    """Rows and blocks that fill no tile, with all that is done along the way; inputs of very different sizes."""
    rng = np.random.default_rng(rows)
    w = normal(rng, 2 * (rows // 2), columns)
    codes, scales = quantize_numpy(w, bits, block)
    w = WeightFormat("", bits, block).decode({"codes": codes, "scales": scales}, columns).astype(np.float64)
    x = normal(rng, 2, columns) * np.exp(2 * normal(rng, 2, columns))
    bias, onto, norm = normal(rng, len(w)), normal(rng, 2, len(w)), normal(rng, columns)
    plain = Matrix(len(w), columns, bits, block, scales.shape[1], device.up(codes), device.up(scales))
    driver, there = device.driver, device.up(x)

    error = 2e-4  # inputs of 16 bits

    def close(found: object, expected: np.ndarray) -> None:
        np.testing.assert_allclose(to_host(found), expected, atol=error * np.abs(expected).max(), rtol=0)

    close(packed_matvec(driver, there, plain), x @ w.T)
    biased = plain._replace(bias=device.up(bias))
    close(packed_matvec(driver, there, biased, onto=device.up(onto)), x @ w.T + bias + onto)
    root = np.sqrt(np.square(x, dtype=np.float64).mean(axis=1, keepdims=True) + 1e-5)
    normed = (x / root * norm) @ w.T
    found = packed_matvec(driver, there, plain, norm=(device.up(norm), 1e-5), gate=0)
    gate, up = np.split(normed, 2, axis=1)
    close(found, gate / (1 + np.exp(-gate)) * up)
