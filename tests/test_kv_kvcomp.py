"""KVComp: codes of bounded error and bounded size, whatever the codebook was built from."""

from __future__ import annotations

import functools
import heapq

import cache_cases
import numpy as np
import pytest
from cache_cases import BACKENDS, attend_last, attention, half_above, normal

from edgekv.papers.kvcomp import KVComp
from edgekv.papers.kvcomp.reference import TABLE_BITS, TABLE_SYMBOLS, Codebook, code_lengths, gaussian_counts
from edgekv.types import F64, I64

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 24
draw = functools.partial(cache_cases.draw, (HEADS, KV_HEADS, HEAD_DIM), offset=2)


def make(
    kv: str = "kvcomp:residual_length=64", backend: str = "numba", capacity: int = 600, head_dim: int = HEAD_DIM
) -> KVComp:
    cache = cache_cases.make(kv, (HEADS, KV_HEADS, head_dim), capacity, backend)
    assert isinstance(cache, KVComp)
    return cache


def huffman_bits(counts: I64) -> int:
    """Returns the total length of a Huffman code by merging the two rarest, again and again."""
    heap, total = [int(count) for count in counts], 0
    heapq.heapify(heap)
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        total += merged
        heapq.heappush(heap, merged)
    return total


@pytest.mark.parametrize("levels", [2, 3, 5, 9, 16, 256])
def test_code_lengths_are_optimal(levels: int) -> None:
    for seed in range(5):
        counts = np.random.default_rng(seed).integers(1, 1000, levels)
        assert (code_lengths(counts, longest=20) * counts).sum() == huffman_bits(counts)


def test_code_lengths_are_bounded_and_every_symbol_has_a_word() -> None:
    fibonacci = np.ones(30, np.int64)
    for i in range(2, 30):
        fibonacci[i] = fibonacci[i - 1] + fibonacci[i - 2]
    lengths = code_lengths(fibonacci)
    assert lengths.max() == TABLE_BITS
    assert (np.exp2(-lengths.astype(float))).sum() == 1
    never_seen = Codebook.huffman(np.array([0, 10**6, 0, 10**6]))
    assert (never_seen.lengths > 0).all()
    assert never_seen.lengths.max() <= TABLE_BITS


@pytest.mark.parametrize(
    "book",
    [
        *(Codebook.huffman(gaussian_counts(*of)) for of in ((0.2, 64), (0.02, 128))),
        *map(Codebook.fixed_length, (5, 256)),
    ],
)
def test_table_decodes_what_lies_whole_in_its_index(book: Codebook) -> None:
    words = {
        "".join(str(word >> i & 1) for i in range(length)): symbol
        for symbol, (word, length) in enumerate(zip(book.words.tolist(), book.lengths.tolist(), strict=True))
    }
    for index in range(0, 1 << TABLE_BITS, 7):
        bits, symbols, used = format(index, f"0{TABLE_BITS}b")[::-1], [], 0
        for _ in range(TABLE_SYMBOLS):
            word = next((w for w in words if bits.startswith(w, used)), None)
            if word is None:
                break
            symbols.append(words[word])
            used += len(word)
        entry = int(book.table[index])
        number = entry >> 60
        if symbols:  # a fixed-length code may leave indexes without a meaning
            assert [entry >> 8 * i & 255 for i in range(number)][: len(symbols)] == symbols
        if len(words) & (len(words) - 1) == 0 or book.lengths.min() != book.lengths.max():
            assert (number, entry >> 56 & 15) == (len(symbols), used)
        assert number > 0 < entry >> 56 & 15  # a decoder always gets on


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("krel", "vrel", "block"), [(0.25, 0.2, 64), (0.1, 0.05, 32), (1.0, 0.5, 16)])
def test_attention_is_that_of_the_levels(backend: str, krel: float, vrel: float, block: int) -> None:
    """Against float64: keys rounded per channel of a block, values per token, the latest tokens only to f16."""
    n, window = 333, 64
    q, k, v = draw(n + 1)
    cache = make(f"kvcomp:krel={krel},vrel={vrel},block={block},residual_length={window}", backend)
    got = attend_last(cache, (q, k, v), 1)
    k, v = (x.astype(np.float16).astype(float) for x in (k, v))
    packed = (n - window) // block * block
    blocks = k[:, :packed].reshape(KV_HEADS, -1, block, HEAD_DIM)
    k[:, :packed] = rounded(blocks, krel, axis=2).reshape(KV_HEADS, packed, HEAD_DIM)
    v[:, :packed] = rounded(v[:, :packed], vrel, axis=2)
    np.testing.assert_allclose(got, attention(q[:, n:], k, v), atol=2e-3)


def rounded(x: F64, relative_step: float, axis: int) -> F64:
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    step = half_above((high - low) * relative_step)
    return low + np.rint((x - low) / step) * step


def test_bytes_are_those_of_the_formula() -> None:
    d, g, block, window, n, levels = 128, 2, 64, 128, 1000, (5, 5)
    cache = make("kvcomp", capacity=1100, head_dim=d)
    q, k, v = normal((HEADS, g, d), n, 0)
    capacity = (1100 - window) // block * block
    tables = sum(size * 3 for size in levels) + 2 * 8 * 2**TABLE_BITS
    fixed = capacity * g * (4 * d / block + 4 + 2 * (2 + 4 / block)) + tables + (window + block) * g * 4 * d
    pools = capacity * g * d * (3 + 3) / 8 + 2 * 8  # both need three bits at most, and a word behind them
    assert cache.planned_bytes() == fixed + pools
    assert cache.nbytes <= fixed + 2 * 4096
    cache.prefill(q, k, v)
    packed = (n - window) // block * block
    used = [codec.arrays["bits"][:, :packed].sum() / 8 for codec in (cache.keys, cache.values)]
    assert sum(used) < 0.85 * packed * g * d * (3 + 3) / 8  # entropy coding gains
    slack = 8 * g * packed / block  # a word per block at most
    assert fixed + sum(used) <= cache.nbytes <= fixed + (sum(used) + 2 * slack) * (1 + 1 / 32) + 2 * 4096
    per_token = (sum(used) / packed) + g * (4 * d / block + 4 + 2 * (2 + 4 / block))
    assert cache.keys.token_bytes + cache.values.token_bytes == pytest.approx(per_token, rel=0.02)
    exact_tokens = n - packed
    assert cache.bytes_read() == pytest.approx(packed * per_token + exact_tokens * g * 4 * d, rel=0.02)


def test_a_codebook_of_another_text_costs_no_more_than_fixed_length_codes() -> None:
    """Nearly all levels of the prompt are the same; what follows has every level alike."""
    capacity, d = 600, HEAD_DIM
    cache = make("kvcomp:krel=0.2,vrel=0.2,residual_length=0", capacity=capacity)
    q, k, v = (np.zeros_like(x) for x in draw(128))
    k[:, ::64], k[:, 1::64], v[..., 0], v[..., 1] = 1, -1, 1, -1
    cache.prefill(q, k, v)
    assert sorted(cache.keys.arrays["lengths"]) == [1, 2, 3, 4, 5, 5]
    t, channel = np.mgrid[:448, :d]
    cycle = np.broadcast_to((t + channel) % 6, (KV_HEADS, 448, d)).astype(np.float32)
    cache.append_prefill(cycle, cycle)
    assert cache.nbytes <= cache.planned_bytes()
    starts = cache.keys.arrays["offsets"][0].astype(int)  # of blocks, in words of 64 bits
    assert starts[8] - starts[2] == 6 * KV_HEADS * 64 * d * 3 / 64
    eye = np.eye(d, dtype=np.float32)[None].repeat(KV_HEADS, 0)
    s = np.empty((KV_HEADS, d, 448), np.float32)
    cache.keys.kernels.scores(cache.keys, eye, 128, 576, s)
    np.testing.assert_allclose(s.transpose(0, 2, 1), cycle, atol=2e-2)


def test_the_codebook_is_the_prompts() -> None:
    q, k, v = draw(400)
    cache = make()
    default = cache.keys.arrays["lengths"].copy()
    cache.prefill(q, k**3, v)
    fitted = cache.keys.arrays["lengths"].copy()
    assert not np.array_equal(default, fitted)
    codes = cache.keys.quantize((k**3)[:, :384].astype(np.float16).astype(np.float32), 0)
    np.testing.assert_array_equal(fitted, code_lengths(np.bincount(codes.ravel(), minlength=5)))
    cache.truncate(300)
    np.testing.assert_array_equal(cache.keys.arrays["lengths"], fitted)
    cache.truncate(0)  # another conversation
    np.testing.assert_array_equal(cache.keys.arrays["lengths"], default)
    cache.prefill(q, k, v)
    assert not np.array_equal(cache.keys.arrays["lengths"], fitted)


@pytest.mark.parametrize("n", [1, 63, 64])
def test_prompts_shorter_than_a_block_keep_the_default(n: int) -> None:
    q, k, v = draw(n)
    cache = make()
    default = cache.values.arrays["table"].copy()
    cache.prefill(q, k, v)
    assert np.array_equal(cache.values.arrays["table"], default) == (n < 64)
    assert cache.notes() == ["kvcomp: nothing is packed before 128 tokens"]


def test_the_pool_grows_in_place() -> None:
    cache = make(capacity=20_000)
    _, k, v = draw(64)
    places, sizes = set(), set()
    for _ in range(300):
        cache.append_prefill(k, v)
        pool = cache.arrays["key.pool"]
        places.add(pool.ctypes.data)
        sizes.add(pool.nbytes)
        assert pool is cache.keys.pool
        used = int(cache.keys.arrays["offsets"].max()) * 8 + cache.keys.plain_bits // 8 + 8
        assert pool.nbytes <= used * (1 + 1 / 32) + 4096
    assert len(places) == 1
    assert 10 < len(sizes) < 100


def test_a_rewind_frees_the_pool_for_what_comes() -> None:
    q, k, v = draw(500)
    cache, other = make(), make()
    cache.prefill(q, k, v)
    assert cache.truncate(140) == 128
    cache.append_prefill(k[:, 128:], v[:, 128:])
    other.prefill(q, k, v)
    assert cache.n_packed == other.n_packed
    np.testing.assert_array_equal(cache.keys.arrays["offsets"], other.keys.arrays["offsets"])
    np.testing.assert_array_equal(*(each.attend(q[:, :1], k[:, :1], v[:, :1]) for each in (cache, other)))
