"""KVComp's storage: keys and values in error-bounded levels, packed by a Huffman code of the layer."""

from __future__ import annotations

import abc
import mmap
from collections.abc import Callable, Mapping

import numpy as np

from edgekv.codecs.codec import Codec, Layout, in_package
from edgekv.codecs.f16 import F16
from edgekv.kernels import Kernels
from edgekv.kernels.arrays import contiguous, to_host
from edgekv.papers import affine_levels, from_half
from edgekv.papers.kvcomp.reference import TABLE_BITS, Codebook, gaussian_counts, huffman_decode, huffman_pack
from edgekv.types import F32, U8, U64, Array

WORD_BITS, WORD_BYTES = 64, 8
PAGE_WORDS = 512
POOL_MARGIN = 32  # the pool grows to 1/32 more than the blocks take
HISTOGRAM_TOKENS = 1024  # quantized at a time


class HuffmanCodec(Codec):
    """Base class of codecs of levels as bit strings in a pool, one for each ``block`` of tokens and head.

    A block that the Huffman code would not shorten is stored in fixed-length codes, which bounds the pool. Address
    space is reserved for that bound; memory is taken, and counted, as blocks arrive. on_growth: is called with the
    part of the pool that is in use.
    """

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, block: int, relative_step: float) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.block, self.relative_step = block, relative_step
        self.levels = round(1 / relative_step) + 1
        self.plain = Codebook.fixed_length(self.levels)
        self.plain_bits = block * head_dim * int(self.plain.lengths[0])  # of a block in fixed-length codes
        self.on_growth: Callable[[U64], None] = lambda pool: None
        self.n_encoded = 0

    @property
    @abc.abstractmethod
    def unit_size(self) -> int:
        """Returns how many elements share a low and a step."""

    @abc.abstractmethod
    def quantize(self, x: F32, t0: int) -> U8:
        """Returns the codes of whole blocks x (n_kv_heads, n, head_dim) at tokens t0..; stores low and step."""

    def _levels(self, x: F32, rows: slice) -> U8:
        """Returns the codes of x (n_kv_heads, n, m, ...); stores low and step of each n at ``rows``.

        step is the relative step times the range: no element is further than step / 2 from its level.
        """
        share = np.float32(self.relative_step)
        low, step = (self.arrays[name][:, rows] for name in ("low", "step"))  # views
        return affine_levels(x, 2, low, step, self.levels, lambda span: span * share)

    def layout(self) -> Layout:
        """Returns every array except the pool, whose size depends on the data."""
        return {
            "bits": ((self.n_kv_heads, self.capacity), "uint16"),
            "offsets": ((self.n_kv_heads, self.capacity // self.block), "uint32"),
            "lengths": ((self.levels,), "uint8"),
            "words": ((self.levels,), "uint16"),
            "table": ((1 << TABLE_BITS,), "uint64"),
        }

    @property
    def pool_bound(self) -> int:
        """Returns the most bytes that the pool can take; the decoder reads one word behind the last block."""
        n_blocks = self.n_kv_heads * (self.capacity // self.block)
        return (n_blocks * -(-self.plain_bits // WORD_BITS) + 1) * WORD_BYTES

    @property
    def token_bytes(self) -> int:
        """Returns the mean over the tokens encoded so far, with their share of scales and offsets."""
        scales = 4 * self.head_dim / self.unit_size
        if self.n_encoded:
            strings = self._end(self.n_encoded // self.block) * WORD_BYTES / self.n_encoded
        else:
            strings = self.n_kv_heads * self.plain_bits / self.block / 8
        return round(strings + self.n_kv_heads * (scales + 2 + 4 / self.block))

    def bind(self, arrays: dict[str, Array], kernels: Kernels) -> None:
        """Takes the arrays of `layout`, (n_kv_heads, ...) each, and the kernels."""
        super().bind(arrays, kernels)
        self._plain = [np.asarray(x, like=arrays["words"]) for x in (self.plain.words, self.plain.lengths)]
        self._plain_table = np.asarray(self.plain.table, like=arrays["table"])
        self._reserved: U64 | None = None
        if isinstance(arrays["bits"], np.ndarray):
            spare = self.head_dim * TABLE_BITS // 8 + WORD_BYTES  # what a token whose codes lie could reach beyond
            private = mmap.mmap(-1, self.pool_bound + spare, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._reserved = np.frombuffer(private, np.uint64, self.pool_bound // WORD_BYTES)
        self.pool: U64 = np.zeros_like(arrays["bits"], np.uint64, shape=(0,))
        self.forget()

    def forget(self) -> None:
        """Empties the pool, and returns to the Huffman code of Gaussian numbers."""
        self.n_encoded = 0
        self._open_pool(0)
        self._grow(1)
        self._use(Codebook.huffman(gaussian_counts(self.relative_step, self.unit_size)))

    def _use(self, book: Codebook) -> None:
        for name in ("lengths", "words", "table"):
            self.arrays[name][:] = np.asarray(getattr(book, name), like=self.arrays[name])

    def fit(self, x: F32) -> None:
        """Builds the Huffman code from a prompt's x (n_kv_heads, n, head_dim), before any token is encoded."""
        longest = min(HISTOGRAM_TOKENS, self.capacity) // self.block * self.block
        n = x.shape[1] // self.block * self.block
        if not longest or not n:
            return
        counts = np.zeros(self.levels, np.int64)
        for a in range(0, n, longest):
            part = contiguous(F16.round(x[:, a : min(a + longest, n)]))
            counts += to_host(np.bincount(self.quantize(part, 0).ravel(), minlength=self.levels))
        self._use(Codebook.huffman(counts))

    def encode(self, x: F32, t0: int) -> None:
        """Stores x (n_kv_heads, n, head_dim) as tokens t0.."""
        self.encode_by(huffman_pack, x, t0)

    def encode_by(self, pack: Callable[..., None], x: F32, t0: int) -> None:
        """Stores x (n_kv_heads, n, head_dim) as tokens t0.., by a backend's `huffman_pack`."""
        a, first, n_blocks = self.arrays, t0 // self.block, x.shape[1] // self.block
        codes = self.quantize(x, t0)
        sizes = a["bits"][:, t0 : t0 + x.shape[1]].reshape(-1, n_blocks, self.block)  # a view
        sizes[:] = a["lengths"][codes].sum(axis=2).reshape(sizes.shape)
        n_bits = sizes.sum(axis=2, dtype=np.int64)
        plain = n_bits >= self.plain_bits
        sizes[plain] = self.plain_bits // self.block
        n_words = -(-np.minimum(n_bits, self.plain_bits) // WORD_BITS).T  # (blocks, heads): the pool's order
        ends = self._end(first) + n_words.cumsum().reshape(n_words.shape)
        a["offsets"][:, first : first + n_blocks] = (ends - n_words).T
        self._grow(int(ends[-1, -1]) + 1)
        words = np.stack([a["words"], self._plain[0]])
        lengths = np.stack([a["lengths"], self._plain[1]])
        pack(codes, words, lengths, plain.view(np.uint8), a["offsets"], first, self.block, self.pool)
        self.n_encoded = t0 + x.shape[1]

    def _end(self, n_blocks: int) -> int:
        """Returns the words of the pool that the first blocks of all heads take."""
        if not n_blocks:
            return 0
        last = self.arrays["bits"][-1, (n_blocks - 1) * self.block : n_blocks * self.block]
        return int(self.arrays["offsets"][-1, n_blocks - 1]) - int(last.sum(dtype=np.int64)) // -WORD_BITS

    def _grow(self, n_words: int) -> None:
        """Makes the first n words of the pool usable; blocks stay where they are."""
        if n_words > len(self.pool):
            pages = -(-(n_words + n_words // POOL_MARGIN) // PAGE_WORDS)
            self._open_pool(min(pages * PAGE_WORDS, self.pool_bound // WORD_BYTES))

    def _open_pool(self, n_words: int) -> None:
        """Resizes the pool: in place on the host, where untouched pages take no memory; elsewhere by a copy."""
        if self._reserved is not None:
            self.pool = self._reserved[:n_words]
        else:
            old, self.pool = self.pool, np.zeros_like(self.pool, shape=(n_words,))
            n = min(len(old), n_words)
            self.pool[:n] = old[:n]
        self.backend_state = None
        self.on_growth(self.pool)

    def extra_state(self) -> dict[str, int]:
        """Returns the sizes that depend on the data, as `KVCache.extra_state`."""
        return {"pool_words": len(self.pool), "n_encoded": self.n_encoded}

    def load_extra_state(self, extra: Mapping[str, int]) -> None:
        n_encoded, n_words = int(extra["n_encoded"]), int(extra["pool_words"])
        if not 0 <= n_encoded <= self.capacity or not 1 <= n_words <= self.pool_bound // WORD_BYTES:
            raise ValueError(f"{n_encoded} tokens in {n_words} words")
        self.n_encoded = n_encoded
        self._open_pool(n_words)

    def arrays_valid(self, n_tokens: int) -> bool:
        """Returns whether the first tokens' blocks lie as `encode` puts them, and the tables are those of a code.

        Blocks follow each other, none longer than in fixed-length codes: then there is room for those to come.
        """
        a = {name: to_host(array) for name, array in self.arrays.items()}
        if n_tokens > self.n_encoded or not Codebook.is_one(a["lengths"], a["words"], a["table"]):
            return False
        n_blocks = n_tokens // self.block
        n_bits = a["bits"][:, :n_tokens].reshape(self.n_kv_heads, n_blocks, self.block).sum(axis=2, dtype=np.int64)
        n_words = -(-n_bits // WORD_BITS).T
        ends = n_words.cumsum().reshape(n_words.shape)
        are_adjacent = np.array_equal(a["offsets"][:, :n_blocks], (ends - n_words).T)
        return are_adjacent and bool((n_bits <= self.plain_bits).all() and (ends < len(self.pool)).all())

    def store(self) -> tuple[U64, Array, Array, Array, U64, int, Array, Array]:
        """Returns what kernels read: pool (words,), offsets, bits, tables, bits of a plain block, low, step."""
        a = self.arrays
        tables = a["table"], self._plain_table, self.plain_bits
        return self.pool, a["offsets"], a["bits"], *tables, a["low"], a["step"]


class HuffmanKeys(HuffmanCodec):
    """Keys with low and step per channel of each block: 4 * head_dim / block bytes per token and head."""

    kind = "huffman_keys"
    backends = in_package("edgekv.papers.kvcomp")

    @property
    def unit_size(self) -> int:
        return self.block

    def layout(self) -> Layout:
        channels = ((self.n_kv_heads, self.capacity // self.block, self.head_dim), "uint16")
        return {"low": channels, "step": channels, **super().layout()}

    def quantize(self, x: F32, t0: int) -> U8:
        """Returns codes (n_kv_heads, n, head_dim) of x."""
        n_kv_heads, n, head_dim = x.shape
        blocks = slice(t0 // self.block, (t0 + n) // self.block)
        return self._levels(x.reshape(n_kv_heads, -1, self.block, head_dim), blocks).reshape(x.shape)

    def decode(self, t0: int, t1: int) -> F32:
        blocks = np.arange(t0, t1) // self.block
        low, step = (from_half(self.arrays[name][:, blocks]) for name in ("low", "step"))
        return low + step * huffman_decode(self, t0, t1)


class HuffmanValues(HuffmanCodec):
    """Values with low and step per token: 4 bytes per token and head."""

    kind = "huffman_values"
    backends = in_package("edgekv.papers.kvcomp")

    @property
    def unit_size(self) -> int:
        return self.head_dim

    def layout(self) -> Layout:
        tokens = ((self.n_kv_heads, self.capacity), "uint16")
        return {"low": tokens, "step": tokens, **super().layout()}

    def quantize(self, x: F32, t0: int) -> U8:
        """Returns codes (n_kv_heads, n, head_dim) of x."""
        return self._levels(x, slice(t0, t0 + x.shape[1]))

    def decode(self, t0: int, t1: int) -> F32:
        low, step = (from_half(self.arrays[name][:, t0:t1, None]) for name in ("low", "step"))
        return low + step * huffman_decode(self, t0, t1)
