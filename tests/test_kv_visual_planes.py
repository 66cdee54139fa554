"""visual=planes: pictures in whole blocks of 64 tokens as `planes` keeps them, the rest as text."""

from __future__ import annotations

import cache_cases
import numpy as np
import pytest
from cache_cases import BACKENDS, F32, F64, draw, relative

from edgekv.codecs.planes import CentredPlanes, InterleavedValues
from edgekv.errors import CacheError
from edgekv.kernels.arrays import zeros
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import KVCache
from edgekv.kvcache.planes import KEY_SCALES

HEADS = (6, 2, 64)
CAPACITY = 500
SPANS = ((10, 138), (150, 280), (300, 340))  # two blocks; two and two tokens; none
PACKED = [slice(10, 138), slice(150, 278)]


def make(kv: str = "visual=planes", backend: str = "numba") -> KVCache:
    return cache_cases.make(kv, HEADS, CAPACITY, backend)


def filled(cache: KVCache, n: int = 400) -> tuple[F32, F32, F32]:
    """n tokens of a prompt with SPANS; returns those and ten more."""
    q, k, v = draw(HEADS, n + 10)
    cache.mark_images(SPANS)
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
            codec.bind({name: zeros(*spec) for name, spec in codec.layout().items()}, kernels)
            codec.encode(np.ascontiguousarray(x[:, part]), 0)
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
        kernels.sums(values, np.ascontiguousarray(p[:, :, stands]), 0, stands.stop - stands.start, out)
    return out.reshape(q.shape).astype(float)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("k_bits", "v_bits"), [(1, 1), (2, 2)])
def test_whole_blocks_of_a_picture_are_packed_and_the_rest_is_text(k_bits: int, v_bits: int, backend: str) -> None:
    cache = make(f"visual=planes:k_bits={k_bits},v_bits={v_bits}", backend)
    q, k, v = filled(cache)
    got = cache.attend(q[:, 400:], k[:, 400:], v[:, 400:])
    expected = by_hand(q[:, 400:], k, v, k_bits, v_bits, 410)
    exact = cache_cases.attention(q[:, 400:], k, v)
    assert relative(got, expected) < 0.01  # weights of values in 8 bits
    assert relative(got, exact) > 0.05


def test_bytes() -> None:
    """Of a packed token and KV head at head_dim 64 with 1 and 1 bits: 22.66, and 256 of a text token."""
    cache = make()
    filled(cache)
    a_block = 64 * (8 + 2) + 5 * (32 + 2) + 64 * (8 + 2)
    assert cache.image_bytes == 2 * 4 * a_block
    assert cache.text_bytes == 2 * (CAPACITY - 256) * 256
    assert cache.nbytes == cache.planned_bytes() == cache.image_bytes + cache.text_bytes
    assert cache.bytes_read() == 2 * 4 * a_block + 2 * (400 - 256) * 256
    assert "visual=planes: a layer's 256 image tokens take 11.3 KiB" in cache.notes()[0]


@pytest.mark.parametrize("n", [290, 278, 200, 100, 5])
def test_rewinding_into_a_picture_keeps_what_is_packed(n: int) -> None:
    cache = make()
    q, k, v = filled(cache)
    assert cache.truncate(n) == n
    new = slice(n, n + 4)
    got = cache.attend(q[:, new], k[:, new], v[:, new])
    kept = [(part.start, min(part.stop, n)) for part in PACKED if part.start < n]
    assert [(span.start, span.stop) for span in cache.spans] == kept
    assert relative(got, by_hand(q[:, new], k, v, 1, 1, n + 4, kept=n)) < 0.01
    assert cache.text_bytes == 2 * (CAPACITY - sum(stop - start for start, stop in kept)) * 256


def test_a_state_goes_on_as_if_it_had_not_stopped() -> None:
    cache, other = make(), make()
    q, k, v = filled(cache)
    state = cache.state()
    arrays = other.restore(state.counters, state.extra)
    for name, array in arrays.items():
        array[...] = state.arrays[name]
    assert other.counters_valid()
    part = slice(400, 410)
    expected = cache.attend(q[:, part], k[:, part], v[:, part])
    np.testing.assert_array_equal(other.attend(q[:, part], k[:, part], v[:, part]), expected)
    with pytest.raises(ValueError, match="span"):
        make().load_extra_state({"spans": [(10, 138, 130, 0)]})  # no whole blocks


def test_it_is_found_by_name_in_lists_too() -> None:
    names = "dense,visual=planes,visual=planes:k_bits=2,v_bits=2,visual_planes:seed=3"
    shown = [spec.short for spec in CacheSpec.parse_list(names)]
    assert shown == ["f16", "visual=planes", "visual=planes:k_bits=2,v_bits=2", "visual=planes:seed=3"]


@pytest.mark.parametrize("option", ["k_bits=0", "v_bits=5", "key_scale=3.0", "text=q8"])
def test_bad_options(option: str) -> None:
    with pytest.raises(CacheError, match=f"visual=planes:{option}': accepted"):
        CacheSpec.parse(f"visual=planes:{option}")
