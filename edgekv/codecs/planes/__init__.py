"""The codecs of the scheme `planes`: keys and values behind a fixed rotation, in a few bits per element.

A rotation spreads outlier channels over all of them, so that few bits suffice. Tokens are packed in blocks of
BLOCK = 64. What a block of one KV head has, D channels, B bits per element (D is a multiple of 64 for keys):

    keys, `CentredPlanes`           a run is 16 tokens one behind the other, a column is 8 channels

      centres      [0] the mean of the block, [1] to [4] the means of its runs 0 to 3, of what [0] leaves
                     D/2 bytes each: byte j has channel j in its low 4 bits, channel j + D/2 in its high 4 bits
      centre_step  a float16 for each centre: a code stands for (code - 7.5) * step
      planes       of signs of what the centres leave: plane 0 has the top bits of all codes, plane B-1 the lowest

                   a plane       column 0    column 1   ...  column D/8-1
                     group 0    [16 bytes]  [16 bytes]        [16 bytes]    a byte is of one token: bit i is 1
                     group 1    [16 bytes]  [16 bytes]        [16 bytes]    where channel 8 * column + i >= 0
                     group 2    [16 bytes]  [16 bytes]        [16 bytes]
                     group 3    [16 bytes]  [16 bytes]        [16 bytes]

                   group g has 4 tokens of each run, 4g to 4g + 3, and its bytes are of the tokens

                     4g  4g+32  4g+16  4g+48    4g+1  4g+33  4g+17  4g+49    4g+2  ...    4g+3  ...
                     run 0   2      1      3

                   so that 16-bit and 32-bit sums of neighbouring bytes come apart into tokens of one run each
      scale        a float16 for each token: an element is centre + (2 * code - (2 ** B - 1)) * scale

    values, `InterleavedValues`     a quad is 4 tokens one behind the other, a field is bits of a code

      codes        2 * B lines of D words of 4 bytes; word d of a line is of channel d, a byte for each token of a
                   quad. B = 1, 2, 4 are one field, B = 3 is a field of the 2 upper bits and one of the lowest bit.
                   A field of F bits has 2 * F lines: line i has quad i in its bytes' lowest F bits, then the
                   quads i + 2F, i + 4F, ...

                     F = 2, line 1     byte 0     byte 1     byte 2     byte 3
                       bits 0, 1      token 4    token 5    token 6    token 7      quad 1
                       bits 2, 3      token 20   token 21   token 22   token 23     quad 5
                       bits 4, 5      token 36   ...                                quad 9
                       bits 6, 7      token 52   ...                                quad 13
      scale        a float16 for each token: an element is (code - (2 ** B - 1) / 2) * scale

Levels lie symmetrically about 0, and the top bit of a code is the sign, 1 for x >= 0. Elements must be finite.
Heads may have different B: their planes, or lines, lie one head's behind the other's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from edgekv.codecs.codec import Codec, Layout, from_half, in_package, to_finite_half
from edgekv.kernels import BLOCK, Kernels
from edgekv.kernels.arrays import contiguous
from edgekv.types import F32, I64, U8, U16, Array

RUN = 16
"""Tokens one behind the other that share a centre."""

N_RUNS, N_CENTRES = BLOCK // RUN, 1 + BLOCK // RUN

GROUP = 16
"""Tokens whose bytes of a column lie side by side in a plane, as one shuffle of bytes looks them up."""

N_GROUPS = BLOCK // GROUP

GAUSS_STEP = {1: 1.5958, 2: 0.9957, 3: 0.586, 4: 0.3352}
"""Step of the best uniform quantizer of b bits for a Gaussian of variance 1: what rotated elements look like."""

MIDDLE_CODE = {bits: np.float32((2**bits - 1) / 2) for bits in GAUSS_STEP}
"""By bits: the middle of the codes, which stands for 0."""

MAX_FOUR_SUM = 61
"""Steps to which the magnitudes of four neighbouring elements of a query add up at most (`round_queries`)."""

MIN_WEIGHT = 1e-30
"""The least p * scale that becomes MAX_WEIGHT; a block whose largest is smaller has smaller weights only."""

MAX_WEIGHT = np.float32(255)
"""The largest weight of values, a byte: p * scale of a block's tokens is rounded to its multiples."""


def place_of(token: int) -> tuple[int, int]:
    """Returns a token's group, and its byte in the group's columns."""
    return token % RUN // 4, 4 * (token % 4) + (0, 2, 1, 3)[token // RUN]


ORDER = sorted(range(BLOCK), key=place_of)  # of a block's tokens, as they are stored
PLACES = np.array([GROUP * group + byte for group, byte in map(place_of, range(BLOCK))])  # of a block's tokens


def random_signs(seed: int, n: int) -> F32:
    """Returns n signs (n,), -1 or 1, made of raw bits of PCG64, as NumPy may change what it draws from them."""
    halves = np.random.PCG64(seed).random_raw(n // 2 + 1).astype("<u8").view("<u4")
    signs: F32 = np.where(halves[:n] >> 31, np.float32(1), np.float32(-1))
    return signs


class Rotation:
    """The rotation x -> P x, P (width, head_dim) with orthonormal columns, fixed by ``seed``: no token stores it.

    A randomised Hadamard transform of x padded with zeros if ``width`` is a power of two, else the orthogonal
    factor of a Gaussian matrix.
    """

    def __init__(self, head_dim: int, width: int, seed: int) -> None:
        self.head_dim, self.width = head_dim, width
        self.flips: F32 | None = None
        if width & (width - 1) == 0:
            self.flips = random_signs(seed, width)
        else:
            rng = np.random.Generator(np.random.PCG64(seed))
            self.matrix = np.linalg.qr(rng.standard_normal((width, head_dim)))[0].astype(np.float32)
            self.inverse = np.ascontiguousarray(self.matrix.T)
        self.fixed: F32 = self.matrix if self.flips is None else self.flips

    def bind(self, like: Array) -> None:
        """Copies the constants to the device of ``like``."""
        if self.flips is None:
            self.matrix = np.asarray(self.matrix, like=like)
            self.inverse = np.asarray(self.inverse, like=like)
        else:
            self.flips = np.asarray(self.flips, like=like)

    def forward(self, x: F32, kernels: Kernels) -> F32:
        """Returns P x (A, n, width) of x (A, n, head_dim)."""
        if self.flips is None:
            return kernels.project(x, self.matrix)
        out = np.empty_like(x, shape=(*x.shape[:2], self.width))
        kernels.hadamard(x, self.flips, out)
        return out

    def backward(self, x: F32, kernels: Kernels) -> F32:
        """Returns the inverse (A, n, head_dim) of x (A, n, width)."""
        if self.flips is None:
            return kernels.project(x, self.inverse)
        out = np.zeros_like(x, shape=(*x.shape[:2], self.head_dim))
        kernels.hadamard_back(contiguous(x), self.flips, out)
        return out


class CentredPlanes(Codec):
    """Keys: centres of 64 and of 16 tokens in 4 bits, and what they leave in planes of 1 to 4 bits per element.

    r = P k - c, of a key k and its centre c; x is r in the best uniform levels for a Gaussian (for 1 bit the signs
    of r), f = |r|_2 ** 2 / (r . x): q . k ~ (P q) . c + key_scale * f * (P q) . x. P has ``width`` rows: head_dim
    rounded up to a multiple of 64, as each of them adds information.

    bits, first_plane (n_kv_heads,): of each head, and how many planes all heads before it have. key_scale
    (n_kv_heads,): shrinks the estimate, 1 is unbiased. channel_scales (n_kv_heads, head_dim): what channels of
    keys are multiplied with before they are stored, and those of queries divided by (query_factors), so that the
    noise, even in all directions, is least where queries are long.
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
        ones = np.ones((n_kv_heads, head_dim), np.float32)
        self.channel_scales = ones if channel_scales is None else np.ascontiguousarray(channel_scales)
        self.query_factors: F32 = np.divide(np.float32(1), self.channel_scales)
        self.query_flips: F32 | None = None  # of a Hadamard rotation: its signs times query_factors
        self.heads = np.stack([self.first_plane, self.bits], axis=1).astype(np.int32)
        self.width = -(-head_dim // BLOCK) * BLOCK
        self.key_scale: F32 = np.broadcast_to(np.asarray(key_scale, np.float32), n_kv_heads).copy()
        self.rotation = Rotation(head_dim, self.width, seed)
        self.fixed = self.rotation.fixed

    def layout(self) -> Layout:
        g, blocks, width = self.n_kv_heads, self.capacity // BLOCK, self.width
        return {
            "planes": ((int(self.bits.sum()), blocks, N_GROUPS, width // 8, BLOCK // N_GROUPS), "uint8"),
            "scale": ((g, self.capacity), "uint16"),
            "centres": ((g, blocks, N_CENTRES, width // 2), "uint8"),
            "centre_step": ((g, blocks, N_CENTRES), "uint16"),
        }

    @property
    def token_bytes(self) -> int:
        """Bytes of a token, all heads together; rounded up, as the centres' share need not be whole."""
        return -(-self.block_bytes // BLOCK)

    def bytes_of(self, n_tokens: int) -> int:
        return -(-n_tokens * self.block_bytes // BLOCK)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of tokens, all heads together."""
        centres = BLOCK * 2 + N_CENTRES * (self.width // 2 + 2)
        return int(self.bits.sum()) * BLOCK * self.width // 8 + self.n_kv_heads * centres

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
        for heads, planes in heads_of_equal_bits(self.bits, a["planes"]):
            keys(rotated[heads], planes, a["scale"][heads], t0)

    def decode(self, t0: int, t1: int) -> F32:
        levels, centres = self._stored(t0, t1)
        rotated = centres + levels * from_half(self.arrays["scale"][:, t0:t1])[..., None]
        keys: F32 = self.rotation.backward(rotated, self.kernels) * self.query_factors[:, None]
        return keys

    def scores(self, q: F32, t0: int, t1: int) -> F32:
        """Returns scores (n_kv_heads, rows, t1 - t0) of q (n_kv_heads, rows, head_dim) with tokens t0..t1.

        They are q . centre + key_scale * scale * (q as `round_queries` rounds it) . levels.
        """
        rotated = self.rotation.forward(q * self.query_factors[:, None], self.kernels)
        rounded, step = round_queries(rotated)
        levels, centres = self._stored(t0, t1)
        width = from_half(self.arrays["scale"][:, t0:t1]) * self.key_scale[:, None]
        products = rounded @ levels.swapaxes(1, 2)
        scores: F32 = rotated @ centres.swapaxes(1, 2) + step[..., None] * width[:, None] * products
        return scores

    def _stored(self, t0: int, t1: int) -> tuple[F32, F32]:
        """Returns levels and centres of tokens t0..t1, (n_kv_heads, t1 - t0, width) each."""
        a, first = self.arrays, t0 // BLOCK
        blocks, tokens = slice(first, -(-t1 // BLOCK)), slice(t0 - first * BLOCK, t1 - first * BLOCK)
        codes = a["centres"][:, blocks]
        means = np.concatenate([codes & 15, codes >> 4], axis=3).astype(np.float32) - np.float32(7.5)
        means *= from_half(a["centre_step"][:, blocks])[..., None]  # (n_kv_heads, blocks, N_CENTRES, width)
        centres = np.repeat(means[:, :, :1] + means[:, :, 1:], RUN, axis=2)
        centres = centres.reshape(self.n_kv_heads, -1, self.width)
        levels, places = np.empty_like(centres), np.asarray(PLACES, like=codes)
        for heads, planes in heads_of_equal_bits(self.bits, a["planes"]):
            n, bits = planes.shape[0], planes.shape[2]
            groups = planes[:, blocks].transpose(0, 1, 3, 5, 2, 4).reshape(n, -1, BLOCK, bits, self.width // 8)
            columns = contiguous(groups[:, :, places])
            signs = 2 * np.unpackbits(columns.ravel(), bitorder="little").astype(np.float32) - 1
            worth = np.asarray(2.0 ** np.arange(bits - 1, -1, -1, dtype=np.float32)[:, None], like=signs)
            levels[heads] = (signs.reshape(n, -1, bits, self.width) * worth).sum(axis=2)
        return levels[:, tokens], centres[:, tokens]


def encode_centres(x: F32, codes: U8, step: U16, t0: int) -> None:
    """Stores the centres of tokens t0.. of x (G, n, D) and subtracts them from x; n and t0 are multiples of 64.

    codes (G, blocks, N_CENTRES, D / 2), step (G, blocks, N_CENTRES): the largest magnitude of a centre / 8. Two
    steps hold an offset of all keys, however large, as well as the differences.
    """
    g, n, d = x.shape
    blocks = slice(t0 // BLOCK, (t0 + n) // BLOCK)
    _encode_means(x.reshape(g, n // BLOCK, 1, BLOCK, d), codes[:, blocks, :1], step[:, blocks, :1])
    _encode_means(x.reshape(g, n // BLOCK, -1, RUN, d), codes[:, blocks, 1:], step[:, blocks, 1:])


def _encode_means(x: F32, codes: U8, step: U16) -> None:
    """Stores the means of x (..., n, D) in codes (..., D / 2) and step (...), and subtracts them from x."""
    n, d = x.shape[-2:]
    mean = x[..., 0, :].copy()
    for i in range(1, n):
        mean += x[..., i, :]
    mean *= np.float32(1 / n)
    step[...] = to_finite_half(np.abs(mean).max(axis=-1) / np.float32(8))
    width = step.view(np.float16).astype(np.float32)[..., None]
    levels = np.clip(np.floor(mean / np.where(width == 0, 1, width)) + 8, 0, 15).astype(np.float32)
    packed = levels.astype(np.uint8)
    codes[...] = packed[..., : d // 2] | packed[..., d // 2 :] << 4
    x -= ((levels - np.float32(7.5)) * width)[..., None, :]


def encode_keys(x: F32, planes: U8, scale: U16, t0: int) -> None:
    """Stores x (G, n, D) as tokens t0.. in planes (G, blocks, B, N_GROUPS, D / 8, GROUP); n, t0 multiples of 64.

    The planes come by successive approximation: the first has the signs of x, the next ones those of what is
    left when sign * step * 2 ** (B - 2 - p) is taken off for plane p; step = GAUSS_STEP[B] * the token's root
    mean square. With level = sum of 2 ** (B - 1 - p) * sign, odd whole numbers, scale (G, capacity) =
    |x| ** 2 / (x . level): level * scale has the inner product |x| ** 2 with x (RaBitQ for B = 1).
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
    scale[:, t0 : t0 + n] = to_finite_half(square / np.where(along == 0, 1, along))


def _in_groups(columns: U8) -> U8:
    """Returns (G, n / 64, N_GROUPS, D / 8, GROUP) of the tokens' bytes (G, n, D / 8)."""
    g, n, width = columns.shape
    blocks = columns.reshape(g, n // BLOCK, BLOCK, width)[:, :, ORDER]
    stored: U8 = blocks.reshape(g, n // BLOCK, N_GROUPS, -1, width).transpose(0, 1, 2, 4, 3)
    return stored


def round_queries(q: F32) -> tuple[F32, F32]:
    """Returns q (..., D) in odd halves of a step, and the step (...): any four neighbours add up to at most 63."""
    four = np.abs(q).reshape(*q.shape[:-1], -1, 4)
    largest = (four[..., 0] + four[..., 1] + four[..., 2] + four[..., 3]).max(axis=-1)
    step = largest / np.float32(MAX_FOUR_SUM)
    whole = np.floor(q / np.where(step == 0, 1, step)[..., None])
    return whole + np.float32(0.5), step


def bits_of_heads(bits: int | Sequence[int], n_kv_heads: int) -> tuple[I64, I64]:
    """Returns the bits of each head and the sum of those of all heads before it, (n_kv_heads,) each."""
    per_head = np.broadcast_to(np.asarray(bits, np.int64), n_kv_heads).copy()
    return per_head, np.cumsum(per_head) - per_head


def heads_of_equal_bits(bits: I64, store: Array) -> Iterator[tuple[slice, Array]]:
    """Yields heads of equal bits, and their part (heads, blocks, bits, ...) of store (all bits, blocks, ...)."""
    first, row = 0, 0
    for b, run in itertools.groupby(bits.tolist()):
        n = len(list(run))
        yield slice(first, first + n), store[row : row + n * b].reshape(n, store.shape[1], b, *store.shape[2:])
        first, row = first + n, row + n * b


class InterleavedValues(Codec):
    """Values: P v in codes of 1 to 4 bits, the best uniform levels for a Gaussian, with a scale that keeps |v|.

    bits and first_plane (n_kv_heads,) as those of `CentredPlanes`; a bit of all elements is two lines here.
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
        self.fixed = self.rotation.fixed

    def layout(self) -> Layout:
        g, capacity = self.n_kv_heads, self.capacity
        return {
            "codes": ((int(self.bits.sum()), capacity // BLOCK, 2, self.head_dim, 4), "uint8"),
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
        scale, first = from_half(self.arrays["scale"][:, t0:t1]), t0 // BLOCK
        blocks = [self._levels(block) for block in range(first, -(-t1 // BLOCK))]
        levels = np.concatenate(blocks, axis=1)[:, t0 - first * BLOCK : t1 - first * BLOCK]
        return self.rotation.backward(levels * scale[..., None], self.kernels)

    def sums(self, p: F32, t0: int, t1: int) -> F32:
        """Returns what `Codec.sums` does, of p (n_kv_heads, M, t1 - t0); p * scale is rounded to bytes."""
        rotated = np.zeros((*p.shape[:2], self.head_dim), np.float32)
        for block in range(t0 // BLOCK, -(-t1 // BLOCK)):
            first, last = max(t0, block * BLOCK), min(t1, (block + 1) * BLOCK)
            weights = np.zeros((*p.shape[:2], BLOCK), np.float32)
            inside = slice(first - block * BLOCK, last - block * BLOCK)
            scale = from_half(self.arrays["scale"][:, None, first:last])
            weights[..., inside] = p[:, :, first - t0 : last - t0] * scale
            top = weights.max(axis=2, keepdims=True)
            whole = np.rint(weights * (MAX_WEIGHT / np.maximum(top, np.float32(MIN_WEIGHT))))
            rotated += top / MAX_WEIGHT * (whole @ self._levels(block))
        return self.rotation.backward(rotated, self.kernels)

    def _codes(self) -> Iterator[tuple[slice, U8]]:
        """Yields neighbouring heads of equal bits, and their codes (heads, blocks, 2 * bits, head_dim, 4)."""
        for heads, planes in heads_of_equal_bits(self.bits, self.arrays["codes"]):
            yield heads, planes.reshape(*planes.shape[:2], -1, self.head_dim, 4)

    def _levels(self, block: int) -> F32:
        """Returns the levels (n_kv_heads, BLOCK, head_dim) of a block: codes less their middle."""
        heads = ((_unpack(codes[:, block]), MIDDLE_CODE[codes.shape[2] // 2]) for _, codes in self._codes())
        return np.concatenate([codes.astype(np.float32) - middle for codes, middle in heads])


FIELDS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,)}
"""By bits of a code: the bits of its fields, divisors of 8."""


def encode_interleaved(x: F32, codes: U8, scale: U16, t0: int) -> None:
    """Stores x (G, n, D) as tokens t0.. in codes (G, blocks, 2 * B, D, 4); n, t0 are multiples of 64, D is any.

    Four tokens lie side by side, as dot products of 8-bit integers want them. The codes are those of the best
    uniform step for a Gaussian of the token's mean square; scale (G, capacity) is then |x| ** 2 / (x . levels), so
    that the stored vector has the inner product |x| ** 2 with x: sums of many values are not shrunk.
    """
    g, n, d = x.shape
    bits = codes.shape[2] // 2
    levels, step = gauss_levels(x, bits)
    scale[:, t0 : t0 + n] = to_finite_half(step)
    blocks = levels.reshape(g, n // BLOCK, BLOCK, d)
    line, lower_bits = 0, bits
    for field in FIELDS[bits]:
        lower_bits -= field
        field_codes = blocks >> lower_bits & (1 << field) - 1
        quads = field_codes.reshape(g, n // BLOCK, 8 // field, 2 * field, 4, d).transpose(0, 1, 2, 3, 5, 4)
        packed = np.zeros(quads.shape[:2] + quads.shape[3:], np.uint8)  # (G, blocks, 2 * field, D, 4)
        for i in range(8 // field):
            packed |= quads[:, :, i] << field * i
        codes[:, t0 // BLOCK : (t0 + n) // BLOCK, line : line + 2 * field] = packed
        line += 2 * field


def gauss_levels(x: F32, bits: int) -> tuple[U8, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    """Returns codes (..., D) of x in ``bits`` bits, and the scale (...) that keeps x's length along x."""
    square = np.square(x, dtype=np.float64).sum(axis=-1)
    step = (np.sqrt(square / x.shape[-1]) * GAUSS_STEP[bits]).astype(np.float32)
    half = 2 ** (bits - 1)
    codes = np.clip(np.floor(x / np.where(step == 0, 1, step)[..., None]) + half, 0, 2 * half - 1)
    along = (x.astype(np.float64) * (codes - (half - 0.5))).sum(axis=-1)
    return codes.astype(np.uint8), square / np.where(along == 0, 1, along)


def _unpack(codes: U8) -> U8:
    """Returns the codes (G, BLOCK, D) of a packed block (G, 2 * bits, D, 4)."""
    g, n_lines, d, _ = codes.shape
    unpacked, line = np.zeros_like(codes, shape=(g, BLOCK, d)), 0
    for field in FIELDS[n_lines // 2]:
        lines = codes[:, line : line + 2 * field]
        quads = [lines >> field * i & (1 << field) - 1 for i in range(8 // field)]  # each (G, 2 * field, D, 4)
        tokens = np.stack(quads, axis=1).transpose(0, 1, 2, 4, 3)
        unpacked = unpacked << field | tokens.reshape(g, BLOCK, d)
        line += 2 * field
    return unpacked
