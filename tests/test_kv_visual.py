"""visual1: marked spans in few bits between the quantiles of their group, text in f16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cache_cases
import numpy as np
import pytest
from cache_cases import BACKENDS, F32, F64
from kernel_cases import (
    EITHER_WAY,
    Case,
    bound,
    generator,
    inside,
    normal,
    pairs,
    poisoned_scores,
)

from edgekv.errors import CacheError
from edgekv.kernels import cpu, reference
from edgekv.kernels.cpu import launch
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import KVCache
from edgekv.papers.visual.codec import GROUPS, ChannelLevels, LevelSpan, encode_levels

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 20
SPANS = ((0, 9), (30, 95), (95, 101), (150, 290))  # at the start, apart, in a row, and one that ends late
POISON = 0xAB

CASES = [
    (Case(d=8, length=1, g=1, r=1, n=1, t0=0, s0=0), 1),
    (Case(d=12, length=65, g=2, r=5, n=1, t0=3, s0=5), 3),
    (Case(d=16, length=200, g=3, r=1, n=3, t0=64, s0=0), 1),
    (Case(d=64, length=63, g=1, r=8, n=1, t0=1, s0=5), 8),
    (Case(d=80, length=127, g=2, r=2, n=3, t0=0, s0=0), 2),
    (Case(d=100, length=3, g=3, r=4, n=1, t0=31, s0=5), 5),
    (Case(d=128, length=513, g=2, r=1, n=1, t0=3, s0=0), 1),
    (Case(d=256, length=64, g=1, r=7, n=1, t0=64, s0=5), 4),
]


def make(kv: str, backend: str = "numba", capacity: int = 320, window: int | None = None) -> KVCache:
    return cache_cases.make(kv, (HEADS, KV_HEADS, HEAD_DIM), capacity, backend, sliding_window=window)


def draw(n: int, seed: int = 0) -> tuple[F32, F32, F32]:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((h, n, HEAD_DIM), np.float32) for h in (HEADS, KV_HEADS, KV_HEADS))
    k[0] *= 2  # heads that differ, as in the paper's figure 4
    return q / np.float32(np.sqrt(HEAD_DIM)), k + k[:, :1], v


def quantised(
    k: F64, v: F64, group: str, quantile: float, bits: int, ranges: tuple[float, float] = (1, 1)
) -> tuple[F64, F64]:
    """One span by equations 7-9, rounded to the nearest level instead of down."""
    sides = []
    for x, share in ((k, ranges[0]), (v, ranges[1])):
        part = {
            "layer": lambda x=x: (np.stack([k, v]), None),
            "tensor": lambda x=x: (x, None),
            "head": lambda x=x: (x, (1, 2)),
            "head+token": lambda x=x: (x, 2),
            "channel": lambda x=x: (x, 1),
        }[group]()
        low, high = (np.quantile(part[0], a, axis=part[1]) for a in (quantile, 1 - quantile))
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
    """Attention of the last tokens q over all of k, v, whose spans are quantised, in float64."""
    k, v = (x.astype(np.float16).astype(float) for x in (k, v))
    for span in spans:
        part = slice(*span)
        k[:, part], v[:, part] = quantised(k[:, part], v[:, part], **options)
    return cache_cases.attention(q, k, v, window)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("bits", "quantile"), [(1, 0.2), (3, 0.02), (8, 0.0)])
def test_marked_spans_are_quantised_by_group(group: str, bits: int, quantile: float, backend: str) -> None:
    q, k, v = draw(303)
    cache = make(f"visual1:bits={bits},group={group},quantile={quantile}", backend)
    cache.mark_images(SPANS)
    cache.prefill(q[:, :300], k[:, :300], v[:, :300])
    got = cache.attend(q[:, 300:], k[:, 300:], v[:, 300:])
    expected = attention(q[:, 300:], k, v, SPANS, group=group, bits=bits, quantile=quantile)
    np.testing.assert_allclose(got, expected, atol=3e-3)
    exact = attention(q[:, 300:], k, v, (), group=group, bits=bits, quantile=quantile)
    assert (np.abs(got - exact).max() > 0.05) == (bits < 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_calibrated_ranges_are_shares_of_the_way_from_the_middle(backend: str) -> None:
    q, k, v = draw(303)
    cache = make("visual1:group=channel,quantile=0,k_range=0.5,v_range=0.3", backend)
    cache.mark_images(SPANS)
    cache.prefill(q[:, :300], k[:, :300], v[:, :300])
    got = cache.attend(q[:, 300:], k[:, 300:], v[:, 300:])
    options = {"group": "channel", "quantile": 0.0, "bits": 1}
    expected = attention(q[:, 300:], k, v, SPANS, **options, ranges=(0.5, 0.3))
    np.testing.assert_allclose(got, expected, atol=3e-3)
    assert np.abs(got - attention(q[:, 300:], k, v, SPANS, **options)).max() > 0.05


@pytest.mark.parametrize("window", [60, 160])
def test_sliding_windows_begin_anywhere(window: int) -> None:
    q, k, v = draw(303)
    cache = make("visual1:quantile=0.2", window=window)
    cache.mark_images(SPANS)
    cache.prefill(q[:, :295], k[:, :295], v[:, :295])
    got = cache.attend(q[:, 295:], k[:, 295:], v[:, 295:])
    expected = attention(q[:, 295:], k, v, SPANS, window, group="head", bits=1, quantile=0.2)
    np.testing.assert_allclose(got, expected, atol=3e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_marked_span_it_is_dense_to_the_bit(backend: str) -> None:
    q, k, v = draw(300)
    outputs = []
    for kv in ("visual1", "dense"):
        cache = make(kv, backend)
        cache.prefill(q[:, :280], k[:, :280], v[:, :280])
        outputs.append(cache.attend(q[:, 280:], k[:, 280:], v[:, 280:]).copy())
        assert cache.nbytes == cache.planned_bytes() == 320 * KV_HEADS * HEAD_DIM * 4
    np.testing.assert_array_equal(*outputs)
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
            part = slice(done, done + n)
            attended.append(cache.attend(q[:, part], k[:, part], v[:, part]).copy())
            done += n
        outputs.append((np.concatenate(attended, 1), cache.attend(q[:, 300:], k[:, 300:], v[:, 300:]).copy()))
    prefilled = make("visual1:quantile=0.2")
    prefilled.mark_images(SPANS)
    for part in (slice(0, 200), slice(200, 300)):
        prefilled.append_prompt(k[:, part], v[:, part])
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
    expected = attention(q[:, 300:], k, v, [(30, 95), (150, 290)], group="head", bits=1, quantile=0.2)
    np.testing.assert_allclose(got, expected, atol=3e-3)


@pytest.mark.parametrize(
    ("group", "ends"),
    [
        ("layer", 1),
        ("tensor", 1),
        ("head", KV_HEADS),
        ("head+token", KV_HEADS * 60),
        ("channel", KV_HEADS * HEAD_DIM),
    ],
)
@pytest.mark.parametrize("bits", [1, 4])
def test_bytes(bits: int, group: str, ends: int) -> None:
    """What a span needs, and text for the rest of the context; f16 copies only while a span is incomplete."""
    capacity, n_bytes = 320, -(-HEAD_DIM // 8)
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
            packed = quantised(k[:, part].astype(float), v[:, part].astype(float), "head", 0.2, 1)
            k[:, kept_part], v[:, kept_part] = (x[:, : kept_part.stop - start] for x in packed)
    expected = attention(q[:, n:300], k, v, (), group="head", bits=1, quantile=0.2)
    np.testing.assert_allclose(got, expected, atol=3e-3)


def test_an_incomplete_span_is_forgotten_whole() -> None:
    q, k, v = draw(120)
    cache = make("visual1")
    cache.mark_images([(20, 90)])
    cache.attend(q[:, :50], k[:, :50], v[:, :50])
    assert cache.truncate(50) == 50  # nothing to forget
    assert cache.truncate(45) == 20
    assert cache.nbytes == make("dense").nbytes


def test_every_context_can_be_filled_to_the_last_token() -> None:
    q, k, v = draw(64)
    cache = make("visual1", capacity=64)
    cache.mark_images([(0, 64)])
    assert cache.text_bytes == 0
    assert np.isfinite(cache.attend(q, k, v)).all()
    with pytest.raises(CacheError, match="raise `ctx`"):
        cache.attend(q[:, :1], k[:, :1], v[:, :1])


@pytest.mark.parametrize(
    "spans", [[(5, 5)], [(-1, 4)], [(0, 10), (5, 20)], [(30, 40), (0, 10)], [(0, 321)]], ids=str
)
def test_bad_spans(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(CacheError, match=r"visual1': span -?\d+\.\.\d+ does not fit: give"):
        make("visual1").mark_images(spans)


@pytest.mark.parametrize(
    "option",
    [
        *("bits=0", "bits=9", "group=row", "quantile=0.5", "quantile=-0.1", "text=q8"),
        *(
            "k_range=0.0",
            "v_range=1.5",
        ),
    ],
)
def test_bad_options(option: str) -> None:
    with pytest.raises(CacheError, match=f"visual1:{option}': accepted"):
        CacheSpec.parse(f"visual1:{option}")


@pytest.mark.parametrize("name", ["dense", "h1b"])
def test_other_schemes_take_marks_and_ignore_them(name: str) -> None:
    q, k, v = draw(100)
    outputs = []
    for spans in ((), ((10, 60),)):
        cache = make(name)
        cache.mark_images(spans)
        cache.prefill(q, k, v)
        outputs.append(cache.attend(q[:, :1], k[:, :1], v[:, :1]).copy())
    np.testing.assert_array_equal(*outputs)


def test_one_bit_is_the_nearer_end_and_more_bits_are_planes() -> None:
    ends = np.array([[-1.0]], np.float16).view(np.uint16), np.array([[2.0]], np.float16).view(np.uint16)
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


def read(backend: Any, codec: Any, case: Case, q: F32, p: F32, out: F32) -> tuple[F32, F32]:
    """Scores of the case's tokens, beside which the poison stays, and ``out`` with their weighted sums."""
    s, weights = (poisoned_scores(case, contiguous=case.g == 1) for _ in range(2))
    sums = out.copy()
    weights[:, :, inside(case)] = p
    backend.scores(codec, q, case.t0, case.t1, s[:, :, inside(case)])
    backend.sums(codec, weights[:, :, inside(case)], case.t0, case.t1, sums)
    assert np.isnan(s[:, :, : case.s0]).all()
    assert np.isnan(s[:, :, case.s0 + case.length :]).all()
    return s[:, :, inside(case)], sums


@pytest.mark.parametrize(
    ("of_case", "group", "way"),
    pairs(of_case=CASES, group=["tensor", "head", "head+token", "channel"], way=EITHER_WAY),
)
def test_numba_equals_numpy(
    of_case: tuple[Case, int], group: str, way: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", way)
    case, n_bits = of_case
    rng = generator(case)
    each = {"tensor": (1, 1), "head": (case.g, 1), "head+token": (case.g, case.capacity)}
    size = each.get(group, (case.g, case.d))
    low = rng.uniform(-2, -1, size).astype(np.float16).view(np.uint16)
    step = (rng.uniform(1, 3, size) / (2**n_bits - 1)).astype(np.float16).view(np.uint16)
    step.flat[-1] = 0
    x = normal(rng, case.g, case.length, case.d)
    planes = np.full((case.g, case.capacity, n_bits, -(-case.d // 8)), POISON, np.uint8)
    if group == "channel":
        planes[:] = np.random.default_rng(case.d).integers(0, 256, planes.shape, np.uint8)
    else:
        encode_levels(x, low, step, planes, case.t0)
    codes = np.unpackbits(planes, axis=3, count=case.d, bitorder="little").astype(float)
    codes = (codes * 2.0 ** np.arange(n_bits)[:, None]).sum(2)
    ends = (
        np.expand_dims(end.view(np.float16).astype(float), 1 if group == "channel" else 2) for end in (low, step)
    )
    least, of_code = ends
    decoded = (least + of_code * codes)[:, case.t0 : case.t1]
    q, out = normal(rng, case.g, case.m, case.d), normal(rng, case.g, case.m, case.d)
    p = rng.random((case.g, case.m, case.length), np.float32)
    kind, of = (ChannelLevels, ()) if group == "channel" else (LevelSpan, (group,))
    codec = bound(kind(case.g, case.capacity, case.d, n_bits, *of), planes=planes, low=low, step=step)
    for backend in (cpu, reference):
        s, sums = read(backend, codec, case, q, p, out)
        np.testing.assert_allclose(s, q @ decoded.transpose(0, 2, 1), atol=1e-4)
        np.testing.assert_allclose(sums, out + p.astype(float) @ decoded, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize(("text", "n_bytes"), [("f16", 2), ("f32", 4)])
def test_text_is_kept_as_it_is_asked_for(text: str, n_bytes: int) -> None:
    """The text's store is laid out anew when spans are marked: what is in it stays."""
    q, k, v = draw(303)
    dense, cache = make(f"dense:dtype={text}"), make(f"visual1:quantile=0.2,text={text}")
    for each in (dense, cache):
        each.prefill(q[:, :120], k[:, :120], v[:, :120])
    part = slice(120, 130)
    expected = dense.attend(q[:, part], k[:, part], v[:, part]).copy()
    np.testing.assert_array_equal(cache.attend(q[:, part], k[:, part], v[:, part]), expected)
    cache.mark_images([(20, 160)])
    cache.attend(q[:, 130:300], k[:, 130:300], v[:, 130:300])
    got = cache.attend(q[:, 300:], k[:, 300:], v[:, 300:])
    expected = attention(q[:, 300:], k, v, [(150, 290)], group="head", bits=1, quantile=0.2)
    np.testing.assert_allclose(got, expected, atol=3e-3)
    assert cache.text_bytes == (320 - 140) * KV_HEADS * HEAD_DIM * 2 * n_bytes


def test_marks_whose_tokens_never_came_are_forgotten() -> None:
    cache, (q, k, v) = make("visual1"), draw(60)
    cache.mark_images([(5, 50), (60, 70)])
    cache.mark_images([(0, 40)])
    assert [(span.start, span.stop) for span in cache.spans] == [(0, 40)]
    assert cache.text_bytes == (320 - 40) * KV_HEADS * HEAD_DIM * 4
    assert np.isfinite(cache.attend(q, k, v)).all()
