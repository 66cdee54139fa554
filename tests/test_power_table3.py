"""The Table III runner: every row, honest gaps, fewer layers, and a machine that is too small."""

import json
import pathlib

import golden_cases
import measure
import numpy as np
import paper
import power_trees as trees
import pytest
import table3

from edgekv.power import METERS
from edgekv.session.model import Model
from edgekv.session.plan import SessionPlan


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return golden_cases.write_checkpoint("llama31", tmp_path_factory.mktemp("model"))


def arguments(model: pathlib.Path, *more: str) -> list[str]:
    return ["--model", str(model), "--ctx", "60", "--tokens", "4", "--runs", "2", "--power-idle", "0", *more]


def test_every_row_and_the_paper(
    model: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(METERS, "rpi-pmic", trees.Steady)
    assert table3.main(arguments(model, "--json", str(tmp_path / "t.json"))) == 0
    out = capsys.readouterr().out
    for name in ("dense", "int4", "h1b", "onebit", "bitplane", "FP16", "MiniCache", "H1B-KV"):
        assert f"\n{name} " in out
    assert "151 mJ" in out
    assert "power: rpi-pmic" in out
    facts = json.loads((tmp_path / "t.json").read_text())
    assert [row["kv"].partition(":")[0] for row in facts["rows"]] == table3.SCHEMES.split(",")
    dense = facts["rows"][0]
    assert (
        dense["bytes_read"] == 3 * 2 * 60 * 16 * 2 * 2
    )  # layers, KV heads, tokens, head_dim, keys and values, f16
    assert dense["latency_ms"]["median"] > dense["attention_ms"]["median"] > 0
    assert dense["load_ms"]["median"] > 0
    assert facts["paper"]["h1b"]["pi_ms"] == 40


def test_without_a_sensor_the_energies_are_n_a(
    model: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trees.hide_sensors(monkeypatch)
    assert table3.main(arguments(model, "--kv", "dense")) == 0
    out = capsys.readouterr().out
    assert out.count("n/a") == 3  # two columns and the reason
    assert "energy: n/a: no power sensor" in out


def test_an_estimate_is_labelled(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert table3.main([*arguments(model, "--kv", "dense"), "--power-estimate", "5"]) == 0
    assert "power: estimate; a stated 5 W, not measured" in capsys.readouterr().out


def test_fewer_layers_are_the_first_layers(model: pathlib.Path) -> None:
    whole = Model.open(model)
    part = measure.first_layers(whole, 1)
    assert (whole.config.n_layers, part.config.n_layers) == (3, 1)
    assert part.identity != whole.identity
    for name in part.weights.arch.linears():
        assert np.array_equal(part.weights.matrix(name), whole.weights.matrix(name))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--layers", "4"], "this model has 3"),
        (["--runs", "20"], "do not fit"),
        (["--kv", "h2b"], "accepted: dense"),
        (["--power", "sundial"], "accepted: auto"),
    ],
)
def test_bad_input(more: list[str], message: str, model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert table3.main(arguments(model, *more)) == 2
    error = capsys.readouterr().err
    assert error.startswith("table3.py: error: ")
    assert error.count("\n") == 1
    assert message in error


def test_a_machine_that_is_too_small_is_offered_fewer_layers(
    model: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Model.open(model)
    needed = sum(SessionPlan.make(opened, kv="dense", ctx=60, weights="auto").parts().values())
    monkeypatch.setattr(measure, "available_memory_bytes", lambda: needed * 3 // 4)
    assert table3.main(arguments(model)) == 2
    assert "this machine has room for --layers 2" in capsys.readouterr().err
    monkeypatch.setattr(measure, "available_memory_bytes", lambda: needed // 10)
    assert table3.main(arguments(model)) == 2
    assert "a smaller --ctx" in capsys.readouterr().err


def test_a_cache_that_does_not_fit_twice_has_no_load_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "available_memory_bytes", lambda: 1000)
    assert measure.streaming_read(2000, 1) is None


def test_the_verdict_computes_its_figures() -> None:
    text = paper.verdict()
    assert text.count(". ") == 0  # one sentence
    for figure in ("17.5 GB", "112 ms", "156 GB/s", "17.1 GB/s", "1024 ms", "151 mJ", "1.35 W", "3.3 W"):
        assert figure in text


def test_the_streaming_read_reads_every_word() -> None:
    words, sums = np.arange(1_000_000, dtype=np.uint64), np.zeros(3, np.uint64)
    measure.read_words(words[: 999_996 // 12 * 12], sums)
    n = 999_996 // 12 * 12
    assert int(sums.sum()) == n * (n - 1) // 2
    load = measure.streaming_read(8_000_000, 2)
    assert load is not None
    assert load.median > 0
