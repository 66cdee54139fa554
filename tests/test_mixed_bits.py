"""Mixed bits: the measure by hand, what is given out by it, and sessions whose heads have bits of their own."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import numpy.typing as npt
import pytest
from cache_cases import attend_last, attention, draw, make, relative
from helpers import raises, text

from edgekv import Session
from edgekv.codecs.planes import GAUSS_STEP
from edgekv.engine.loading import FIT_FORMAT
from edgekv.errors import CacheError, SessionError
from edgekv.files import Memo
from edgekv.kvcache import CacheSpec, mixed_bits
from edgekv.kvcache.mixed_bits import REMAINING_VARIANCE, HeadNoise, allocate_head_bits, head_bits, head_noise
from edgekv.kvcache.planes import KEY_SCALES, Planes, PlanesConfig
from edgekv.types import F64

KV = "planes:k_bits=1.5,v_bits=1.5,residual_length=16"
PROMPT = "It was a dark night when the old man and his wife were not come up. " * 30


def stretched(heads: tuple[int, int, int], n: int) -> tuple[F64, F64, F64]:
    """Draws with some channels of the keys 4 and 16 times as long, and of the queries as much shorter."""
    q, k, v = (x.astype(float) for x in draw(heads, n))
    factors = 4.0 ** (np.arange(heads[2]) % (heads[2] // 2) // (heads[2] // 6))
    return q / factors, k * factors, v


def by_hand(
    heads: tuple[int, int, int], n: int, sliding_window: int | None, cap: float | None
) -> tuple[F64, list[list[int]]]:
    """Returns (2, n_kv_heads) and the channel scales' digits of `stretched`, in loops over queries and tokens."""
    q, k, v = stretched(heads, n)
    group, d = heads[0] // heads[1], heads[2]
    groups = k[:, 4 : 4 + (n - 4) // 16 * 16].reshape(heads[1], -1, 16, d)
    rest = np.square(groups - groups.mean(axis=2, keepdims=True)).mean(axis=(1, 2))
    noise, energy, looks, spread = np.zeros((2, heads[1])), 0.0, np.zeros((heads[1], d)), []
    for h in range(heads[0]):
        g = h // group
        for t in range(196, n):
            seen = np.arange(0 if sliding_window is None else max(0, t + 1 - sliding_window), t + 1)
            scores = k[g, seen] @ q[h, t]
            slope = 1 / np.cosh(scores / cap) ** 2 if cap else 1
            weights = np.exp(cap * np.tanh(scores / cap) if cap else scores)
            p = weights / weights.sum()
            o = p @ v[g, seen]
            energy += o @ o
            packed = (seen >= 4) & (seen < t - 128)
            square = np.where(packed, p * p, 0)
            looks[g] += square * slope**2 @ np.square(v[g, seen] - o).sum(axis=1) * np.square(q[h, t])
            noise[1, g] += square @ np.square(v[g, seen]).sum(axis=1)
    for g in range(heads[1]):
        chunks = [[i for i in range(d) if i % (d // 2) * 8 // (d // 2) == c] for c in range(8)]
        logs = np.array([np.log2(looks[g, chunk].sum() / rest[g, chunk].sum()) / 4 for chunk in chunks])
        spread.append([int(min(max(round(2 * (log - logs.mean())), -4), 4)) + 4 for log in logs])
        for digit, chunk in zip(spread[g], chunks, strict=True):
            looks[g, chunk] /= 2.0 ** (digit - 4)
            rest[g, chunk] *= 2.0 ** (digit - 4)
        noise[0, g] = looks[g].sum() * rest[g].sum() / d
    return noise / energy, spread


@pytest.mark.parametrize(("sliding_window", "cap"), [(None, None), (200, None), (None, 4.0)])
def test_the_measure_is_what_it_says(sliding_window: int | None, cap: float | None) -> None:
    heads, n = (4, 2, 24), 403
    q, k, v = (x.astype(np.float32) for x in stretched(heads, n))
    noise, spread = by_hand(heads, n, sliding_window, cap)
    got = head_noise(q, k, v, sliding_window, cap)
    np.testing.assert_allclose((got.keys, got.values), noise, rtol=1e-4)
    assert got.scale_digits.tolist() == spread
    assert {0, 8} <= set(spread[0]) | set(spread[1])


@pytest.mark.parametrize("head_dim", [1, 6, 64, 80])
def test_a_spread_leaves_least_noise_in_the_scores(head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    looks, rest = np.exp2(rng.uniform(-4, 4, (2, head_dim)))
    digits = mixed_bits.channel_scale_digits(looks, rest)
    factors = mixed_bits.channel_scales(digits, head_dim)
    half = head_dim // 2
    np.testing.assert_array_equal(factors[:half], factors[head_dim - half :])  # a pair that RoPE turns

    def noise(factors: npt.NDArray[np.floating]) -> float:
        return float((looks / factors**2).sum() * (rest * factors**2).sum())

    assert noise(factors) <= noise(np.ones(head_dim))
    assert mixed_bits.channel_scale_digits(np.zeros(head_dim), rest).tolist() == [4] * 8
    nearly_even = mixed_bits.channel_scale_digits(np.linspace(1, 3, head_dim), np.linspace(2, 1, head_dim))
    assert nearly_even.tolist() == [4] * 8


def test_a_stretched_key_scores_as_it_does_unstretched() -> None:
    """Channels get bits where queries look; with many bits it makes no difference."""
    heads, n = (4, 2, 64), 400
    q, k, v = (x.astype(np.float32) for x in stretched(heads, n))
    q /= 4
    exact = attention(q[:, -1:], k, v)
    digits, errors = "".join(map(str, head_noise(q, k, v, None).scale_digits.ravel())), []
    for options in ("k_bits=1", f"k_bits=1,key_channel_scales={digits}", f"k_bits=4,key_channel_scales={digits}"):
        cache = make(f"planes:{options},v_bits=4", heads, n)
        errors.append(relative(attend_last(cache, (q, k, v), 1), exact))
    assert errors[0] > 1.5 * errors[1] > 2 * errors[2]


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_a_code_leaves_what_the_rule_takes(bits: int) -> None:
    """A Gaussian is coded in the best uniform levels, scaled as the codecs scale them."""
    x, half = np.random.default_rng(bits).standard_normal((400, 1024)), 2 ** (bits - 1)
    levels = np.clip(np.floor(x / GAUSS_STEP[bits]), -half, half - 1) + 0.5
    levels *= (np.square(x).sum(axis=1) / (x * levels).sum(axis=1))[:, None]
    for kind, scale in enumerate((KEY_SCALES[bits], 1)):
        assert REMAINING_VARIANCE[kind, bits] == pytest.approx(np.square(x - scale * levels).mean(), rel=0.02)
    assert (REMAINING_VARIANCE[:, 0] == 1).all()


def test_bits_go_where_the_noise_is() -> None:
    noise = np.array([[1e-4, 1.0], [3e-2, 1e-6]])

    def bits(mean: float) -> list[list[int]]:
        found: list[list[int]] = allocate_head_bits(noise[None], REMAINING_VARIANCE[:1], int(4 * mean))[0].tolist()
        return found

    assert bits(1) == [[1, 1], [1, 1]]
    assert bits(1.25) == [[1, 2], [1, 1]]
    assert bits(2.25) == [[1, 4], [3, 1]]
    assert bits(4) == [[4, 4], [4, 4]]
    assert allocate_head_bits(np.zeros((1, 2, 2)), REMAINING_VARIANCE[1:], 6).sum() == 6


def test_equal_means_are_one_of_keys_and_values() -> None:
    """Each bit goes to a key or a value; means that differ, or bits of different size, are kept apart."""
    noise = HeadNoise(np.array([[1e-6, 1e-6]]), np.array([[1.0, 1.0]]), np.full((1, 2, 8), 4))
    assert head_bits(noise, 1.5, 1.5, [None], together=True) == ("11", "22")
    assert head_bits(noise, 1.5, 1.5, [None], together=False) == ("21", "21")
    for k_bits, v_bits, head_dim, found in (
        (1.5, 1.5, 64, ("11", "22")),
        (1.5, 1.5, 80, ("21", "21")),
        (2, 1.5, 64, ("22", "21")),
        (2, 2, 128, ("11", "33")),
    ):
        asked = PlanesConfig(k_bits=k_bits, v_bits=v_bits, mixed_bits=True)
        config = asked.with_head_bits(noise, [None], head_dim)
        assert (config.key_bits_per_head, config.value_bits_per_head) == found


def test_sliding_layers_share_a_mean_of_their_own() -> None:
    keys = np.array([[1.0, 1.0], [1e-9, 1e-8], [2.0, 1.0], [1e-8, 1e-9]])
    noise = HeadNoise(keys, keys, np.full((4, 2, 8), 4))
    assert head_bits(noise, 1.5, 1.5, [None, 64, None, 64], together=False) == ("21122121", "21122121")
    assert head_bits(noise, 1.5, 1.5, [None, 64, None, 64], together=True) == ("22122121", "11122121")


@pytest.mark.parametrize("mean", [1, 1.25, 1.5, 2, 3.7, 4])
def test_without_a_fit_heads_have_bits_by_their_order(mean: float) -> None:
    for n in (1, 7, 96):
        bits = mixed_bits.even_bits(mean, n)
        assert set(bits) <= {int(mean), int(np.ceil(mean))}
        assert sum(bits) == np.ceil(mean * n - 0.5)
        noise = HeadNoise(np.ones((1, n)), np.ones((1, n)), np.full((1, n, 8), 4))
        for found in head_bits(noise, mean, mean, [None], together=False):
            assert sum(map(int, found)) == sum(bits)


def test_layers_have_digits_of_their_own() -> None:
    keys, values = np.array([[1.0, 1e-3], [1e-3, 1e-3]]), np.array([[1e-3, 1e-3], [1e-3, 1.0]])
    noise = HeadNoise(keys, values, np.arange(32).reshape(2, 2, 8) % 9)
    config = PlanesConfig(k_bits=1.5, v_bits=1.25).with_head_bits(noise, [None, None], 64)
    assert (config.key_bits_per_head, config.value_bits_per_head) == ("3111", "1112")
    assert config.key_channel_scales == "01234567801234567801234567801234"
    spec = CacheSpec.parse(str(CacheSpec(Planes, config)))
    assert spec.config == config
    assert spec.short == "planes:k_bits=1.5,v_bits=1.25"
    layers = [make(str(spec), (4, 2, 64), 300, layer=i, n_layers=2) for i in range(2)]
    assert [layer.key_codec.bits.tolist() for layer in layers] == [[3, 1], [1, 1]]
    assert [layer.value_codec.bits.tolist() for layer in layers] == [[1, 1], [1, 2]]
    np.testing.assert_allclose(layers[0].key_codec.key_scale, [1, 0.9])
    np.testing.assert_allclose(layers[1].key_codec.channel_scales[0, [0, 4, 8, 33]], [2**1.5, 4, 0.25, 2**1.5])
    assert layers[0].notes() == []
    even = HeadNoise(keys, values, np.full((2, 2, 8), 4))
    assert PlanesConfig(k_bits=1.5).with_head_bits(even, [None, None], 64).key_channel_scales == ""
    with raises(CacheError, field="kv"):
        make(str(spec), (4, 2, 64), 300, layer=0, n_layers=3)


def test_a_head_is_what_it_is_alone() -> None:
    """Heads of several bits give what each gives in a scheme of its bits, also after a rewind."""
    heads, n = (8, 4, 64), 420
    q, k, v = draw(heads, n)
    bits = [(1, 4), (3, 2), (2, 1), (4, 3)]
    spreads = ["34445555", "44444444", "80808080", "12345678"]
    found = f"key_bits_per_head=1324,value_bits_per_head=4213,key_channel_scales={''.join(spreads)}"
    cache = make(f"planes:k_bits=2.5,v_bits=2.5,{found}", heads, n)
    cache.prefill(q[:, :300], k[:, :300], v[:, :300])
    cache.attend(q[:, 300:400], k[:, 300:400], v[:, 300:400])
    cache.truncate(360)
    got = cache.attend(q[:, 360:], k[:, 360:], v[:, 360:])
    for g, (k_bits, v_bits) in enumerate(bits):
        alone = make(f"planes:k_bits={k_bits},v_bits={v_bits},key_channel_scales={spreads[g]}", (2, 1, 64), n)
        own = q[2 * g : 2 * g + 2], k[g : g + 1], v[g : g + 1]
        alone.prefill(*(x[:, :300] for x in own))
        alone.attend(*(x[:, 300:400] for x in own))
        alone.truncate(360)
        assert relative(got[2 * g : 2 * g + 2], alone.attend(*(x[:, 360:] for x in own))) < 1e-6


@pytest.fixture(scope="module")
def loaded() -> Session:
    return Session.load("demo", kv=KV, ctx=700)


def test_a_session_has_its_heads_bits(loaded: Session, tmp_path: pathlib.Path) -> None:
    config = loaded.plan.kv.config
    n = loaded.config.n_layers * loaded.config.n_kv_heads
    assert sum(map(int, config.key_bits_per_head + config.value_bits_per_head)) == 2 * 1.5 * n
    for digits in (config.key_bits_per_head, config.value_bits_per_head):
        assert len(digits) == n
        assert len(set(digits)) > 1
    assert loaded.plan.kv.short == KV
    assert sum(cache.nbytes for cache in loaded.caches) == loaded.plan.cache_bytes
    with loaded.fork(kv=KV) as again:
        assert again.plan.kv == loaded.plan.kv
    with loaded.fork() as session:
        text(session, PROMPT)
        assert f"key_bits_per_head={config.key_bits_per_head}" in session.report().settings["kv"]
        session.save(tmp_path / "session")
        straight = text(session, [], 20)
    with Session.restore(tmp_path / "session", loaded, kv=KV) as restored:
        assert restored.plan.kv == loaded.plan.kv
        assert text(restored, [], 20) == straight
    with raises(SessionError, field="kv"):
        Session.restore(tmp_path / "session", loaded, kv="planes:k_bits=1.25,v_bits=1.5")


def test_a_short_context(loaded: Session, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fit reads more tokens than this conversation can have."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Session.load("demo", kv=KV, ctx=100) as session:
        assert session.plan.kv == loaded.plan.kv
    with loaded.fork() as session, loaded.fork(kv="dense") as dense:
        assert text(session, "The old man") == text(dense, "The old man")


def test_the_fit_is_remembered(loaded: Session, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made anew where the file can't be read; the file's numbers are what counts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with loaded.fork(kv=KV) as session:
        assert session.plan.kv == loaded.plan.kv
    (file,) = (tmp_path / "edgekv" / "bits").iterdir()
    whole = file.read_text()
    file.write_text(whole.replace("1", "2"))
    with loaded.fork(kv=KV) as session:
        assert session.plan.kv == loaded.plan.kv
    assert file.read_text() == whole
    content = json.loads(whole)["content"]
    keys = np.full(np.shape(content["keys"]), 1e-9)
    keys[-1, -1] = 1
    Memo(file, FIT_FORMAT).write(content | {"keys": keys.tolist()})
    with loaded.fork(kv="planes:k_bits=1.125,v_bits=1") as session:
        assert session.plan.kv.config.key_bits_per_head[-1] == "3"


def test_no_tokenizer_is_said(tmp_path: pathlib.Path, loaded: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(loaded.model.path / name)
    with Session.load(tmp_path, kv=KV, ctx=300) as session:
        assert session.tokenizer is None
        assert session.plan.kv.config.key_bits_per_head == ""
        assert session.plan.cache_bytes == sum(cache.nbytes for cache in session.caches)
        text(session, [1, 2, 3], 2)
        assert any("by their order" in note for note in session.report().notes)
