"""--kv-budget: bytes that hold while the conversation grows, the oldest tokens stepping down."""

import json
import pathlib

import golden_cases
import numpy as np
import pytest
from cache_cases import draw, relative
from helpers import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from edgekv import SamplingParams, Session
from edgekv.cli import main
from edgekv.errors import CacheError, SessionError
from edgekv.kernels import numba_kernels, numpy_kernels
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import Geometry, KVCache, Workspace, rewind
from edgekv.kvcache.codec_planes import CentredPlanes, InterleavedValues
from edgekv.kvcache.codecs import WORD
from edgekv.kvcache.tiered import (
    TIERS,
    Shape,
    Split,
    TieredCache,
    TieredKnobs,
    choose_split,
    copy_tokens,
    decode,
    least_bytes,
    usable_tiers,
)
from edgekv.models import architecture

CTX = 3000
HEADS = (8, 2, 64)  # query heads, KV heads, head_dim
GEOMETRY = Geometry(8, 2, 64, CTX)
LEAST = 2 * (least_bytes(Shape(2, 64, 4), 2816) + 4 * 2 * 64 * (4 + 192))  # of one layer and its buffer
BUDGETS = {"tight": LEAST, "roomy": int(1.5 * LEAST), "dense": 3 * CTX * 2 * 64 * 4}


def steps(budget: int, backend: str = "numba", **geometry: int) -> TieredCache:
    layer = Geometry(**{**GEOMETRY.__dict__, **geometry})
    cache = TieredCache(layer, TieredKnobs(budget))
    cache.allocate({"numba": numba_kernels, "numpy": numpy_kernels}[backend](None), Workspace())
    return cache


def plain(name: str) -> KVCache:
    spec = CacheSpec.parse(name)
    cache = spec.scheme(GEOMETRY, spec.knobs)
    cache.allocate(numba_kernels(None), Workspace())
    return cache


def grown(cache: KVCache, n: int, piece: int, seed: int = 0) -> np.ndarray:
    """Attention of all n tokens, ``max_append_tokens`` at a time."""
    q, k, v = draw(HEADS, n, seed)
    out = []
    for a in range(0, n, piece):
        part = slice(a, a + piece)
        out.append(cache.attend(q[:, part], k[:, part], v[:, part]).copy())
    return np.concatenate(out, axis=1)


def tiers_of(cache: TieredCache) -> list[int]:
    """The tier of every packed token, oldest first."""
    names = [tier.name for tier in TIERS]
    return [
        names.index(store.tier.name) for store, a, b in cache.tiers.parts(0, cache.n_packed) for _ in range(a, b)
    ]


def taken(cache: TieredCache) -> int:
    """Bytes of the cache, and of the buffer that it steps with."""
    return cache.nbytes + sum(
        buffer.nbytes for name, buffer in cache.workspace._buffers.items() if "tiers" in name
    )


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_bound_holds_and_only_the_oldest_step_down(budget: str) -> None:
    cache = steps(BUDGETS[budget])
    q, k, v = draw(HEADS, CTX)
    before: list[int] = []
    for a in range(0, CTX, 60):
        part = slice(a, a + 60)
        cache.attend(q[:, part], k[:, part], v[:, part])
        assert taken(cache) <= BUDGETS[budget]
        now = tiers_of(cache)
        assert now == sorted(now, reverse=True)  # older is coarser
        assert all(later >= earlier for earlier, later in zip(before, now, strict=False))
        before = now
    reached = {0, *before, *(TIERS.index(t) for t in TIERS for _, name in cache.tiers.log if t.name == name)}
    assert reached == {"tight": {0, 1, 2, 3, 4, 5}, "roomy": {0, 1, 2, 3}, "dense": {0}}[budget]


def test_while_all_fits_it_is_dense() -> None:
    cache = steps(BUDGETS["dense"])
    got, expected = grown(cache, 2900, 100), grown(plain("dense"), 2900, 100)
    assert relative(got, expected) < 1e-5
    assert cache.notes() == ["kv budget 4.4 MiB: everything in f16 so far; now 2752 tokens in f16, 148 exact"]


def test_tiers_that_save_nothing_are_left_out() -> None:
    """Of a narrow head a 4-bit code in whole words takes more than f16."""
    assert [tier.name for tier in usable_tiers(Shape(2, 8, 2))] == [TIERS[i].name for i in (0, 3, 4, 5)]
    assert usable_tiers(Shape(2, 128, 2)) == TIERS
    cache = steps(320_000, head_dim=8, n_heads=4)
    q, k, v = (x[..., :8].copy() for x in draw(HEADS, 2800))
    assert np.isfinite(cache.attend(q[:4], k, v)).all()
    assert [store.tier.name for store, _, _ in cache.tiers.parts(0, cache.n_packed)] == [TIERS[3].name, "f16"]


@pytest.mark.parametrize("budget", BUDGETS)
def test_it_is_no_worse_than_its_coarsest_tier(budget: str) -> None:
    exact = grown(plain("dense:dtype=f32"), 2900, 100)
    ours = relative(grown(steps(BUDGETS[budget]), 2900, 100), exact)
    assert ours < 1.03 * relative(grown(plain("planes:k_bits=1,v_bits=1"), 2900, 100), exact)


def test_numba_equals_numpy() -> None:
    outputs = [grown(steps(BUDGETS["tight"], backend), 1200, 300) for backend in ("numba", "numpy")]
    assert relative(*outputs) < 2e-3


def test_what_stepped_down_is_nearly_what_the_coarsest_tier_would_hold() -> None:
    """Keys and values went through finer codes, which costs little."""
    cache, direct = steps(BUDGETS["tight"]), plain("planes:k_bits=1,v_bits=1")
    for each in (cache, direct):
        grown(each, 2900, 50)
    n = cache.n_packed
    assert n == direct.n_packed
    exact = [x[:, 4 : 4 + n] for x in draw(HEADS, 2900)[1:]]
    for store, a, b in cache.tiers.parts(0, n):
        ends = (store.keys, direct.key_codec, exact[0]), (store.values, direct.value_codec, exact[1])
        for ours, theirs, x in ends:
            error, least = (relative(y, x[:, a:b]) for y in (decode(ours, 0, b - a), decode(theirs, a, b)))
            assert error < 1.05 * least


@pytest.mark.parametrize("level", range(len(TIERS)))
def test_decoding_undoes_encoding(level: int) -> None:
    for codec, x in zip(TIERS[level].codecs(Shape(2, 64, 4), 512), draw(HEADS, 512)[1:], strict=True):
        codec.bind({name: np.zeros(s, d) for name, (s, d) in codec.layout().items()}, numba_kernels(None))
        codec.encode(x, 0)
        error = relative(decode(codec, 128, 320), x[:, 128:320])
        assert error < (1e-3, 0.12, 0.23, 0.41, 0.8, 0.8)[level]


@given(blocks=st.integers(0, 400), more=st.integers(0, 100), kib=st.integers(1, 4000))
@settings(max_examples=200, deadline=None)
def test_splits_fit_and_are_the_finest(blocks: int, more: int, kib: int) -> None:
    shape, n, most = Shape(2, 64, 4), blocks * WORD, (blocks + more) * WORD
    split = choose_split(shape, n, most, kib << 10)
    if split is None:
        assert least_bytes(shape, n) > kib << 10
        return
    assert n <= split.capacity <= max(most, n)
    fine, coarse = (TIERS[level].block_bytes(shape) for level in (split.level, split.level + 1))
    used = (split.coarse * coarse + split.fine * fine) // WORD
    assert used <= kib << 10
    if split.coarse:  # one block less in the coarse tier would not do
        finer = Split(split.level, split.coarse - WORD, n - split.coarse + WORD)
        assert (finer.coarse * coarse + finer.fine * fine) // WORD > (kib << 10) - 2048


def test_a_long_prompt_is_packed_once() -> None:
    cache = steps(BUDGETS["tight"])
    q, k, v = draw(HEADS, 2900)
    cache.prefill(q, k, v)
    assert taken(cache) <= BUDGETS["tight"]
    assert {n for n, _ in cache.tiers.log} == {cache.n_packed}
    direct = plain("planes:k_bits=1,v_bits=1")
    direct.prefill(q, k, v)
    store, a, b = next(cache.tiers.parts(0, cache.n_packed))
    np.testing.assert_array_equal(decode(store.values, 0, b - a), decode(direct.value_codec, a, b))


def test_heads_of_several_bits_move_whole() -> None:
    """Codes of a store move to one with more room as they are, whatever bits its heads have."""
    rng, bits = np.random.default_rng(0), [3, 1, 4]
    for make in (
        lambda n: CentredPlanes(3, n, 64, bits=bits, key_scale=1.0, seed=0),
        lambda n: InterleavedValues(3, n, 64, bits=bits, seed=0),
    ):
        small, large = make(128), make(320)
        for codec in (small, large):
            codec.bind({name: np.zeros(s, d) for name, (s, d) in codec.layout().items()}, numba_kernels(None))
        small.encode(rng.standard_normal((3, 128, 64)).astype(np.float32), 0)
        copy_tokens(small, large, 0, 128, 192)
        np.testing.assert_array_equal(decode(large, 192, 320), decode(small, 0, 128))


def test_rewinding_and_starting_over() -> None:
    cache = steps(BUDGETS["roomy"])
    first = grown(cache, 2800, 100)
    kept = rewind([cache], 2000)
    assert kept <= 2000
    assert cache.n_packed > 1500
    assert rewind([cache], 0) == 0
    assert cache.tiers.log == []
    np.testing.assert_array_equal(grown(cache, 2800, 100), first)


@pytest.mark.parametrize("window", [100, 1500])
def test_a_sliding_window(window: int) -> None:
    cache = steps(BUDGETS["roomy"], sliding_window=window)
    spec = CacheSpec.parse("dense:dtype=f32")
    dense = spec.scheme(Geometry(8, 2, 64, CTX, sliding_window=window), spec.knobs)
    dense.allocate(numba_kernels(None), Workspace())
    got, expected = grown(cache, 2800, 100), grown(dense, 2800, 100)
    assert np.isfinite(got).all()
    assert relative(got[:, :600], expected[:, :600]) < 2e-3
    assert 0 < cache.bytes_read() <= window * 4 * 2 * 64


def test_the_least_budget_is_named() -> None:
    with pytest.raises(CacheError, match=rf"at least .*\({LEAST} bytes\)"):
        steps(LEAST - 2)
    assert steps(LEAST).planned_bytes() <= LEAST // 2


@pytest.mark.parametrize("capacity", [1, 63, 64, 131, 132, 133, 200])
def test_tiny_contexts(capacity: int) -> None:
    cache = steps(1 << 20, capacity=capacity)
    q, k, v = draw(HEADS, capacity)
    assert np.isfinite(cache.attend(q, k, v)).all()
    with pytest.raises(CacheError, match="raise `ctx`"):
        cache.attend(q[:, :1], k[:, :1], v[:, :1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """With heads wide enough for every tier."""
    folder = tmp_path_factory.mktemp("model")
    config = golden_cases.LLAMA | {"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048}
    shapes = architecture(config).tensors()
    save_file(
        {n: golden_cases._draw("budget", n, shape) for n, shape in shapes.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


BUDGET = 900_000  # dense takes 3,145,728 bytes for the model's 2,048 tokens
PROMPT = [int(t) for t in np.random.default_rng(0).integers(0, golden_cases.VOCAB, 300)]
SAMPLING = SamplingParams(temperature=1.0, seed=5)


def text(session: Session, prompt: list[int], n: int, sampling: object = SAMPLING) -> list[int]:
    return [step.token for step in session.generate(prompt, max_new_tokens=n, sampling=sampling)]


def test_a_conversation_up_to_the_last_token(model: pathlib.Path) -> None:
    session = Session.load(model, kv_budget=BUDGET)
    assert session.plan.cache_bytes <= BUDGET
    buffers = session.caches[0].workspace._buffers
    for _ in session.generate(PROMPT, max_new_tokens=5000, sampling=SAMPLING):
        held = sum(cache.nbytes for cache in session.caches)
        assert held + sum(b.nbytes for name, b in buffers.items() if "tiers" in name) <= BUDGET
    assert "context full" in str(session.report().finish_message)
    (note,) = session.report().notes
    assert "4 bits from" in note
    assert "3 bits from" in note
    assert session.report().settings["kv"].startswith(f"steps:budget={BUDGET}")


def test_saved_in_the_middle(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    straight = Session.load(model, kv_budget=BUDGET)
    whole = text(straight, PROMPT, 900)
    for n in (100, 600):
        saved = straight.fork()
        first = text(saved, PROMPT, n)
        saved.save(tmp_path / "session")
        restored = Session.restore(tmp_path / "session", straight)
        assert restored.report().notes == saved.report().notes
        assert first + text(restored, [], 900 - n, restored.last_sampler) == whole


def test_a_saved_budget_is_kept_and_held_to(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    session = Session.load(model, kv_budget=BUDGET)
    text(session, PROMPT, 4)
    session.save(tmp_path / "session")
    for options in ({}, {"kv": "steps"}, {"kv": "auto"}, {"kv_budget": BUDGET}):
        restored = Session.restore(tmp_path / "session", model, **options)
        assert restored.plan.kv == CacheSpec(TieredCache, TieredKnobs(BUDGET))
    with raises(SessionError, field="kv_budget"):
        Session.restore(tmp_path / "session", model, kv_budget=2 * BUDGET)
    with raises(SessionError, field="kv"):
        Session.restore(tmp_path / "session", model, kv="dense")


def test_names(model: pathlib.Path) -> None:
    spec = CacheSpec(TieredCache, TieredKnobs(12345, residual_length=64))
    assert CacheSpec.parse(str(spec)) == spec
    with raises(CacheError, field="kv_budget"):
        Session.load(model, kv="steps")
    with raises(CacheError, field="kv_budget"):
        Session.load(model, kv_budget=0)
    with raises(CacheError, field="kv_budget"):
        Session.load(model, kv="dense", kv_budget=BUDGET)


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    prose = "The old man walked along the road to the village, and the rain fell on the fields. "
    question = "\n\nWhat is the pass key? The pass key is"
    prompt = prose * 40 + "The pass key is 48213. Remember it. " + prose * 40 + question
    run = ["run", "--greedy", "--prompt", prompt, "--max-new-tokens", "8", "--ctx", "4096"]
    assert main([*run, "--kv-budget", "5M"]) == 0
    said = capsys.readouterr()
    assert said.out.split()[0].startswith("48213")
    assert "kv budget 5.0 MiB: stepped down: 4 bits from" in said.err
    assert main([*run, "--kv-budget", "100K"]) == 2
    assert "tokens need at least" in capsys.readouterr().err
    assert main(["budget", "--kv-budget", "5M", "--ctx", "4096", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cache_bytes"] <= 5 << 20
