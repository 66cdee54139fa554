"""Attention in one call: the fast backend against the plain one, for every kind of codec that it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import HAS_PAPERS, SCHEMES
from kernel_cases import CODECS, EITHER_WAY, blank, normal

from edgekv.codecs.codec import Codec, Layout
from edgekv.codecs.f16 import F16
from edgekv.codecs.planes import CentredPlanes, InterleavedValues
from edgekv.kernels import cpu, reference
from edgekv.kernels.interface import Segment
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import Geometry
from edgekv.kvcache.policies import FullCache, SinkWindowCache
from edgekv.types import F32, I64

PLANES = {"key_scale": 0.9, "seed": 0}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A case: n queries of g * r heads against two runs of exact tokens and ``length`` packed tokens between."""

    g: int
    r: int
    d: int
    length: int
    n: int
    sliding_window: int | None = None

    @property
    def store(self) -> tuple[int, int, int]:
        """Returns (n_kv_heads, capacity, head_dim)."""
        return self.g, self.length, self.d


PROBLEMS = (
    Problem(g=2, r=2, d=128, length=512, n=1),
    Problem(g=3, r=1, d=80, length=192, n=1),
    Problem(g=1, r=8, d=64, length=320, n=3),
    Problem(g=1, r=1, d=16, length=64, n=1),
    Problem(g=2, r=3, d=128, length=256, n=2, sliding_window=150),
    Problem(g=1, r=2, d=256, length=128, n=1),
)


def several_bits(p: Problem) -> tuple[Codec, Codec]:
    spread = np.exp2(np.random.default_rng(2).uniform(-2, 2, (p.g, p.d))).astype(np.float32)
    keys = CentredPlanes(p.g, p.length, p.d, bits=[1 + g % 4 for g in range(p.g)], channel_scales=spread, **PLANES)
    return keys, InterleavedValues(p.g, p.length, p.d, bits=[4 - g % 4 for g in range(p.g)], seed=0)


def of_scheme(text: str) -> Callable[[Problem], tuple[Codec, Codec]]:
    """Returns the codecs of a scheme that keeps every token, or packs those between the first and the latest."""

    def make(p: Problem) -> tuple[Codec, Codec]:
        spec = CacheSpec.parse(text)
        geometry = Geometry(n_heads=p.g * p.r, n_kv_heads=p.g, head_dim=p.d, capacity=p.length)
        cache = spec.scheme(geometry, spec.config)
        if isinstance(cache, SinkWindowCache):
            room = p.length + cache.sizes.sink + cache.sizes.residual_length
            cache = spec.scheme(dataclasses.replace(geometry, capacity=room), spec.config)
        return cache.key_codec, cache.value_codec

    return make


class Rounded(Codec):
    """A codec from outside of edgekv: it has no loops, and is read through `decode`."""

    kind = "rounded"
    token_bytes = 1

    def layout(self) -> Layout:
        return {"eighths": ((self.n_kv_heads, self.capacity, self.head_dim), "int8")}

    def encode(self, x: F32, t0: int) -> None:
        self.arrays["eighths"][:, t0 : t0 + x.shape[1]] = np.rint(8 * x)

    def decode(self, t0: int, t1: int) -> F32:
        return self.arrays["eighths"][:, t0:t1] / np.float32(8)


OF_CACHES = [name for name, scheme in SCHEMES.items() if issubclass(scheme, (FullCache, SinkWindowCache))]
VARIANTS = (
    *("dense:dtype=f32", "dense:dtype=q8"),
    *(f"planes:k_bits={k},v_bits={v}" for k, v in ((1, 1), (1, 2), (2, 3), (3, 2), (4, 4))),
)
OWN: dict[str, Callable[[Problem], tuple[Codec, Codec]]] = {
    "planes of several bits": several_bits,
    "from outside": lambda p: (Rounded(*p.store), Rounded(*p.store)),
}
if HAS_PAPERS:
    from edgekv.papers.evicting.mikv import TokenKeys
    from edgekv.papers.h1b.codec import SignSketch
    from edgekv.papers.int4 import Int4, Symmetric4
    from edgekv.papers.kivi import KiviValues
    from edgekv.papers.visual.codec import LevelSpan

    def signs_and_int4(p: Problem) -> tuple[Codec, Codec]:
        keys = SignSketch(p.g, p.length, p.d, bits=128, seed=0)
        keys.tau = np.linspace(0.03, 0.1, p.g * p.r, dtype=np.float32).reshape(p.g, p.r)
        return keys, Int4(p.g, p.length, p.d)

    OWN |= {
        "symmetric": lambda p: (Symmetric4(*p.store), Symmetric4(*p.store)),
        "signs and int4": signs_and_int4,
        "mikv": lambda p: (TokenKeys(*p.store, 2, p.d), KiviValues(*p.store, 2, p.d)),
        "visual1": lambda p: (LevelSpan(*p.store, 2, "head"), LevelSpan(*p.store, 1, "head+token")),
        "visual1:group=channel": lambda p: (LevelSpan(*p.store, 1, "channel"), LevelSpan(*p.store, 2, "channel")),
    }
    VARIANTS += ("kivi2:bits=4,group=64,vgroup=16",)
PAIRS = {text: of_scheme(text) for text in (*OF_CACHES, *VARIANTS)} | OWN

# The largest error over PROBLEMS, measured, times 1.5: what the fast backend rounds (weights of values in 8 bits,
# of `int4` in 16, queries of centres in two bytes). By how a pair's name begins.
BOUNDS = {"planes": 3e-3, "onebit": 3e-3, "h1b": 2.4e-4, "sign": 2.4e-4}
ROUNDED_IN_FLOAT32 = 1e-5


def bound_of(pair: str) -> float:
    return next((bound for name, bound in BOUNDS.items() if pair.startswith(name)), ROUNDED_IN_FLOAT32)


def test_every_kind_is_tried() -> None:
    tried = {codec.kind for make in PAIRS.values() for codec in make(PROBLEMS[0])}
    assert tried == CODECS.keys() - {"sign_index", "page_index"} | {"rounded"}  # which no segment has


def filled(codec: Codec, x: F32) -> Any:
    blank(codec)
    if hasattr(codec, "set_range"):
        ends = np.linspace(1, 2, codec.arrays["low"].size, dtype=np.float32).reshape(codec.arrays["low"].shape)
        codec.set_range(-ends, ends)
    if codec.kind == "token_keys":
        codec.balance = np.linspace(0.5, 2, codec.n_kv_heads * codec.head_dim, dtype=np.float32).reshape(
            codec.n_kv_heads, codec.head_dim
        )
    codec.encode(x, 0)
    return codec


def exact(p: Problem, n_tokens: int, rng: np.random.Generator) -> tuple[Any, Any]:
    return tuple(filled(F16(p.g, n_tokens, p.d), normal(rng, p.g, n_tokens, p.d)) for _ in range(2))


def packed(p: Problem, pair: tuple[Codec, Codec], rng: np.random.Generator) -> tuple[Any, Any]:
    keys = 2 * normal(rng, p.g, p.length, p.d) + normal(rng, p.g, 1, p.d)
    return filled(pair[0], keys), filled(pair[1], normal(rng, p.g, p.length, p.d))


def visible(p: Problem, end: int) -> tuple[I64, I64]:
    hi = np.arange(end - p.n + 1, end + 1, dtype=np.int64)
    return np.maximum(hi - (p.sliding_window or end), 0), hi


def attended(
    backend: Any, p: Problem, segments: list[Segment], weights: bool = True, **options: Any
) -> tuple[F32, F32 | None]:
    last = segments[-1]
    q = normal(np.random.default_rng(1), p.g * p.r, p.n, p.d) / np.float32(np.sqrt(p.d))
    out = np.full(q.shape, np.nan, np.float32)
    n_tokens = sum(segment.stop - segment.first for segment in segments)
    kept = np.full((p.g, p.r * p.n, n_tokens), np.nan, np.float32) if weights else None
    end = last.position + last.stop - last.first
    backend.attend(q, segments, visible(p, end), out, kept, **options)
    return out, kept


def assert_same(p: Problem, segments: list[Segment], bound: float, **options: Any) -> None:
    expected, expected_weights = attended(reference, p, segments, **options)
    out, weights = attended(cpu, p, segments, **options)
    np.testing.assert_allclose(out, expected, rtol=0, atol=bound)
    np.testing.assert_allclose(weights, expected_weights, rtol=0, atol=5e-5)
    np.testing.assert_array_equal(attended(cpu, p, segments, False, **options)[0], out)


@pytest.mark.parametrize(
    ("name", "p", "way"),
    [
        pytest.param(name, PROBLEMS[(i + 2 * k) % len(PROBLEMS)], EITHER_WAY[(i // 2 + k) % 2], id=f"{name}-{k}")
        for i, name in enumerate(PAIRS)
        for k in range(3)
    ],
    indirect=["way"],
)
def test_exact_and_packed_segments(name: str, p: Problem, way: str) -> None:
    rng, bound = np.random.default_rng(0), bound_of(name)
    keys, values = packed(p, PAIRS[name](p), rng)
    first, latest = exact(p, 9, rng), exact(p, 130, rng)
    stored = Segment(keys, values, 0, p.length, 4)
    segments = [Segment(*first, 1, 5, 0), stored, Segment(*latest, 3, 130, 4 + p.length)]
    assert_same(p, segments, bound)
    part = [Segment(keys, values, 5, p.length - 3, 0)]
    assert_same(p, part, bound)
    assert_same(p, segments, bound, cap=1.5)


@pytest.mark.usefixtures("way")
def test_positions() -> None:
    for p in PROBLEMS:
        rng = np.random.default_rng(2)
        keys, values = exact(p, p.length, rng)
        where = np.stack([rng.permutation(p.length + p.n) for _ in range(p.g)])[:, : p.length].astype(np.int32)
        assert_same(p, [Segment(keys, values, 0, p.length, p.n, positions=where)], 4e-6)


@pytest.mark.parametrize(("p", "way"), [*zip(PROBLEMS, 3 * EITHER_WAY, strict=True)], ids=str, indirect=["way"])
def test_sinks(p: Problem, way: str) -> None:
    """Beside several packed stores: a sink takes its share of every head's weights; one of -inf takes none."""
    rng = np.random.default_rng(3)
    one, other = (packed(p, of_scheme(text)(p), rng) for text in ("planes", "onebit"))
    stored = Segment(*one, 0, p.length, 4), Segment(*other, 0, p.length, 4 + p.length)
    segments = [Segment(*exact(p, 9, rng), 1, 5, 0), *stored]
    sinks = np.linspace(-2, 9, p.g * p.r, dtype=np.float32)
    assert_same(p, segments, bound_of("planes"), sinks=sinks)
    none = attended(cpu, p, segments, sinks=np.full_like(sinks, -np.inf))
    plain = attended(cpu, p, segments)
    for one, other in zip(none, plain, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("backend", [reference, cpu])
def test_a_sink_is_a_token_without_a_value(backend: Any) -> None:
    p = PROBLEMS[4]
    pair = exact(p, p.length, np.random.default_rng(0))
    segments, sinks = [Segment(*pair, 0, p.length)], np.linspace(-1, 7, p.g * p.r, dtype=np.float32)
    plain, plain_weights = attended(backend, p, segments)
    out, weights = attended(backend, p, segments, sinks=sinks)
    q = normal(np.random.default_rng(1), p.g * p.r, p.n, p.d) / np.float32(np.sqrt(p.d))
    lo, hi = visible(p, p.length)
    for head, j in np.ndindex(p.g * p.r, p.n):
        keys = pair[0].decode(0, p.length)[head // p.r][lo[j] : hi[j]]
        exponentials = np.exp((keys @ q[head, j]).astype(np.float64))
        share = exponentials.sum() / (exponentials.sum() + np.exp(np.float64(sinks[head])))
        np.testing.assert_allclose(out[head, j], share * plain[head, j], rtol=1e-4, atol=1e-6)
        row = head % p.r * p.n + j
        of_tokens = weights[head // p.r, row], plain_weights[head // p.r, row]
        np.testing.assert_allclose(of_tokens[0], share * of_tokens[1], rtol=1e-4, atol=1e-7)


def test_nothing_visible_is_nothing() -> None:
    p = PROBLEMS[0]
    pair = exact(p, 10, np.random.default_rng(0))
    q = np.ones((p.g * p.r, 1, p.d), np.float32)
    for backend in (cpu, reference):
        out = np.full(q.shape, np.nan, np.float32)
        none = np.zeros(1, np.int64)
        backend.attend(q, [Segment(*pair, 0, 10)], (none, none), out)
        assert not out.any()
