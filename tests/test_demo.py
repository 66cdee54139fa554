"""`edgekv demo`: what it shows is measured."""

import json
import pathlib

import pytest

from edgekv import Session
from edgekv.cli import demo, main
from edgekv.cli.demo import WRITTEN, Demo
from edgekv.kvcache import CacheSpec
from edgekv.power import EnergyMeter
from edgekv.power.sampler import Estimate

CTX = ["--ctx", "1100", "--seed", "3"]


def test_what_it_shows_is_what_it_measured(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_meter", lambda: EnergyMeter(Estimate(5.0), idle_s=0))
    assert main(["demo", *CTX, "--kv", "kivi2,onebit", "--json", str(tmp_path / "demo.json")]) == 0
    shown = capsys.readouterr().out
    facts = json.loads((tmp_path / "demo.json").read_text())
    config = Session.load("demo").config
    for trial, name in zip(facts["trials"], ("dense", "kivi2", "onebit"), strict=True):
        assert trial["cache_bytes"] == CacheSpec.parse(name).planned_bytes(config, 1100 + WRITTEN)
        assert trial["tokens_per_s"] > 0
        assert trial["mj_per_token"] >= 5e3 / trial["tokens_per_s"]  # of 5 W, and what is between the steps
        assert len(trial["answers"]) == 5
        assert [
            said.startswith(value) for (said, _), value in zip(trial["answers"], facts["facts"], strict=True)
        ] == [right for _, right in trial["answers"]]
    exact, kivi2, _ = facts["trials"]
    assert exact["agreement"] == 1
    assert 0.5 < kivi2["agreement"] < 1
    assert all(right for _, right in exact["answers"])  # the model's card: 200 of 200
    assert f"{facts['facts'][0]} found" in shown
    assert "times smaller" in shown
    assert "edgekv chat --model" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_a_wrong_answer_is_not_found() -> None:
    """The cache forgets what lies before the latest tokens; kernels are compiled before any clock."""
    session = Session.load("demo")
    text = (pathlib.Path(__file__).parent.parent / "models" / "demo" / "prose.txt").read_text()
    shown, told = Demo(session._runner.decoder, session.require_tokenizer(), text, 1100, 3), []
    spec = CacheSpec.parse("streaming:budget=64")
    trial = shown.run(spec, "streaming", lambda task, *counts: told.append(task), demo.NoMeter())
    assert sum(right for _, right in trial.answers) < 3
    assert trial.mj_per_token is None
    assert told[-1] == "streaming reads"


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--ctx", "100"], ["--ctx", "60000"], ["--kv", "nope"], ["--text", "/no/file"]):
        assert main(["demo", *arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1
