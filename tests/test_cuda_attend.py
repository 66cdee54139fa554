"""`attend` on CUDA against the reference: every pair of codecs, several segments, odd sizes, windows, weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_cases import OnDevice
from kernel_cases import CODECS, blank, normal, pairs

from edgekv.codecs.codec import Codec
from edgekv.codecs.f16 import F16, Float32
from edgekv.codecs.ints import Int8
from edgekv.codecs.planes import CentredPlanes, InterleavedValues
from edgekv.kernels import arrays, numpy_kernels, reference
from edgekv.kernels.arrays import to_host
from edgekv.kernels.cuda.driver import Launch
from edgekv.kernels.interface import Segment, Visible
from edgekv.papers.h1b.codec import SignSketch
from edgekv.papers.int4 import Int4, Symmetric4
from edgekv.papers.kivi import KiviKeys, KiviValues
from edgekv.papers.kvcomp.codec import HuffmanKeys, HuffmanValues
from edgekv.types import F32

Pair = tuple[Codec, Codec]
CAPACITY = 192
TOLERANCE = 2e-3  # weights of 8 bits
SHAPES = {"mha": (1, 64), "gqa": (3, 80), "many": (12, 64)}  # heads per KV head (G = 2), head_dim


def signs(k_bits: int | list[int], v_bits: int | list[int]) -> Callable[[int, int, int], Pair]:
    """Returns the codecs of planes with bits of all heads, or of each one."""

    def of(bits: int | list[int], g: int) -> int | list[int]:
        return bits if isinstance(bits, int) else bits[:g]

    def spread(g: int, d: int) -> F32:
        return np.exp2(np.random.default_rng(2).uniform(-1, 1, (g, d))).astype(np.float32)

    return lambda g, n, d: (
        CentredPlanes(g, n, d, bits=of(k_bits, g), key_scale=0.9, seed=1, channel_scales=spread(g, d)),
        InterleavedValues(g, n, d, bits=of(v_bits, g), seed=1),
    )


PAIRS: dict[str, Callable[[int, int, int], Pair]] = {
    "f16": lambda *shape: (F16(*shape), F16(*shape)),
    "f32": lambda *shape: (Float32(*shape), Float32(*shape)),
    "sketches": lambda *shape: (SignSketch(*shape, 128, 0), Int4(*shape)),
    "sketches, f16": lambda *shape: (SignSketch(*shape, 128, 0), F16(*shape)),
    "int8": lambda *shape: (Int8(*shape), Int8(*shape)),
    "4 bits": lambda *shape: (Symmetric4(*shape), Symmetric4(*shape)),
    "kivi": lambda g, n, d: (KiviKeys(g, n, d, 2, 32), KiviValues(g, n, d, 2, d)),
    "signs": signs(1, 2),
    "2-bit keys, 3-bit values": signs(2, 3),
    "3-bit keys": signs(3, 1),
    "4-bit keys": signs(4, 2),
    "1- and 3-bit keys of heads": signs([1, 3], [2, 1]),
    "4- and 2-bit keys of heads": signs([4, 2], [3, 4]),
    "huffman": lambda *shape: (HuffmanKeys(*shape, 64, 0.25), HuffmanValues(*shape, 64, 0.25)),
}


class Both:
    """Segments with the same contents in NumPy and on the device."""

    def __init__(self, device: OnDevice, shape: str, capacity: int = CAPACITY) -> None:
        self.capacity, self.device, self.rng = capacity, device, np.random.default_rng(0)
        (self.rep, self.d), self.g = SHAPES[shape], 2
        self.here: list[Segment] = []
        self.there: list[Segment] = []

    def add(self, pair: str, first: int, stop: int, position: int) -> None:
        k, v = (normal(self.rng, self.g, self.capacity, self.d) for _ in range(2))
        k += 2 * normal(self.rng, self.g, 1, self.d)
        for kernels, memory, up, segments in (
            (numpy_kernels(), arrays, np.copy, self.here),
            (self.device.kernels, self.device.driver, self.device.up, self.there),
        ):
            codecs = [blank(each, kernels, memory) for each in PAIRS[pair](self.g, self.capacity, self.d)]
            kernels.append(*codecs, up(k), up(v), 0)
            segments.append(Segment(*codecs, first, stop, position))

    def check(
        self, n: int, seen: Visible, with_weights: bool, tolerance: float, ahead: int = 0, cap: float | None = None
    ) -> np.ndarray:
        queries = normal(self.rng, self.g * self.rep, n, self.d) * np.float32(1.5 / np.sqrt(self.d))
        columns = sum(s.stop - s.first for s in self.here)  # of all segments
        weights = np.full((self.g, self.rep * n, columns), np.nan, np.float32) if with_weights else None
        found = None if weights is None else self.device.up(weights)
        expected, actual = np.full_like(queries, np.nan), self.device.up(np.full_like(queries, np.nan))
        reference.attend(queries, self.here, seen, expected, weights, cap=cap)
        self.device.kernels.attend(
            self.device.up(queries), self.there, (seen[0], seen[1] + ahead), actual, found, cap=cap
        )
        difference = np.linalg.norm(to_host(actual) - expected)
        assert difference <= tolerance * np.linalg.norm(expected)
        if weights is not None:
            np.testing.assert_allclose(to_host(found), weights, atol=2e-6, rtol=0)
        return expected


def causal(n: int, total: int, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    hi = np.arange(total - n + 1, total + 1, dtype=np.int64)
    return np.zeros_like(hi) if window is None else np.maximum(hi - window, 0), hi


def test_every_kind_is_tried() -> None:
    tried = {codec.kind for pair in PAIRS.values() for codec in pair(1, 64, 64)}
    on_gpu = {kind for kind, codec in CODECS.items() if "cuda" in codec.backends}
    assert tried == on_gpu - {"sign_index", "page_index"}  # which are no segments' keys


PACKED = [pair for pair in PAIRS if pair != "f16"]
CASES = [(1, None), (1, 77), (5, 77)]  # query tokens, and tokens that each sees


@pytest.mark.parametrize(
    ("pair", "shape", "case"),
    [("f16", *each) for each in pairs(shape=list(SHAPES), case=CASES)]
    + [(pair, list(SHAPES)[(i + j) % 3], CASES[(i + 2 * j) % 3]) for i, pair in enumerate(PACKED) for j in (0, 1)],
)
def test_pairs_between_exact_tokens(device: OnDevice, pair: str, shape: str, case: tuple[int, int | None]) -> None:
    both, (n, window) = Both(device, shape), case
    both.add("f16", 0, 3, 0)
    both.add(pair, 0, 128, 3)
    both.add("f16", 1, 38, 131)
    lossy = pair == "signs" or "-bit" in pair
    for cap in (None, 1.5) if pair in ("f16", "kivi", "4-bit keys") else (None,):
        both.check(n, causal(n, 168, window), n > 1, TOLERANCE if lossy else 1e-5, cap=cap)


@pytest.mark.parametrize("pair", ["f16", "int8", "signs"])
def test_odd_ranges(device: OnDevice, pair: str) -> None:
    """Tokens from within a block to within another; one query sees nothing."""
    both = Both(device, "gqa")
    both.add(pair, 5, 130, 0)
    both.check(1, causal(1, 125, None), False, TOLERANCE)
    both.check(3, (np.array([0, 3, 9]), np.array([60, 3, 125])), True, TOLERANCE)
    assert not both.check(1, (np.array([9]), np.array([9])), False, 0).any()


@pytest.mark.parametrize(
    ("pairs", "shape", "n"),
    [
        (("signs", "2-bit keys, 3-bit values"), "mha", 1),
        (("signs", "2-bit keys, 3-bit values"), "gqa", 3),
        (("kivi", "sketches", "int8"), "gqa", 1),
    ],
)
def test_mixed_pairs(device: OnDevice, pairs: tuple[str, ...], shape: str, n: int) -> None:
    both, position = Both(device, shape), 0
    for pair in ("f16", *pairs, "f16"):
        length = 7 if pair == "f16" else 64 + position % 2 * 64
        both.add(pair, 0, length, position)
        position += length
    both.check(n, causal(n, position, None), False, TOLERANCE)
    both.check(n, causal(n, position, 100), n > 1, TOLERANCE)


def test_mixed_pairs_take_a_launch_each(device: OnDevice, kernels: list[str]) -> None:
    both = Both(device, "gqa")
    for i, pair in enumerate(("f16", "signs", "sketches", "f16", "f16", "f16")):
        both.add(pair, 0, 64, 64 * i)
    kernels.clear()
    both.check(1, causal(1, 384, None), False, TOLERANCE)
    assert [kernels.count(each) for each in ("attend", "merge", "scores", "values", "softmax")] == [4, 1, 0, 0, 0]


@pytest.mark.parametrize("pairs", [("signs",), ("signs", "kivi")])
def test_a_replayed_step_sees_less(device: OnDevice, pairs: tuple[str, ...]) -> None:
    """The delta of positions takes back the end of what is visible, as far as a captured step is ahead."""
    both = Both(device, "gqa")
    for i, pair in enumerate((*pairs, "f16")):
        both.add(pair, 0, 64, 64 * i)
    device.driver.position_delta.fill(-9)
    try:
        both.check(1, causal(1, 64 * len(pairs) + 55, None), False, TOLERANCE, ahead=9)
    finally:
        device.driver.position_delta.fill(0)


@pytest.mark.parametrize(("pair", "with_weights"), [("f16", True), ("sketches", False)])
def test_tokens_that_stand_anywhere(device: OnDevice, pair: str, with_weights: bool) -> None:
    both = Both(device, "gqa")
    both.add(pair, 2, 150, 0)
    positions = np.stack([both.rng.permutation(300)[:CAPACITY] for _ in range(both.g)]).astype(np.int32)
    both.here[-1] = both.here[-1]._replace(positions=positions)
    both.there[-1] = both.there[-1]._replace(positions=device.up(positions))
    both.add("f16", 0, 20, 300)
    both.check(1, causal(1, 320, 170), with_weights, 1e-5)
    both.check(3, causal(3, 320, 170), with_weights, 1e-5)


PLANES = [  # the pair, queries per KV head, head_dim
    *(("signs", (rows, width)) for rows, width in ((1, 128), (2, 64), (4, 128), (7, 64))),
    ("2-bit keys, 3-bit values", (1, 64)),
    ("4-bit keys", (2, 128)),
    ("1- and 3-bit keys of heads", (4, 64)),
    ("4- and 2-bit keys of heads", (1, 128)),
]
TOKENS = 704  # of which two tiles at a time are two rounds of some warps, the second of one tile


@pytest.fixture
def kernels(device: OnDevice) -> list[str]:
    """The kernels that are launched, and their files."""
    files: list[str] = []
    launch = device.driver.launch

    def listed(program_launch: Launch, *arguments: Any) -> None:
        files.extend((*(Path(file).name for file in program_launch.program.files), program_launch.kernel))
        launch(program_launch, *arguments)

    device.driver.launch = listed
    if not device.driver.has_integer_mma:
        pytest.skip("needs sm_80 or later")
    return files


@pytest.mark.parametrize(("pair", "shape"), PLANES, ids=str)
def test_planes(
    device: OnDevice, kernels: list[str], pair: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles that are cut anywhere; a window; two pairs in a launch each; a query that sees nothing."""
    monkeypatch.setitem(SHAPES, "some", shape)
    device.driver.multiprocessors = 2  # several rounds to a warp
    both = Both(device, "some", TOKENS)
    both.add("f16", 0, 3, 0)
    both.add(pair, 0, TOKENS - 64, 3)
    both.add("f16", 1, 38, TOKENS - 61)
    kernels.clear()
    both.check(1, causal(1, TOKENS - 24, None), False, TOLERANCE)
    both.check(1, causal(1, TOKENS - 24, 150), False, TOLERANCE, cap=1.5 if shape == (2, 64) else None)
    both.check(1, (np.array([70]), np.array([80])), False, TOLERANCE)
    assert "tiled" in kernels
    assert "hadamard" not in kernels
    assert not both.check(1, (np.array([9]), np.array([9])), False, 0).any()


def test_planes_before_sm_80(device: OnDevice, kernels: list[str]) -> None:
    device.driver.has_integer_mma = False
    both = Both(device, "mha")
    both.add("signs", 0, 192, 0)
    both.add("f16", 1, 38, 192)
    both.check(1, causal(1, 229, None), False, TOLERANCE)
    assert "read" in kernels
