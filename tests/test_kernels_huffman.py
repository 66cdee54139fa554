"""Error-bounded levels and their Huffman codes: NumPy against the formulas and bit by bit, Numba against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kernel_cases import EITHER_PATH, Case, add_values, awkward_rows, generator, inside, normal, poisoned_scores

from edgekv.kernels import cpu, reference
from edgekv.kernels.cpu import launch
from edgekv.papers.kvcomp import cpu as packing
from edgekv.papers.kvcomp import reference as plain_packing
from edgekv.papers.kvcomp.codebook import Codebook
from edgekv.papers.kvcomp.codec import HuffmanCodec, HuffmanKeys, HuffmanValues

BACKENDS = pytest.mark.parametrize("backend", [packing, plain_packing], ids=["numba", "numpy"])
POISON = 0xAB
HUGE_F16 = 0x7BFF

# Head size, tokens and their place, rows, and block: on and off block borders, one row to many.
CASES = [
    (Case(d=8, length=1, g=1, r=1, n=1, t0=0, s0=0), 16),
    (Case(d=12, length=65, g=2, r=5, n=1, t0=3, s0=5), 32),
    (Case(d=16, length=200, g=3, r=1, n=3, t0=64, s0=0), 64),
    (Case(d=64, length=63, g=1, r=8, n=1, t0=1, s0=5), 64),
    (Case(d=80, length=127, g=2, r=2, n=3, t0=0, s0=0), 128),
    (Case(d=96, length=2, g=3, r=4, n=1, t0=31, s0=5), 64),
    (Case(d=128, length=513, g=2, r=1, n=1, t0=3, s0=0), 64),
    (Case(d=256, length=64, g=1, r=7, n=1, t0=64, s0=5), 64),
]


def widened(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return bits.view(np.float16).astype(np.float32)


def check_unit(
    x: npt.NDArray[np.float32],
    codes: npt.NDArray[np.uint8],
    low: np.float32,
    step: np.float32,
    relative_step: float,
    levels: int,
) -> None:
    """Elements of one channel or token: low, step and every code as specified."""
    assert low == np.float16(np.clip(x.min(), -65504, 65504))
    exact = max(float(x.max() - low), 0.0) * relative_step
    assert step == 65504 if exact > 65504 else exact * (1 - 1e-6) <= step <= exact * (1 + 2**-10) + 2**-24
    np.testing.assert_array_equal(codes, np.clip(np.rint((x - low) / (step or np.float32(1))), 0, levels - 1))


def encoded(
    kind: type[HuffmanCodec], x: npt.NDArray[np.float32], block: int, relative_step: float, t0: int
) -> Any:
    """A codec's own ends, in poison, and the codes of x (1, n, head_dim) as tokens t0.. of it."""
    found = kind(1, t0 + x.shape[1] + block, x.shape[2], block, relative_step)
    arrays = {name: np.zeros(*each) for name, each in found.layout().items()}
    arrays["low"][:] = arrays["step"][:] = HUGE_F16
    found.bind(arrays, reference)
    return arrays["low"], arrays["step"], found.quantise(x, t0)


@pytest.mark.parametrize(("relative_step", "levels"), [(0.2, 6), (0.15, 8), (1.0, 2), (1 / 255, 256)])
def test_levels_are_as_specified(relative_step: float, levels: int) -> None:
    """Keys per channel of 16 tokens, values per token: the same rule along other axes."""
    x, d = awkward_rows(16, 12, 8), 12
    low, step, codes = encoded(HuffmanKeys, x, 16, relative_step, 16)
    for channel in range(d):
        ends = widened(low)[0, 1, channel], widened(step)[0, 1, channel]
        check_unit(x[0, :, channel], codes[0, :, channel], *ends, relative_step, levels)
    assert (low[:, [0, 2]] == HUGE_F16).all()
    low, step, codes = encoded(HuffmanValues, x, 16, relative_step, 16)
    for t in range(16):
        check_unit(x[0, t], codes[0, t], widened(low)[0, 16 + t], widened(step)[0, 16 + t], relative_step, levels)
    assert (low[:, np.r_[0:16, 32:48]] == HUGE_F16).all()


class Packed:
    """Random codes of whole blocks, packed: every third block in fixed-length codes, the pool poisoned between."""

    def __init__(
        self, backend: object, seed: int, g: int, blocks: int, block: int, d: int, levels: int = 6
    ) -> None:
        rng = np.random.default_rng(seed)
        weights = rng.random(levels) ** 4 + 0.01
        self.codes = rng.choice(levels, (g, blocks * block, d), p=weights / weights.sum()).astype(np.uint8)
        self.book, self.fixed = Codebook.huffman(np.bincount(self.codes.ravel())), Codebook.fixed_length(levels)
        self.plain_bits = block * d * int(self.fixed.lengths[0])
        self.bits = self.book.lengths[self.codes].sum(2).astype(np.uint16)
        self.plain = (np.arange(g * blocks).reshape(g, blocks) % 3 == 2).astype(np.uint8)
        sizes = self.bits.reshape(g, blocks, block)
        sizes[self.plain == 1] = self.plain_bits // block
        n_words = -(-sizes.sum(2, dtype=np.int64) // 64) + 1  # a word of poison behind each block
        ends = n_words.T.cumsum().reshape(blocks, g).T
        self.offsets = (ends - n_words).astype(np.uint32)
        self.pool = np.full(int(ends.max()) + 1, 0xABAB_ABAB_ABAB_ABAB, np.uint64)
        backend.huffman_pack(
            self.codes,
            np.stack([self.book.words, self.fixed.words]),
            np.stack([self.book.lengths, self.fixed.lengths]),
            self.plain,
            self.offsets,
            0,
            block,
            self.pool,
        )

    def codec(self, kind: type[HuffmanCodec], low: npt.NDArray[np.uint16], step: npt.NDArray[np.uint16]) -> Any:
        """The blocks as keys or values with these ends."""
        (g, n_tokens, d), levels = self.codes.shape, len(self.book.lengths)
        codec = kind(g, n_tokens, d, n_tokens // self.plain.shape[1], 1 / (levels - 1))
        arrays = {"bits": self.bits, "offsets": self.offsets, "low": low, "step": step}
        tables = {name: np.empty_like(getattr(self.book, name)) for name in ("lengths", "words", "table")}
        codec.bind(arrays | tables, reference)  # fills the tables
        codec._use(self.book)
        codec.pool = self.pool
        assert codec.plain_bits == self.plain_bits
        return codec

    def read_bit_by_bit(self, g: int, b: int, block: int) -> list[int]:
        """One block's symbols as the paper reads them: a bit at a time, until a code word is complete."""
        book = self.fixed if self.plain[g, b] else self.book
        symbols = {(int(n), int(w)): i for i, (n, w) in enumerate(zip(book.lengths, book.words, strict=True))}
        stream = self.pool[self.offsets[g, b] :]
        found, position = [], 0
        for _ in range(block * self.codes.shape[2]):
            length = word = 0
            while (length, word) not in symbols or not length:
                word |= (int(stream[position // 64]) >> position % 64 & 1) << length
                length, position = length + 1, position + 1
            found.append(symbols[length, word])
        assert position == self.bits[g, b * block : (b + 1) * block].sum()
        return found


@BACKENDS
def test_bit_strings_read_back_bit_by_bit(backend: object) -> None:
    g, blocks, block, d = 2, 3, 16, 12
    packed = Packed(backend, 0, g, blocks, block, d)
    for head in range(g):
        for b in range(blocks):
            expected = packed.codes[head, b * block : (b + 1) * block].ravel().tolist()
            assert packed.read_bit_by_bit(head, b, block) == expected


@EITHER_PATH
def test_numba_packs_the_same_words(min_parallel_work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)
    for d, block, levels in ((8, 16, 2), (12, 32, 5), (80, 64, 17), (128, 64, 256)):
        actual, expected = (Packed(backend, d, 3, 4, block, d, levels) for backend in (packing, plain_packing))
        np.testing.assert_array_equal(actual.bits, expected.bits)
        np.testing.assert_array_equal(actual.pool, expected.pool)


@EITHER_PATH
@pytest.mark.parametrize(("case", "block"), CASES, ids=str)
def test_scores_and_sums_are_those_of_the_codes(
    case: Case, block: int, min_parallel_work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both backends against plain products with low + step * code, in float64."""
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)
    rng, blocks = generator(case), -(-case.t1 // block)
    packed = Packed(plain_packing, case.d, case.g, blocks, block, case.d)
    channels = rng.uniform(0.1, 1, (2, case.g, blocks, case.d)).astype(np.float16).view(np.uint16)
    tokens = rng.uniform(0.1, 1, (2, case.g, blocks * block)).astype(np.float16).view(np.uint16)
    span = slice(case.t0, case.t1)
    low, step = (np.repeat(widened(end).astype(float), block, axis=1)[:, span] for end in channels)
    keys = low + step * packed.codes[:, span]
    low, step = (widened(end).astype(float)[:, span, None] for end in tokens)
    values = low + step * packed.codes[:, span]
    q, out = normal(rng, case.g, case.m, case.d), normal(rng, case.g, case.m, case.d)
    p = poisoned_scores(case, case.g == 1)
    p[:, :, inside(case)] = rng.random((case.g, case.m, case.length), np.float32)
    exact_sums = out + p[:, :, inside(case)].astype(float) @ values
    key_codec, value_codec = packed.codec(HuffmanKeys, *channels), packed.codec(HuffmanValues, *tokens)
    for backend in (cpu, reference):
        s, sums = poisoned_scores(case, case.g == 1), out.copy()
        backend.scores(key_codec, q, case.t0, case.t1, s[:, :, inside(case)])
        add_values(backend, value_codec, p[:, :, inside(case)], case.t0, case.t1, sums)
        scale = np.abs(q).sum(2).max() * np.abs(keys).max()
        np.testing.assert_allclose(s[:, :, inside(case)], q @ keys.transpose(0, 2, 1), rtol=0, atol=1e-6 * scale)
        outside = np.ones(s.shape[2], bool)
        outside[inside(case)] = False
        assert np.isnan(s[:, :, outside]).all()
        np.testing.assert_allclose(sums, exact_sums, rtol=2e-5, atol=1e-4)
