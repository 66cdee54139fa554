"""Error-bounded levels and their Huffman codes: by the formulas and bit by bit; Numba packs the same words."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kernel_cases import awkward_rows

from edgekv.kernels import reference
from edgekv.papers.kvcomp import cpu as packing
from edgekv.papers.kvcomp import reference as plain_packing
from edgekv.papers.kvcomp.codec import HuffmanCodec, HuffmanKeys, HuffmanValues
from edgekv.papers.kvcomp.reference import Codebook

BACKENDS = pytest.mark.parametrize("backend", [packing, plain_packing], ids=["numba", "numpy"])
POISON = 0xAB
HUGE_F16 = 0x7BFF


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


@pytest.mark.usefixtures("way")
def test_numba_packs_the_same_words() -> None:
    for d, block, levels in ((8, 16, 2), (12, 32, 5), (80, 64, 17), (128, 64, 256)):
        actual, expected = (Packed(backend, d, 3, 4, block, d, levels) for backend in (packing, plain_packing))
        np.testing.assert_array_equal(actual.bits, expected.bits)
        np.testing.assert_array_equal(actual.pool, expected.pool)
