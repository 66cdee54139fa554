"""Keys and values behind a fixed rotation, which spreads outlier channels: a few bits then suffice.

Keys are centres and a few bits per element in planes; values are 1 to 4 bits, four tokens side by side. Scales
are float16 bits; n and D are multiples of 64 where bits are packed in words. A code of b bits stands for
(code - (2 ** b - 1) / 2) * scale: levels lie symmetrically about 0 and the top bit is the sign, 1 for x >= 0. x
must be finite.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from edgekv.codecs.codec import WORD, Codec, Layout, in_package
from edgekv.kernels import BLOCK, Kernels
from edgekv.kernels.arrays import contiguous
from edgekv.kernels.interface import LARGEST_F16
from edgekv.types import F32, I64, U8, U16, Array

CENTRE = 16
"""Tokens that share a centre."""

CENTRES = 5
"""Rows of centres of a block of 64 tokens: its mean, and one for each CENTRE tokens."""

GROUPS = 4
"""Runs of 16 bytes that a block's tokens lie in, in `encode_keys`."""

GAUSS_STEP = {1: 1.5958, 2: 0.9957, 3: 0.586, 4: 0.3352}
"""Step of the best uniform quantiser of b bits for a Gaussian of variance 1: what rotated elements look like."""

MIDDLES = {bits: np.float32((2**bits - 1) / 2) for bits in GAUSS_STEP}
"""Of codes of b bits: what stands for 0."""

LARGEST_FOUR = 61
"""Magnitudes of four neighbouring elements of a query add up to at most as many of its steps: `round_queries`."""

LEAST_WEIGHT = 1e-30
"""p * scale: where a block's largest is smaller, its 8-bit weights are too, down to 0."""

TOP_WEIGHT = np.float32(255)


def place_of(token: int) -> tuple[int, int]:
    """Group and byte of a token of a block of 64 in `encode_keys`."""
    return token % 16 // 4, 4 * (token % 4) + (0, 2, 1, 3)[token // 16]


ORDER = sorted(range(BLOCK), key=place_of)  # of a block's tokens, as they are stored
PLACES = np.array([16 * group + byte for group, byte in map(place_of, range(BLOCK))])  # of tokens, in their block


class Rotation:
    """x -> P x, P (width, head_dim) with orthonormal columns, fixed by ``seed`` and stored with no token.

    A randomised Hadamard transform of x padded with zeros if ``width`` is a power of two, else the orthogonal
    factor of a Gaussian matrix.
    """

    def __init__(self, head_dim: int, width: int, seed: int) -> None:
        self.head_dim, self.width = head_dim, width
        rng = np.random.Generator(np.random.PCG64(seed))
        self.flips: F32 | None = None
        if width & (width - 1) == 0:
            self.flips = rng.choice(np.array([-1, 1], np.float32), width)
        else:
            self.matrix = np.linalg.qr(rng.standard_normal((width, head_dim)))[0].astype(np.float32)
            self.inverse = np.ascontiguousarray(self.matrix.T)

    def bind(self, like: Array) -> None:
        """Brings the constants to where ``like`` is."""
        if self.flips is None:
            self.matrix = np.asarray(self.matrix, like=like)
            self.inverse = np.asarray(self.inverse, like=like)
        else:
            self.flips = np.asarray(self.flips, like=like)

    def forward(self, x: F32, kernels: Kernels) -> F32:
        """(A, n, width) of x (A, n, head_dim)."""
        if self.flips is None:
            return kernels.project(x, self.matrix)
        out = np.empty_like(x, shape=(*x.shape[:2], self.width))
        kernels.hadamard(x, self.flips, out)
        return out

    def backward(self, x: F32, kernels: Kernels) -> F32:
        """The inverse (A, n, head_dim) of x (A, n, width)."""
        if self.flips is None:
            return kernels.project(x, self.inverse)
        out = np.zeros_like(x, shape=(*x.shape[:2], self.head_dim))
        kernels.hadamard_back(contiguous(x), self.flips, out)
        return out


class CentredPlanes(Codec):
    """Centres of 64 and of 16 tokens in 4 bits, and planes of a few bits per element of the rest, with one scale.

    r = P k - c; x is r in the best uniform levels for a Gaussian (for 1 bit sign(r)), f = |r|_2 ** 2 / (r . x):
    q . k ~ (P q) . c + key_scale * f * (P q) . x, by tables of signed sums. P has ``width`` rows: head_dim rounded
    up to a multiple of 64, every bit of which thus tells something. `bits` (n_kv_heads,) are those of each head, 1
    to 4, `first_plane` (n_kv_heads,) says where its planes begin; `key_scale` (n_kv_heads,) shrinks the estimate:
    1 is unbiased. `channel_scales` (n_kv_heads, head_dim) multiply a key's channels before all that, and
    `query_factors`, 1 / channel_scales, a query's, so that the noise, even in all directions, is least where
    queries are long.
    """

    kind = "centred_planes"
    backends = in_package("edgekv.codecs.planes")

    def __init__(
        self,
        n_kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        bits: int | Sequence[int],
        key_scale: float | Sequence[float],
        seed: int,
        channel_scales: F32 | None = None,
    ) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.bits, self.first_plane = bits_of_heads(bits, n_kv_heads)
        even = np.ones((n_kv_heads, head_dim), np.float32)
        self.channel_scales = even if channel_scales is None else np.ascontiguousarray(channel_scales)
        self.query_factors: F32 = np.divide(np.float32(1), self.channel_scales)
        self.query_flips: F32 | None = None  # of a Hadamard rotation: its signs times query_factors
        self.heads = np.stack([self.first_plane, self.bits], axis=1).astype(np.int32)
        self.width = -(-head_dim // WORD) * WORD
        self.key_scale: F32 = np.broadcast_to(np.asarray(key_scale, np.float32), n_kv_heads).copy()
        self.rotation = Rotation(head_dim, self.width, seed)

    def layout(self) -> Layout:
        g, blocks, width = self.n_kv_heads, self.capacity // WORD, self.width
        return {
            "planes": ((int(self.bits.sum()), blocks, GROUPS, width // 8, WORD // GROUPS), "uint8"),
            "scale": ((g, self.capacity), "uint16"),
            "centres": ((g, blocks, CENTRES, width // 2), "uint8"),
            "centre_step": ((g, blocks, CENTRES), "uint16"),
        }

    @property
    def token_bytes(self) -> int:
        """Rounded up: the centres' share need not be whole."""
        return -(-self.block_bytes // WORD)

    def bytes_of(self, n_tokens: int) -> int:
        return -(-n_tokens * self.block_bytes // WORD)

    @property
    def block_bytes(self) -> int:
        """Bytes of WORD tokens, all heads together."""
        centres = WORD * 2 + CENTRES * (self.width // 2 + 2)
        return int(self.bits.sum()) * WORD * self.width // 8 + self.n_kv_heads * centres

    def bind(self, arrays: dict[str, Array], kernels: Kernels) -> None:
        """Takes the arrays of `layout`, (n_kv_heads, ...) each, and the kernels."""
        super().bind(arrays, kernels)
        self.rotation.bind(arrays["planes"])
        self.key_scale = np.asarray(self.key_scale, like=arrays["planes"])
        self.channel_scales = np.asarray(self.channel_scales, like=arrays["planes"])
        self.query_factors = np.asarray(self.query_factors, like=arrays["planes"])
        if self.rotation.flips is not None:
            self.query_flips = self.query_factors * self.rotation.flips[: self.head_dim]
        self.heads = np.asarray(self.heads, like=arrays["planes"])

    def encode(self, x: F32, t0: int) -> None:
        self.encode_by(encode_centres, encode_keys, x, t0)

    def encode_by(self, centres: Callable[..., None], keys: Callable[..., None], x: F32, t0: int) -> None:
        """Stores x (n_kv_heads, n, head_dim) as tokens t0.., by a backend's `encode_centres` and `encode_keys`."""
        a = self.arrays
        rotated = self.rotation.forward(x * self.channel_scales[:, None], self.kernels)
        centres(rotated, a["centres"], a["centre_step"], t0)
        for heads, planes in runs_of_heads(self.bits, a["planes"]):
            keys(rotated[heads], planes, a["scale"][heads], t0)

    def decode(self, t0: int, t1: int) -> F32:
        levels, centres = self._stored(t0, t1)
        rotated = centres + levels * _widen(self.arrays["scale"][:, t0:t1])[..., None]
        keys: F32 = self.rotation.backward(rotated, self.kernels) * self.query_factors[:, None]
        return keys

    def scores(self, q: F32, t0: int, t1: int) -> F32:
        """q . centre + key_scale * scale * (q as `round_queries` has it) . levels."""
        rotated = self.rotation.forward(q * self.query_factors[:, None], self.kernels)
        rounded, step = round_queries(rotated)
        levels, centres = self._stored(t0, t1)
        width = _widen(self.arrays["scale"][:, t0:t1]) * self.key_scale[:, None]
        products = rounded @ levels.swapaxes(1, 2)
        scores: F32 = rotated @ centres.swapaxes(1, 2) + step[..., None] * width[:, None] * products
        return scores

    def _stored(self, t0: int, t1: int) -> tuple[F32, F32]:
        """Levels, sum of 2 ** (bits - 1 - p) * sign of plane p, and centres: (n_kv_heads, t1 - t0, width) each."""
        a, first = self.arrays, t0 // BLOCK
        blocks, tokens = slice(first, -(-t1 // BLOCK)), slice(t0 - first * BLOCK, t1 - first * BLOCK)
        codes = a["centres"][:, blocks]
        means = np.concatenate([codes & 15, codes >> 4], axis=3).astype(np.float32) - np.float32(7.5)
        means *= _widen(a["centre_step"][:, blocks])[..., None]  # (n_kv_heads, blocks, CENTRES, width)
        centres = np.repeat(means[:, :, :1] + means[:, :, 1:], CENTRE, axis=2)
        centres = centres.reshape(self.n_kv_heads, -1, self.width)
        levels, places = np.empty_like(centres), np.asarray(PLACES, like=codes)
        for heads, planes in runs_of_heads(self.bits, a["planes"]):
            n, bits = planes.shape[0], planes.shape[2]
            groups = planes[:, blocks].transpose(0, 1, 3, 5, 2, 4).reshape(n, -1, BLOCK, bits, self.width // 8)
            columns = contiguous(groups[:, :, places])
            signs = 2 * np.unpackbits(columns.ravel(), bitorder="little").astype(np.float32) - 1
            worth = np.asarray(2.0 ** np.arange(bits - 1, -1, -1, dtype=np.float32)[:, None], like=signs)
            levels[heads] = (signs.reshape(n, -1, bits, self.width) * worth).sum(axis=2)
        return levels[:, tokens], centres[:, tokens]


def encode_centres(x: F32, codes: U8, step: U16, t0: int) -> None:
    """Stores means of x (G, n, D) in 4 bits and leaves x - (what was stored) in x; n, t0 are multiples of 64.

    codes (G, cap / 64, CENTRES, D / 2): row 0 has the mean of the block of 64 tokens, rows 1.. those of each
    CENTRE tokens of what that leaves. Two steps hold an offset of all keys, however large, as well as the
    differences. Byte j has element j in its low nibble and j + D / 2 in its high one.
    step (G, cap / 64, CENTRES): the row's largest magnitude / 8.
    """
    g, n, d = x.shape
    blocks = slice(t0 // BLOCK, (t0 + n) // BLOCK)
    _encode_means(x.reshape(g, n // BLOCK, 1, BLOCK, d), codes[:, blocks, :1], step[:, blocks, :1])
    _encode_means(x.reshape(g, n // BLOCK, -1, CENTRE, d), codes[:, blocks, 1:], step[:, blocks, 1:])


def _encode_means(x: F32, codes: U8, step: U16) -> None:
    """codes (..., D / 2) and step (...) of the means of x (..., n, D), which are subtracted."""
    n, d = x.shape[-2:]
    mean = x[..., 0, :].copy()
    for i in range(1, n):
        mean += x[..., i, :]
    mean *= np.float32(1 / n)
    step[...] = to_half(np.abs(mean).max(axis=-1) / np.float32(8))
    width = step.view(np.float16).astype(np.float32)[..., None]
    levels = np.clip(np.floor(mean / np.where(width == 0, 1, width)) + 8, 0, 15).astype(np.float32)
    packed = levels.astype(np.uint8)
    codes[...] = packed[..., : d // 2] | packed[..., d // 2 :] << 4
    x -= ((levels - np.float32(7.5)) * width)[..., None, :]


def encode_keys(x: F32, planes: U8, scale: U16, t0: int) -> None:
    """Stores x (G, n, D), n and t0 multiples of 64, in B bits: planes (G, cap / 64, B, GROUPS, D / 8, 16).

    The planes come by successive approximation: the first has the signs of x, the next ones those of what is
    left when sign * step * 2 ** (B - 2 - p) is taken off for plane p; step = GAUSS_STEP[B] * the token's root
    mean square. Byte [p, i, c, j] of a block has channels 8 * c.. from its low bit up, of the token that
    `place_of` puts at (i, j): 16 tokens are looked up at once, and sums come out in order. With
    level = sum of 2 ** (B - 1 - p) * sign, odd whole numbers, scale (G, cap) = |x| ** 2 / (x . level):
    level * scale has the inner product |x| ** 2 with x (RaBitQ for B = 1). A codec whose heads have different
    B keeps their planes one behind the other.
    """
    _, n, d = x.shape
    bits = planes.shape[2]
    square = np.square(x, dtype=np.float64).sum(axis=2)
    step = (np.sqrt(square / d) * GAUSS_STEP[bits]).astype(np.float32)
    left, level = x.copy(), np.zeros(x.shape)
    rows = slice(t0 // BLOCK, (t0 + n) // BLOCK)
    for p in range(bits):
        sign = left >= 0
        planes[:, rows, p] = _in_groups(np.packbits(sign, axis=2, bitorder="little"))
        level += np.where(sign, 1, -1) * 2.0 ** (bits - 1 - p)
        size = (step * np.float32(2.0 ** (bits - 2 - p)))[..., None]
        left -= np.where(sign, size, -size)
    along = (x * level).sum(axis=2)
    scale[:, t0 : t0 + n] = to_half(square / np.where(along == 0, 1, along))


def _in_groups(columns: U8) -> U8:
    """(G, n / 64, GROUPS, D / 8, 16) of the bytes (G, n, D / 8) of tokens."""
    g, n, width = columns.shape
    blocks = columns.reshape(g, n // BLOCK, BLOCK, width)[:, :, ORDER]
    stored: U8 = blocks.reshape(g, n // BLOCK, GROUPS, -1, width).transpose(0, 1, 2, 4, 3)
    return stored


def round_queries(q: F32) -> tuple[F32, F32]:
    """q (..., D) in odd halves of a step, and that step (...): four neighbours' sums are whole, at most 63."""
    four = np.abs(q).reshape(*q.shape[:-1], -1, 4)
    largest = (four[..., 0] + four[..., 1] + four[..., 2] + four[..., 3]).max(axis=-1)
    step = largest / np.float32(LARGEST_FOUR)
    whole = np.floor(q / np.where(step == 0, 1, step)[..., None])
    return whole + np.float32(0.5), step


def bits_of_heads(bits: int | Sequence[int], n_kv_heads: int) -> tuple[I64, I64]:
    """Bits of each head, and how many all heads before it have. Both (n_kv_heads,)."""
    each = np.broadcast_to(np.asarray(bits, np.int64), n_kv_heads).copy()
    return each, np.cumsum(each) - each


def runs_of_heads(bits: I64, store: Array) -> Iterator[tuple[slice, Array]]:
    """Neighbouring heads of as many bits, and their part of store (all bits, blocks, ...): head, block, bit."""
    first, row = 0, 0
    for b, run in itertools.groupby(bits.tolist()):
        n = len(list(run))
        yield slice(first, first + n), store[row : row + n * b].reshape(n, store.shape[1], b, *store.shape[2:])
        first, row = first + n, row + n * b


class InterleavedValues(Codec):
    """A few bits per element of P v, with one scale: the best uniform levels for a Gaussian, not shrunk.

    `bits` and `first_plane` (n_kv_heads,) as those of `CentredPlanes`; a plane is two rows of codes here.
    """

    kind = "interleaved"
    backends = in_package("edgekv.codecs.planes")

    def __init__(
        self, n_kv_heads: int, capacity: int, head_dim: int, *, bits: int | Sequence[int], seed: int
    ) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.bits, self.first_plane = bits_of_heads(bits, n_kv_heads)
        self.heads = np.stack([self.first_plane, self.bits], axis=1).astype(np.int32)
        self.rotation = Rotation(head_dim, head_dim, seed)

    def layout(self) -> Layout:
        g, capacity = self.n_kv_heads, self.capacity
        return {
            "codes": ((int(self.bits.sum()), capacity // WORD, 2, self.head_dim, 4), "uint8"),
            "scale": ((g, capacity), "uint16"),
        }

    @property
    def token_bytes(self) -> int:
        return int((-(-(self.bits * self.head_dim + 16) // 8)).sum())

    def bind(self, arrays: dict[str, Array], kernels: Kernels) -> None:
        """Takes the arrays of `layout`, (n_kv_heads, ...) each, and the kernels."""
        super().bind(arrays, kernels)
        self.rotation.bind(arrays["codes"])
        self.heads = np.asarray(self.heads, like=arrays["codes"])

    def encode(self, x: F32, t0: int) -> None:
        self.encode_by(encode_interleaved, x, t0)

    def encode_by(self, values: Callable[..., None], x: F32, t0: int) -> None:
        """Stores x (n_kv_heads, n, head_dim) as tokens t0.., by a backend's `encode_interleaved`."""
        rotated = self.rotation.forward(x, self.kernels)
        for heads, codes in self._codes():
            values(rotated[heads], codes, self.arrays["scale"][heads], t0)

    def decode(self, t0: int, t1: int) -> F32:
        scale, first = _widen(self.arrays["scale"][:, t0:t1]), t0 // BLOCK
        blocks = [self._levels(block) for block in range(first, -(-t1 // BLOCK))]
        levels = np.concatenate(blocks, axis=1)[:, t0 - first * BLOCK : t1 - first * BLOCK]
        return self.rotation.backward(levels * scale[..., None], self.kernels)

    def sums(self, p: F32, t0: int, t1: int) -> F32:
        """p times scale is rounded to 8 bits in each block."""
        rotated = np.zeros((*p.shape[:2], self.head_dim), np.float32)
        for block in range(t0 // BLOCK, -(-t1 // BLOCK)):
            first, last = max(t0, block * BLOCK), min(t1, (block + 1) * BLOCK)
            weights = np.zeros((*p.shape[:2], BLOCK), np.float32)
            inside = slice(first - block * BLOCK, last - block * BLOCK)
            scale = _widen(self.arrays["scale"][:, None, first:last])
            weights[..., inside] = p[:, :, first - t0 : last - t0] * scale
            top = weights.max(axis=2, keepdims=True)
            whole = np.rint(weights * (TOP_WEIGHT / np.maximum(top, np.float32(LEAST_WEIGHT))))
            rotated += top / TOP_WEIGHT * (whole @ self._levels(block))
        return self.rotation.backward(rotated, self.kernels)

    def _codes(self) -> Iterator[tuple[slice, U8]]:
        """Neighbouring heads of as many bits, and their codes (heads, blocks, 2 * bits, head_dim, 4)."""
        for heads, planes in runs_of_heads(self.bits, self.arrays["codes"]):
            yield heads, planes.reshape(*planes.shape[:2], -1, self.head_dim, 4)

    def _levels(self, block: int) -> F32:
        """(n_kv_heads, BLOCK, head_dim) of a block, the middle taken off."""
        heads = ((_unpacked(codes[:, block]), MIDDLES[codes.shape[2] // 2]) for _, codes in self._codes())
        return np.concatenate([codes.astype(np.float32) - middle for codes, middle in heads])


PARTS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,)}  # bits of a code, in groups that divide a byte


def encode_interleaved(x: F32, codes: U8, scale: U16, t0: int) -> None:
    """Stores x (G, n, D), n and t0 multiples of 64, in codes of b bits at blocks of 64 tokens; any D.

    codes (G, cap / 64, 2 * b, D, 4). For 4, 2 and 1 bits, byte [q, d, i] has element d of the tokens
    t = 4 * q + i, t + 8 * b, t + 16 * b, ... of the block, from its low bits up: four tokens lie side by side,
    as the dot product instructions of 8-bit integers want them. 3 bits are the upper 2 bits (4 rows q)
    followed by the lowest (2 rows).
    The codes are those of the best uniform step for a Gaussian of the token's mean square; scale (G, cap) is
    then |x| ** 2 / (x . levels), so that the stored vector has the inner product |x| ** 2 with x: sums of
    many values are not shrunk.
    """
    g, n, d = x.shape
    bits = codes.shape[2] // 2
    levels, step = gauss_levels(x, bits)
    scale[:, t0 : t0 + n] = to_half(step)
    blocks = levels.reshape(g, n // BLOCK, BLOCK, d)
    row, left = 0, bits
    for part in PARTS[bits]:
        left -= part
        piece = blocks >> left & (1 << part) - 1
        spread = piece.reshape(g, n // BLOCK, 8 // part, 2 * part, 4, d).transpose(0, 1, 2, 3, 5, 4)
        packed = np.zeros(spread.shape[:2] + spread.shape[3:], np.uint8)  # (G, blocks, 2 * part, D, 4)
        for i in range(8 // part):
            packed |= spread[:, :, i] << part * i
        codes[:, t0 // BLOCK : (t0 + n) // BLOCK, row : row + 2 * part] = packed
        row += 2 * part


def gauss_levels(x: F32, bits: int) -> tuple[U8, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    """Codes of x (..., D) in `bits` bits, and the scale that keeps x's length along x."""
    square = np.square(x, dtype=np.float64).sum(axis=-1)
    step = (np.sqrt(square / x.shape[-1]) * GAUSS_STEP[bits]).astype(np.float32)
    half = 2 ** (bits - 1)
    codes = np.clip(np.floor(x / np.where(step == 0, 1, step)[..., None]) + half, 0, 2 * half - 1)
    along = (x.astype(np.float64) * (codes - (half - 0.5))).sum(axis=-1)
    return codes.astype(np.uint8), square / np.where(along == 0, 1, along)


def _unpacked(codes: U8) -> U8:
    """(G, 64, D) of a block (G, 2 * bits, D, 4)."""
    g, n_lines, d, _ = codes.shape
    bits, levels = n_lines // 2, np.zeros_like(codes, shape=(g, BLOCK, d))
    row = 0
    for part in PARTS[bits]:
        rows = codes[:, row : row + 2 * part]
        pieces = [rows >> part * i & (1 << part) - 1 for i in range(8 // part)]  # each (G, 2 * part, D, 4)
        stacked = np.stack(pieces, axis=1).transpose(0, 1, 2, 4, 3)
        levels = levels << part | stacked.reshape(g, BLOCK, d)
        row += 2 * part
    return levels


def to_half(x: npt.NDArray[np.floating]) -> U16:
    """Returns the bits of the nearest finite float16 of x >= 0, shape (*x.shape,)."""
    bits: U16 = np.minimum(x, LARGEST_F16).astype(np.float32).astype(np.float16).view(np.uint16)
    return bits


def _widen(bits: U16) -> F32:
    return contiguous(bits).view(np.float16).astype(np.float32)
