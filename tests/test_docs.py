"""The documents say what the data beside them say."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest
import quality
from helpers import UNBOUND

from edgekv.kvcache.planes import KEY_SCALES, PlanesKnobs

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODELS = "llama-40m", "gpt2-60m"


def test_quality_tables_are_those_of_the_data() -> None:
    assert subprocess.run([sys.executable, ROOT / "tools" / "quality.py", "--check"], check=False).returncode == 0


def test_quality_covers_every_scheme_on_both_models_and_texts() -> None:
    blocks = quality.BLOCK.findall(quality.PAGE.read_text())
    covered = set()
    for _, names, _ in blocks:
        facts = quality.merged([json.loads((quality.DATA / name).read_text()) for name in names.split()])
        settings = facts["settings"]
        assert settings["ctx"] == 8192
        measured = {result["kv"].partition(":")[0] for result in facts["results"]}
        if measured == set(UNBOUND) - {"visual=planes"}:  # on text it is visual1
            covered.add((settings["model"], settings["text"]))
    assert covered == {(model, text) for model in MODELS for text in ("heldout3.txt", "test.txt")}


def test_runs_with_other_settings_are_not_merged() -> None:
    run = {"settings": {"ctx": 1}, "results": []}
    with pytest.raises(SystemExit, match="different settings"):
        quality.merged([run, {"settings": {"ctx": 2}, "results": []}])
    assert quality.merged([run | {"results": [1]}, run | {"results": [2]}])["results"] == [1, 2]


def test_performance_tables_are_those_of_the_data() -> None:
    command = [sys.executable, ROOT / "tools" / "performance.py", "--check"]
    assert subprocess.run(command, check=False).returncode == 0


def test_the_knobs_of_planes_are_those_of_its_page() -> None:
    page = (ROOT / "docs" / "planes.md").read_text(encoding="utf-8")
    table = page.partition("## Knobs\n")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| `")]
    names = {name.strip("`| ") for row in rows for name in row[0].split(", ")}
    assert names == {field.name for field in dataclasses.fields(PlanesKnobs)}
    scales = ", ".join(f"{KEY_SCALES[bits]:g}" for bits in (1, 2, 3))
    told = f"0 takes {scales} and {KEY_SCALES[4]:g} for 1 to 4 bits, {KEY_SCALES[1]:g} with a `threshold` |"
    assert any(row[0] == "| `key_scale`" and row[2].endswith(told) for row in rows)
