"""visual1 and visual_planes: marked spans in few bits, each as its paper or codec says, text in f16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cache_cases
import numpy as np
import pytest
from cache_cases import BACKENDS, attend_last, read, relative
from kernel_cases import blank, pairs

from edgekv.codecs.planes import CentredPlanes, InterleavedValues
from edgekv.errors import CacheError
from edgekv.kvcache.cache import KVCache
from edgekv.kvcache.planes import KEY_SCALES
from edgekv.papers.visual.codec import AXES, encode_levels
from edgekv.types import F32, F64

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 20
SPANS = ((0, 9), (30, 95), (95, 101), (150, 290))  # at the start, apart, in a row, and one that ends late
POISON = 0xAB


def make(kv: str, backend: str = "numba", capacity: int = 320, window: int | None = None) -> KVCache:
    return cache_cases.make(kv, (HEADS, KV_HEADS, HEAD_DIM), capacity, backend, sliding_window=window)


def draw(n: int, seed: int = 0) -> tuple[F32, F32, F32]:
    q, k, v = cache_cases.draw((HEADS, KV_HEADS, HEAD_DIM), n, seed, offset=1)
    k[0] *= 2  # heads that differ, as in the paper's figure 4
    return q / 2, k, v


def quantized(
    k: F64, v: F64, group: str, quantile: float, bits: int, ranges: tuple[float, float] = (1, 1)
) -> tuple[F64, F64]:
    """Quantizes one span by equations 7-9, rounded to the nearest level instead of down."""
    sides = []
    for x, share in ((k, ranges[0]), (v, ranges[1])):
        axis = {"layer": None, "tensor": None, "head": (1, 2), "head+token": 2, "channel": 1}[group]
        of = np.stack([k, v]) if group == "layer" else x
        low, high = (np.quantile(of, a, axis=axis) for a in (quantile, 1 - quantile))
        low, high = ((low + high + side * (high - low)) / 2 for side in (-share, share))
        scale = (high - low) / (2**bits - 1)
        low, scale = (np.asarray(end, np.float16).astype(float) for end in (low, scale))
        shape = (len(k), 1, -1) if group == "channel" else (*np.shape(low), *(1,) * (3 - np.ndim(low)))
        low, scale = low.reshape(shape), scale.reshape(shape)
        sides.append(low + scale * np.clip(np.rint((x - low) / scale), 0, 2**bits - 1))
    return sides[0], sides[1]


def attention(
    q: F32, k: F32, v: F32, spans: Sequence[tuple[int, int]], window: int | None = None, **options: object
) -> F64:
    """Computes attention of the last tokens q over all of k, v, whose spans are quantized, in float64."""
    k, v = (x.astype(np.float16).astype(float) for x in (k, v))
    for span in spans:
        part = slice(*span)
        k[:, part], v[:, part] = quantized(k[:, part], v[:, part], **options)
    return cache_cases.attention(q, k, v, window)


BY_HEAD = {"group": "head", "bits": 1, "quantile": 0.2}
CALIBRATED = {"group": "channel", "bits": 1, "quantile": 0.0, "ranges": (0.5, 0.3)}


@pytest.mark.parametrize(
    ("group", "of_bits", "backend"),
    pairs(group=tuple(AXES), of_bits=[(1, 0.2), (3, 0.02), (8, 0.0)], backend=BACKENDS),
)
def test_marked_spans_are_quantized_by_group(group: str, of_bits: tuple[int, float], backend: str) -> None:
    bits, quantile = of_bits
    q, k, v = draw(303)
    cache = make(f"visual1:bits={bits},group={group},quantile={quantile}", backend)
    cache.mark_images(SPANS)
    got = attend_last(cache, (q, k, v), 3)
    expected = attention(q[:, 300:], k, v, SPANS, group=group, bits=bits, quantile=quantile)
    np.testing.assert_allclose(got, expected, atol=3e-3)
    assert (np.abs(got - attention(q[:, 300:], k, v, ())).max() > 0.05) == (bits < 8)


@pytest.mark.parametrize(
    ("kv", "backend", "window", "options"),
    [
        *(("group=channel,quantile=0,k_range=0.5,v_range=0.3", backend, None, CALIBRATED) for backend in BACKENDS),
        *(("quantile=0.2", "numba", window, BY_HEAD) for window in (60, 160)),  # which begin anywhere
    ],
)
def test_calibrated_ranges_and_windows(kv: str, backend: str, window: int | None, options: dict[str, Any]) -> None:
    """Ranges are shares of the way from the middle."""
    q, k, v = draw(303)
    cache = make(f"visual1:{kv}", backend, window=window)
    cache.mark_images(SPANS)
    got = attend_last(cache, (q, k, v), 8)
    np.testing.assert_allclose(got, attention(q[:, 295:], k, v, SPANS, window, **options), atol=3e-3)
    whole = attention(q[:, 295:], k, v, SPANS, window, **options | {"ranges": (1, 1)})
    assert window or np.abs(got - whole).max() > 0.05


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_marked_span_it_is_dense_to_the_bit(backend: str) -> None:
    caches = [make(kv, backend) for kv in ("visual1", "dense")]
    np.testing.assert_array_equal(*(attend_last(cache, draw(300), 20) for cache in caches))
    assert {each for c in caches for each in (c.nbytes, c.planned_bytes())} == {320 * KV_HEADS * HEAD_DIM * 4}
    assert make("visual1").notes() == ["visual1: no span is marked visual, all tokens are in f16"]


def test_pieces_of_a_prompt_end_up_the_same() -> None:
    """A span is packed when its last token has come, however its tokens come."""
    q, k, v = draw(303)
    outputs = []
    for sizes in ([300], [7, 40, 60, 100, 93], [1] * 300):
        cache = make("visual1:quantile=0.2")
        cache.mark_images(SPANS)
        done, attended = 0, []
        for n in sizes:
            attended.append(read(cache, (q, k, v), done, done + n))
            done += n
        outputs.append((np.concatenate(attended, 1), cache.attend(q[:, 300:], k[:, 300:], v[:, 300:]).copy()))
    prefilled = make("visual1:quantile=0.2")
    prefilled.mark_images(SPANS)
    for part in (slice(0, 200), slice(200, 300)):
        prefilled.append_prefill(k[:, part], v[:, part])
    outputs.append((outputs[0][0], prefilled.attend(q[:, 300:], k[:, 300:], v[:, 300:]).copy()))
    for during, after in outputs[1:]:
        np.testing.assert_allclose(during, outputs[0][0], atol=1e-5)
        np.testing.assert_allclose(after, outputs[0][1], atol=1e-5)


def test_a_second_prompt_may_mark_too() -> None:
    q, k, v = draw(303)
    cache = make("visual1:quantile=0.2")
    cache.mark_images([(30, 95)])
    cache.prefill(q[:, :120], k[:, :120], v[:, :120])
    cache.mark_images([(30, 170)])  # counted from the new prompt's start
    cache.attend(q[:, 120:300], k[:, 120:300], v[:, 120:300])
    got = cache.attend(q[:, 300:], k[:, 300:], v[:, 300:])
    expected = attention(q[:, 300:], k, v, [(30, 95), (150, 290)], **BY_HEAD)
    np.testing.assert_allclose(got, expected, atol=3e-3)


ENDS = {"layer": 1, "tensor": 1, "head": KV_HEADS, "head+token": 60 * KV_HEADS, "channel": KV_HEADS * HEAD_DIM}


@pytest.mark.parametrize(("group", "ends"), ENDS.items())
def test_bytes(group: str, ends: int) -> None:
    """A span takes its own bytes, the rest of the context text's; an incomplete span has f16 copies."""
    bits, capacity, n_bytes = 3, 320, -(-HEAD_DIM // 8)
    cache = make(f"visual1:bits={bits},group={group}", capacity=capacity)
    q, k, v = draw(200)
    cache.mark_images([(10, 40), (50, 110)])
    visual = 2 * 90 * KV_HEADS * bits * n_bytes + 2 * 4 * (ends + (ends // 2 if group == "head+token" else ends))
    text = (capacity - 90) * KV_HEADS * HEAD_DIM * 4
    assert (cache.image_bytes, cache.text_bytes) == (visual, text)
    assert cache.nbytes == cache.planned_bytes() == visual + text
    cache.attend(q[:, :60], k[:, :60], v[:, :60])
    assert cache.nbytes == cache.planned_bytes() == visual + text + 60 * KV_HEADS * HEAD_DIM * 4
    assert cache.nbytes == sum(array.nbytes for array in cache.arrays.values())
    cache.attend(q[:, 60:], k[:, 60:], v[:, 60:])
    assert cache.nbytes == cache.planned_bytes() == visual + text
    per_image_token = 2 * KV_HEADS * (bits * n_bytes + (4 if group == "head+token" else 0))
    assert cache.bytes_read() == 90 * per_image_token + 110 * KV_HEADS * HEAD_DIM * 4
    assert "90 image tokens" in cache.notes()[0]


@pytest.mark.parametrize(
    ("n", "kept", "text_capacity"),
    [
        (250, 250, 320 - 70 - 50),  # behind all spans
        (150, 150, 320 - 70 - 10),  # within a packed one: the rest of its marks are forgotten
        (100, 100, 320 - 70),
        (0, 0, 320),
    ],
)
def test_rewind(n: int, kept: int, text_capacity: int) -> None:
    q, k, v = draw(320)
    cache = make("visual1:quantile=0.2")
    cache.mark_images([(20, 90), (140, 190)])
    cache.prefill(q[:, :260], k[:, :260], v[:, :260])
    assert cache.truncate(n) == cache.n_seen == kept
    assert cache.text_bytes == text_capacity * KV_HEADS * HEAD_DIM * 4
    got = cache.attend(q[:, n:300], k[:, n:300], v[:, n:300])
    k, v = (x[:, :300].astype(np.float16).astype(np.float32) for x in (k, v))
    for start, stop in ((20, 90), (140, 190)):
        if n > start:
            part, kept_part = slice(start, stop), slice(start, min(n, stop))
            packed = quantized(k[:, part].astype(float), v[:, part].astype(float), "head", 0.2, 1)
            k[:, kept_part], v[:, kept_part] = (x[:, : kept_part.stop - start] for x in packed)
    expected = attention(q[:, n:300], k, v, ())
    np.testing.assert_allclose(got, expected, atol=3e-3)


def test_an_incomplete_span_is_forgotten_whole() -> None:
    q, k, v = draw(120)
    cache = make("visual1")
    cache.mark_images([(20, 90)])
    cache.attend(q[:, :50], k[:, :50], v[:, :50])
    assert cache.truncate(50) == 50  # nothing to forget
    assert cache.truncate(45) == 20
    assert cache.nbytes == make("dense").nbytes


@pytest.mark.parametrize(
    "spans", [[(5, 5)], [(-1, 4)], [(0, 10), (5, 20)], [(30, 40), (0, 10)], [(0, 321)]], ids=str
)
def test_bad_spans(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(CacheError, match=r"visual1: span -?\d+\.\.\d+ does not fit: give"):
        make("visual1").mark_images(spans)


def test_one_bit_is_the_nearer_end_and_more_bits_are_planes() -> None:
    ends = np.full((1, 1, 1), -1, np.float32), np.full((1, 1, 1), 2, np.float32)
    x = np.array([[[-5, -1, -0.1, 0, 0.1, 1, 5, 0, 0.2, -0.2]]], np.float32)  # the midpoint itself goes to even
    planes = np.full((1, 3, 1, 2), POISON, np.uint8)
    encode_levels(x, *ends, planes, 1)
    assert planes[0, 1, 0].tolist() == [0b01110000, 0b01]
    assert (planes[:, [0, 2]] == POISON).all()
    planes = np.full((1, 1, 2, 2), POISON, np.uint8)
    encode_levels(x + 1, *ends, planes, 0)
    levels = [0, 0, 1, 1, 1, 2, 3, 1, 1, 1]  # round((x - -1) / 2)
    for j in range(2):
        bits = np.unpackbits(planes[0, 0, j], bitorder="little")
        assert bits[:10].tolist() == [level >> j & 1 for level in levels]
        assert not bits[10:].any()


def test_marks_whose_tokens_never_came_are_forgotten() -> None:
    cache, (q, k, v) = make("visual1"), draw(60)
    cache.mark_images([(5, 50), (60, 70)])
    cache.mark_images([(0, 40)])
    assert [(span.start, span.stop) for span in cache.spans] == [(0, 40)]
    assert cache.text_bytes == (320 - 40) * KV_HEADS * HEAD_DIM * 4
    assert np.isfinite(cache.attend(q, k, v)).all()


WIDE = (6, 2, 64)
CAPACITY = 500
PICTURES = ((10, 138), (150, 280), (300, 340))  # two blocks; two and two tokens; none
PACKED = [slice(10, 138), slice(150, 278)]


def planes(options: str = "", backend: str = "numba") -> KVCache:
    return cache_cases.make(f"visual_planes:{options}".rstrip(":"), WIDE, CAPACITY, backend)


def filled(cache: KVCache, n: int = 400) -> tuple[F32, F32, F32]:
    """Reads n tokens of a prompt with PICTURES; returns those and ten more."""
    q, k, v = cache_cases.draw(WIDE, n + 10)
    cache.mark_images(PICTURES)
    cache.prefill(q[:, :n], k[:, :n], v[:, :n])
    return q, k, v


def by_hand(q: F32, k: F32, v: F32, k_bits: int, v_bits: int, total: int, kept: int | None = None) -> F64:
    """Attention of the last queries of ``total`` tokens, PACKED through the codecs of `planes`, exact elsewhere.

    kept: of what was packed only these first tokens stand, then exact ones again.
    """
    kernels, (g, _, head_dim) = BACKENDS["numpy"](None), k.shape
    n, rows = q.shape[1], q.shape[0] // g * q.shape[1]
    kept = total if kept is None else kept
    queries = np.ascontiguousarray(q.reshape(g, rows, head_dim))
    k, v = (x.astype(np.float16).astype(np.float32) for x in (k, v))
    scores, stores = queries @ k[:, :total].transpose(0, 2, 1), []
    for part in PACKED:
        shape, scale = (g, part.stop - part.start, head_dim), KEY_SCALES[k_bits]
        keys = CentredPlanes(*shape, bits=k_bits, key_scale=scale, seed=0)
        values = InterleavedValues(*shape, bits=v_bits, seed=0)
        for codec, x in ((keys, k), (values, v)):
            kernels.encode(blank(codec, kernels), np.ascontiguousarray(x[:, part]), 0)
        stands = slice(part.start, min(part.stop, kept))
        if stands.start < stands.stop:
            kernels.scores(keys, queries, 0, stands.stop - stands.start, scores[:, :, stands])
            stores.append((stands, values))
    position = np.tile(np.arange(total - n, total), rows // n)[:, None]
    scores[:, np.arange(total) > position] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    exact = p.copy()
    for stands, _ in stores:
        exact[:, :, stands] = 0
    out = exact @ v[:, :total]
    for stands, values in stores:
        out += values.sums(p[:, :, stands], 0, stands.stop - stands.start)
    return out.reshape(q.shape).astype(float)


@pytest.mark.parametrize(("k_bits", "v_bits", "backend"), [(1, 1, "numba"), (2, 2, "numpy")])
def test_whole_blocks_of_a_picture_are_packed_and_the_rest_is_text(k_bits: int, v_bits: int, backend: str) -> None:
    cache = planes(f"k_bits={k_bits},v_bits={v_bits}", backend)
    q, k, v = filled(cache)
    got = cache.attend(q[:, 400:], k[:, 400:], v[:, 400:])
    expected = by_hand(q[:, 400:], k, v, k_bits, v_bits, 410)
    exact = cache_cases.attention(q[:, 400:], k, v)
    assert relative(got, expected) < 0.01  # weights of values in 8 bits
    assert relative(got, exact) > 0.05


def test_bytes_of_planes() -> None:
    """A packed token and KV head of 64 channels takes 22.66 bytes with 1 and 1 bits, a text token 256."""
    cache = planes()
    filled(cache)
    a_block = 64 * (8 + 2) + 5 * (32 + 2) + 64 * (8 + 2)
    assert cache.image_bytes == 2 * 4 * a_block
    assert cache.text_bytes == 2 * (CAPACITY - 256) * 256
    assert cache.nbytes == cache.planned_bytes() == cache.image_bytes + cache.text_bytes
    assert cache.bytes_read() == 2 * 4 * a_block + 2 * (400 - 256) * 256
    assert "visual_planes: a layer's 256 image tokens take 11.3 KiB" in cache.notes()[0]


@pytest.mark.parametrize("n", [290, 278, 100, 5])
def test_rewinding_into_a_picture_keeps_what_is_packed(n: int) -> None:
    cache = planes()
    q, k, v = filled(cache)
    assert cache.truncate(n) == n
    new = slice(n, n + 4)
    got = cache.attend(q[:, new], k[:, new], v[:, new])
    kept = [(part.start, min(part.stop, n)) for part in PACKED if part.start < n]
    assert [(span.start, span.stop) for span in cache.spans] == kept
    assert relative(got, by_hand(q[:, new], k, v, 1, 1, n + 4, kept=n)) < 0.01
    assert cache.text_bytes == 2 * (CAPACITY - sum(stop - start for start, stop in kept)) * 256
