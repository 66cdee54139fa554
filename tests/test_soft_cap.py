"""Scores bounded softly (Gemma 2), by every scheme that says it can: against the formula and plain attention."""

from __future__ import annotations

import json
import pathlib

import golden_cases
import make_tiny
import numpy as np
import numpy.typing as npt
import pytest
from cache_cases import attention, make, normal, relative

from edgekv import Session
from edgekv.cli import main
from edgekv.errors import CacheError
from edgekv.kvcache import CACHES, CacheSpec

HEADS, N, CAP = (4, 2, 32), 300, 20.0
CAPPED = [name for name, scheme in CACHES.items() if scheme.caps_scores(scheme.Knobs())]
SMALL = {  # of which not all tokens fit, or not all are read
    **{name: f"{name}:budget=128" for name in ("streaming", "h2o", "snapkv", "tova", "mikv")},
    "fier": "fier:k=64",
    "quest": "quest:k=64",
    "kivi2": "kivi2:residual_length=32",
    "planes": "planes:residual_length=32",
    "kvcomp": "kvcomp:residual_length=32",
}


def drawn() -> tuple[npt.NDArray[np.float32], ...]:
    """Queries, keys and values whose scores go well beyond CAP."""
    return tuple(2 * x for x in normal(HEADS, N, 5))


def attended(name: str, backend: str, cap: float | None, window: int | None = None) -> npt.NDArray[np.float32]:
    """Attention of the last of N tokens."""
    q, k, v = drawn()
    layer = {"layer": 2, "n_layers": 4, "sliding_window": window, "score_cap": cap}
    cache = make(SMALL.get(name, name), HEADS, N, backend, **layer)
    cache.mark_images([(60, 200)])
    cache.prefill(q[:, :-7], k[:, :-7], v[:, :-7])
    type(cache).finish_prefill([cache])
    return np.array(cache.attend(q[:, -7:], k[:, -7:], v[:, -7:]))


@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_equals_the_formula(backend: str, window: int | None) -> None:
    q, k, v = drawn()
    expected = attention(q[:, -7:], k, v, window, CAP)
    np.testing.assert_allclose(attended("dense:dtype=f32", backend, CAP, window), expected, atol=2e-5)
    assert relative(attended("planes:k_bits=4,v_bits=4", backend, CAP, window), expected) < 0.2


@pytest.mark.parametrize("name", CAPPED)
def test_every_scheme_that_says_so(name: str) -> None:
    """The backends agree, a bound far away changes nothing, and a near one does."""
    assert relative(attended(name, "numba", CAP, 150), attended(name, "numpy", CAP, 150)) < 2e-3
    plain = attended(name, "numpy", None)
    assert relative(attended(name, "numba", 1e4), plain) < 5e-3
    assert relative(attended(name, "numba", CAP), plain) > 0.05


def test_what_tokens_received_is_counted_with_the_bound() -> None:
    """By a prompt at once as by one token after the other."""
    q, k, v = (x[:, :60] for x in drawn())
    once, each = (make("h2o:budget=64", HEADS, 100, score_cap=CAP) for _ in range(2))
    once.prefill(q, k, v)
    for t in range(60):
        each.attend(*(np.ascontiguousarray(x[:, t : t + 1]) for x in (q, k, v)))
    np.testing.assert_allclose(once.arrays["mass"][:, :60], each.arrays["mass"][:, :60], rtol=5e-3)


def test_commands_with_their_own_schemes(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a model can't have is left out with a line; the gate's schemes, fitted ones too, and a budget go."""
    shape, text = tmp_path / "gemma2.json", tmp_path / "text.txt"
    config = golden_cases.CASES["gemma2"] | {"vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2}
    shape.write_text(json.dumps(config | {"max_position_embeddings": 600, "sliding_window": 100}))
    make_tiny.main([str(tmp_path / "model"), "--shape", str(shape)])
    text.write_text("It is said that bounded scores are scores, too. " * 15)
    model = ["--model", str(tmp_path / "model"), "--weights", "int4"]
    line = "edgekv: left out: --kv bitplane can't"
    assert main(["warm", *model]) == 0
    assert capsys.readouterr().err.startswith(line)
    assert main(["bench", *model, "--ctx", "100", "--tokens", "1"]) == 0
    assert capsys.readouterr().err.startswith(line)
    assert main(["eval", *model, "--text", str(text), "--ctx", "300"]) == 0
    assert capsys.readouterr().err.startswith(line)
    gate = ["eval", "--gate", *model, "--text", str(text), "--needles", "0", "--min-top1", "0", "--max-kl", "9"]
    assert main(gate) == 0
    assert main(["eval", *model, "--text", str(text), "--kv", "bitplane"]) == 2
    assert main(["budget", *model, "--kv", "auto", "--kv-budget", "500K"]) == 0
    assert "planes:" in capsys.readouterr().out
    assert main(["run", *model, "--prompt", "a", "--max-new-tokens", "2", "--kv-budget", "2M"]) == 0


def test_second_stages_are_refused(tmp_path: pathlib.Path) -> None:
    folder = golden_cases.write_checkpoint("gemma2", tmp_path / "model")
    for kv in ("bitplane", "planes:k_bits=4,v_bits=4,threshold=0.001"):
        with pytest.raises(CacheError) as error:
            Session.load(folder, kv=kv, weights="f32")
        assert error.value.field == "kv"
        assert list(error.value.accepted or ()) == CAPPED
    assert not CacheSpec.parse(kv).scheme.caps_scores(CacheSpec.parse(kv).knobs)
