"""H1B-KV and its 1-bit-key baseline: equations 2 to 5 by hand; tau per head is fitted, adapted, reported."""

import numpy as np
import pytest
from cache_cases import half_above, make, normal

from edgekv.errors import CacheError
from edgekv.papers.h1b import FIT_TAUS, H1B
from edgekv.papers.h1b.codec import pack_signs
from edgekv.types import F32, F64

SHAPES = [(8, 2, 64), (3, 3, 16), (5, 1, 24)]


def four_bits(v: F32) -> F64:
    """Computes equation 4: (round(v / delta) + z - z) * delta in 0..15, delta in float16 and never too small."""
    low, high = np.minimum(v.min(-1, keepdims=True), 0), np.maximum(v.max(-1, keepdims=True), 0)
    delta = half_above((high - low) / np.float32(15))
    zero = np.rint(-low / delta)
    return (np.clip(np.rint(v / delta) + zero, 0, 15) - zero) * delta


def binary_attention(q: F32, k: F32, v: F64, projection: F32, tau: F64) -> F64:
    """Computes equations 2, 3 and 5 for the last q.shape[1] tokens; tau (n_heads,)."""
    group, n, total, b = q.shape[0] // k.shape[0], q.shape[1], k.shape[1], len(projection)
    s_q, s_k = (np.where(x @ projection.T >= 0, 1.0, -1.0) for x in (q, k))
    alpha = s_q @ np.repeat(s_k, group, 0).transpose(0, 2, 1) / b
    scores = alpha / tau[:, None, None]
    scores[:, np.arange(total) > np.arange(total - n, total)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ np.repeat(v, group, 0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "kv", ["h1b:sketch_bits=64", "h1b:sketch_bits=192", "h1b:sketch_bits=512,keys_only=1", "sign_keys"]
)
def test_attention_is_the_papers_with_a_tau_per_head(kv: str, shape: tuple[int, int, int]) -> None:
    n = 133
    q, k, v = normal(shape, n, n)
    tau, cache = np.linspace(0.03, 0.3, shape[0], dtype=np.float32), make(kv, shape, n)
    cache.load_adapter({"tau": tau}, "a test")
    cache.append_prefill(k[:, :-9], v[:, :-9])
    got = cache.attend(q[:, -9:], k[:, -9:], v[:, -9:])
    values = v.astype(np.float16).astype(float) if cache.config.f16_values else four_bits(v)
    expected = binary_attention(q[:, -9:], k, values, cache.sketch.projection, tau.astype(float))
    np.testing.assert_allclose(got, expected, atol=1e-4)  # weights of 4-bit values in 16 bits: 6.9e-5 measured


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_a_learned_projection_and_centre_are_used(backend: str) -> None:
    """For keys that come together, one by one, and for queries, which lose no centre."""
    n, shape, rng = 140, (4, 2, 64), np.random.default_rng(1)
    q, k, v = normal(shape, n, n)
    k += 2
    learned = {
        "projection": rng.standard_normal((256, 64)).astype(np.float32),
        "centre": rng.standard_normal((2, 64)).astype(np.float32) + 2,
    }
    cache = make("h1b", shape, n, backend)
    cache.load_adapter({"tau": np.full((), 0.1, np.float32), **learned}, "a test")
    cache.append_prefill(k[:, :130], v[:, :130])
    for t in range(130, n):
        got = cache.attend(q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1])
    centred = k - learned["centre"][:, None]
    expected = binary_attention(q[:, -1:], centred, four_bits(v), learned["projection"], np.full(4, 0.1))
    np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("b", [64, 192, 512])
def test_bytes_are_the_formula(b: int) -> None:
    n_kv_heads, head_dim, capacity = 2, 128, 1024
    for kv, value_bytes in (
        (f"h1b:sketch_bits={b}", 64 + 3),
        (f"h1b:sketch_bits={b},keys_only=1", 256),
        (f"sign_keys:sketch_bits={b}", 256),
    ):
        cache = make(kv, (8, n_kv_heads, head_dim), capacity)
        assert cache.nbytes == cache.planned_bytes() == n_kv_heads * capacity * (b // 8 + value_bytes)


def fitted(fit: str, name: str = "h1b") -> list[H1B]:
    """Prefills two layers; queries of head h of layer l look for their own key 1 + h + 4 l times as sharply."""
    shape, n = (4, 2, 64), 200
    caches = [make(f"{name}:fit={fit}", shape, n) for _ in range(2)]
    for layer, cache in enumerate(caches):
        _, k, v = normal(shape, n, n)
        sharpness = 1 + np.arange(4, dtype=np.float32) + 4 * layer
        q = np.repeat(k, 2, axis=0) * sharpness[:, None, None] / 16
        cache.prefill(q, k, v)
    H1B.finish_prefill(caches)
    return caches


def test_one_tau_for_all_layers_as_in_the_paper() -> None:
    taus = np.concatenate([cache.tau.ravel() for cache in fitted("global")])
    assert len(set(taus.tolist())) == 1
    assert taus[0] in FIT_TAUS


@pytest.mark.parametrize("name", ["h1b", "sign_keys"])
def test_sharper_attention_gets_a_lower_tau_of_its_own(name: str) -> None:
    (a,), (b,) = (set(cache.tau.ravel().tolist()) for cache in fitted("layer", name))
    assert a > fitted("global")[0].tau[0, 0] > b
    heads = np.concatenate([cache.tau.ravel() for cache in fitted("head", name)])
    assert heads[0] > heads[1] > heads[3] > heads[7]
    assert (np.diff(heads) <= 0).all()


def test_a_fitted_tau_is_the_one_of_least_cross_entropy() -> None:
    """Brute force over the grid, for one head, at every query that the fit samples."""
    shape, n = (2, 1, 32), 64
    q, k, v = normal(shape, n, n)
    cache = make("h1b:fit=head", shape, n)
    cache.prefill(q, k, v)
    H1B.finish_prefill([cache])
    for head in range(2):
        losses = np.zeros(len(FIT_TAUS))
        for t in np.linspace(n // 2, n - 1, 16).astype(int):
            query, keys = q[head : head + 1, t : t + 1], k[:, : t + 1]
            exact = np.exp((query[0, 0] @ keys[0].T).astype(float))
            for i, tau in enumerate(FIT_TAUS):
                one_hot, taus = np.eye(t + 1)[None], np.full(1, tau, float)
                weights = binary_attention(query, keys, one_hot, cache.sketch.projection, taus)[0, 0]
                losses[i] -= (exact / exact.sum() * np.log(weights)).sum()
        assert cache.tau[0, head] == FIT_TAUS[losses.argmin()]


def test_short_prompts_and_given_taus_are_not_fitted() -> None:
    q, k, v = normal((4, 2, 64), 40, 40)
    short, given = make("h1b", (4, 2, 64), 50), make("h1b:tau=0.125", (4, 2, 64), 50)
    short.prefill(q[:, :20], k[:, :20], v[:, :20])
    given.prefill(q, k, v)
    H1B.finish_prefill([short])
    H1B.finish_prefill([given])
    assert (short.tau == np.float32(0.05)).all()
    assert (given.tau == 0.125).all()
    assert short.notes()[0] == "h1b: tau 0.05 (default, no prompt was long enough to fit it), b = 256"
    assert "tau 0.125 (set by tau=)" in given.notes()[0]
    given.load_adapter({"tau": np.full(4, 0.5, np.float32)}, "adapter x")
    assert (given.tau == 0.125).all()


def test_what_can_not_be_adapted_says_so() -> None:
    tau = {"tau": np.ones((), np.float32)}
    with pytest.raises(CacheError, match=r"^the scheme dense takes no adapter x: nothing in it is trained"):
        make("dense", (4, 2, 64), 50).load_adapter(tau, "adapter x")
    for parameters in ({**tau, "bias": np.ones(2, np.float32)}, {}):
        with pytest.raises(CacheError, match=r"^adapter x: h1b takes tau and nothing else"):
            make("h1b", (4, 2, 64), 50).load_adapter(parameters, "adapter x")
    parameters = {**tau, "projection": np.ones((128, 64), np.float32)}
    with pytest.raises(CacheError, match=r"^adapter x: projection has shape \(128, 64\) in a layer"):
        make("h1b", (4, 2, 64), 50).load_adapter(parameters, "adapter x")


def test_a_key_is_one_bit_per_sign() -> None:
    x = np.random.default_rng(0).standard_normal((2, 70, 128), np.float32)
    x[0, 0, :3] = 0.0, -0.0, np.nan
    codes = np.zeros((2, 3, 2, 64), np.uint64)
    pack_signs(x, codes, 60)
    expected = np.zeros_like(codes)
    for g, i, w in np.ndindex(2, 70, 2):
        word = sum(1 << j for j in range(64) if x[g, i, 64 * w + j] >= 0)
        expected[g, (60 + i) // 64, w, (60 + i) % 64] = word
    np.testing.assert_array_equal(codes, expected)
    assert int(codes[0, 0, 0, 60]) & 7 == 0b011  # -0 counts as positive, NaN does not
