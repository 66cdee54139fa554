"""Soft bounds of scores (Gemma 2), and attention sinks, in every KV scheme."""

from __future__ import annotations

import pathlib

import golden_cases
import numpy as np
import numpy.typing as npt
import pytest
from cache_cases import attend_last, attention, draw, make, normal, read_prompt, relative
from cuda_cases import open_caches
from helpers import SCHEMES, Cli
from tiny_models import tiny_model

from edgekv.engine.loading import find_device
from edgekv.engine.model import Model

F32 = npt.NDArray[np.float32]
HEADS, N, CAP = (4, 2, 32), 300, 20.0
SMALL = {  # of which not all tokens fit, or not all are read
    **{name: f"{name}:budget=128" for name in ("streaming", "h2o", "snapkv", "tova", "mikv")},
    "fier": "fier:k=64",
    "quest": "quest:k=64",
    "kivi2": "kivi2:residual_length=32",
    "planes": "planes:residual_length=32",
    "kvcomp": "kvcomp:residual_length=32",
}


def drawn() -> tuple[F32, ...]:
    """Draws queries, keys and values whose scores go well beyond CAP."""
    return tuple(2 * x for x in normal(HEADS, N, 5))


def attended(name: str, backend: str, cap: float | None, window: int | None = None) -> F32:
    """Returns attention of the last of N tokens."""
    layer = {"layer": 2, "n_layers": 4, "sliding_window": window, "score_cap": cap}
    cache = make(SMALL.get(name, name), HEADS, N, backend, **layer)
    cache.mark_images([(60, 200)])
    return attend_last(cache, drawn(), 7)


@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_a_bound_equals_the_formula(backend: str, window: int | None) -> None:
    q, k, v = drawn()
    expected = attention(q[:, -7:], k, v, window, CAP)
    np.testing.assert_allclose(attended("dense:dtype=f32", backend, CAP, window), expected, atol=2e-5)
    assert relative(attended("planes:k_bits=4,v_bits=4", backend, CAP, window), expected) < 0.2


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_bounded(name: str) -> None:
    """The backends agree, a bound far away changes nothing, and a near one does."""
    assert relative(attended(name, "numba", CAP, 150), attended(name, "numpy", CAP, 150)) < 2e-3
    plain = attended(name, "numpy", None)
    assert relative(attended(name, "numba", 1e4), plain) < 5e-3
    assert relative(attended(name, "numba", CAP), plain) > 0.05


def test_what_tokens_received_is_counted_with_the_bound() -> None:
    """A prompt at once counts as its tokens one by one."""
    q, k, v = (x[:, :60] for x in drawn())
    once, each = (make("h2o:budget=64", HEADS, 100, score_cap=CAP) for _ in range(2))
    once.prefill(q, k, v)
    for t in range(60):
        each.attend(*(np.ascontiguousarray(x[:, t : t + 1]) for x in (q, k, v)))
    np.testing.assert_allclose(once.arrays["mass"][:, :60], each.arrays["mass"][:, :60], rtol=5e-3)


def test_commands_with_their_own_schemes(
    tmp_path: pathlib.Path, tmp_path_factory: pytest.TempPathFactory, cli: Cli
) -> None:
    """The schemes that each takes by itself, the gate's with fitted ones, and those of a budget."""
    text = tmp_path / "text.txt"
    text.write_text("It is said that bounded scores are scores, too. " * 15)
    model = ["--model", str(tiny_model("gemma2", tmp_path_factory)), "--weights", "q4"]
    cli("warm", *model)
    cli("warm", "--kv", "nosuch", status=2)
    for command in (["bench", "--depth", "100", "--tokens", "1"], ["eval", "--text", text, "--ctx", "300"]):
        assert "left out" not in cli(*command, *model).err
    gate = ["eval", "--gate", *model, "--text", str(text), "--needles", "0", "--min-top1", "0", "--max-kl", "9"]
    cli(*gate)
    cli("budget", *model, "--kv", "auto", "--kv-budget", "500K")
    cli("run", *model, "--prompt", "a", "--max-new-tokens", "2", "--kv-budget", "2M")


def beside_sinks(kv: str, backend: str, *sinks: float) -> F32:
    """Returns a token's attention behind a prompt of 200, then of three at once; none: without sinks."""
    heads, prompt = (4, 2, 128), 200
    cache = make(kv, heads, 256, backend)
    q, k, v = draw(heads, prompt + 4, offset=0)
    read_prompt(cache, (q, k, v), prompt)
    given = np.array(sinks, np.float32) if sinks else None
    parts = [
        cache.attend(*(np.ascontiguousarray(x[:, a:b]) for x in (q, k, v)), given).copy()
        for a, b in ((prompt, prompt + 1), (prompt + 1, prompt + 4))
    ]
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize(("kv", "backend"), [(kv, ("numpy", "numba")[i % 2]) for i, kv in enumerate(SCHEMES)])
def test_a_sink_takes_its_share(kv: str, backend: str) -> None:
    """A sink of -inf takes nothing, a very large one everything, and one between part of each head's."""
    plain, none = beside_sinks(kv, backend), -np.inf
    np.testing.assert_array_equal(beside_sinks(kv, backend, *[none] * 4), plain)
    assert np.abs(beside_sinks(kv, backend, *[80] * 4)).max() < 1e-6 * np.abs(plain).max()
    first = beside_sinks(kv, backend, none, 6, none, 6)[:, 0]
    np.testing.assert_allclose(first[[0, 2]], plain[[0, 2], 0], rtol=0, atol=1e-6)
    for head in (1, 3):
        share = (first[head] @ plain[head, 0]) / (plain[head, 0] @ plain[head, 0])
        assert 0.05 < share < 0.95, share
        np.testing.assert_allclose(first[head], share * plain[head, 0], rtol=0, atol=0.05 * np.abs(plain).max())


@pytest.mark.parametrize("device", ["numpy", "cpu"])
def test_prompts_that_are_read_together_see_the_sinks(device: str, tmp_path: pathlib.Path) -> None:
    model = Model.open(golden_cases.write_checkpoint("gpt-oss", tmp_path / "model"))
    decoder = find_device(device).decoder(model, model.weight_format("f32"), 48, 1, None)
    prompts = [decoder.embed(golden_cases.tokens("gpt-oss")[a : a + 12], 0) for a in (0, 12)]
    together = decoder.read_together(np.concatenate(prompts), 12)
    alone = [decoder.prefill(x.copy(), open_caches(decoder, "dense:dtype=f32", 48)) for x in prompts]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=0, atol=1e-4)
