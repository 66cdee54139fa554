"""docs/reproduction.md says what docs/data says; its arithmetic is the caches'; its commands are the product's."""

import json
import pathlib
import re

import pytest
import tables
import tables_data as data
import tables_h1b as h1b
import tables_paper as paper
import tables_runs as runs
from tables_plot import PANELS, points

from edgekv.cli import main as edgekv
from edgekv.kernels import numpy_kernels
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.geometry import Workspace

NOWHERE = runs.Places(pathlib.Path("M"), pathlib.Path("T"), pathlib.Path("A"))


def evaluations() -> list[data.Facts]:
    return [run for model in runs.WINDOWS for run in data.outcomes(f"tables-{model}.json")]


def test_page_has_the_tables_of_the_data() -> None:
    assert tables.main(["--check"]) == 0


def test_page_shows_every_table() -> None:
    assert {name for _, name, _, _ in tables.BLOCK.findall(tables.PAGE.read_text())} == set(tables.TABLES)


def test_stale_page_is_found(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "page.md"
    stale.write_text(tables.PAGE.read_text().replace("805.3", "58.7"))
    monkeypatch.setattr(tables, "PAGE", stale)
    assert tables.main(["--check"]) == 1


@pytest.mark.parametrize("kv", [row.kv for row in paper.TABLE2] + ["onebit", "bitplane", "int4"])
def test_bytes_of_table_2_are_those_that_the_caches_allocate(kv: str) -> None:
    layers = CacheSpec.parse(kv).layers(data.shape(paper.SHAPE2), runs.CTX)
    layers[0].allocate(numpy_kernels(), Workspace())
    assert layers[0].nbytes * len(layers) == data.cache_bytes(paper.SHAPE2, kv)


def test_bytes_of_a_shape_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["bytes", "--kv", "h1b,onebit:v_bits=1"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["830,472,192", data.full_name("h1b")]
    assert second.split() == ["439,912,448", data.full_name("onebit:v_bits=1")]


def test_bytes_of_h1b_are_those_of_its_equations_and_three_for_scale_and_zero() -> None:
    vectors = 32 * 32 * 8192
    assert data.cache_bytes(paper.SHAPE2, "h1b") == vectors * (256 // 8 + 128 * 4 // 8 + 3)
    assert data.cache_bytes(paper.SHAPE1, "h1b") == 12 * 8 * 8192 * (256 // 8 + 64 * 4 // 8 + 3)


def test_measured_bytes_of_the_60m_model_are_those_of_its_shape() -> None:
    for kv in ("dense:dtype=f16", "h1b", "int4", "sign_keys"):
        assert h1b.held(paper.MODEL, kv) == data.cache_bytes(paper.SHAPE1, kv)


def test_printed_quality_per_byte_is_the_definition_times_1000_in_all_but_two_entries() -> None:
    off = [
        row.name
        for row in (*paper.TABLE1, *paper.TABLE5, paper.TABLE2[-1])
        for perplexity, printed in row.figures
        if abs(printed / h1b.per_byte(perplexity, row.mb) - 1) > 0.01
    ]
    assert off == ["MiniCache 4-b", "Loki (1-bit K)"]


def test_ratios_of_adapted_models_are_to_the_unadapted_dense_cache() -> None:
    at = ("gpt2-60m", "heldout3.txt")
    adapted = data.quality(*at, "h1b", adapter="gpt2-h1b-paper")
    dense = data.quality(*at, "dense:dtype=f16")
    own = data.quality(*at, "dense:dtype=f16", adapter="gpt2-h1b-paper")
    assert adapted is not None
    assert dense is not None
    assert own is not None
    share = data.ratio(*at, "h1b", adapter="gpt2-h1b-paper")
    assert share == adapted["perplexity"] / dense["perplexity"]
    assert share != pytest.approx(adapted["perplexity"] / own["perplexity"], rel=0.05)


def test_commands_name_the_schemes_that_they_measured() -> None:
    for run in evaluations():
        (line,) = data.commands([run])
        kvs = re.search(r"--kv (\S+)", line)
        assert kvs
        assert [str(spec) for spec in CacheSpec.parse_list(kvs[1])] == [result["kv"] for result in run["results"]]


def test_every_planned_evaluation_was_made() -> None:
    made = {
        (s["model"], s["text"], s["ctx"], s["windows"], s["adapter"], *(r["kv"] for r in run["results"]))
        for run in evaluations()
        for s in [run["settings"]]
    }
    for run in runs.evals():
        adapter = run.adapter and f"{run.adapter}.safetensors"
        kvs = [data.full_name(kv) for kv in run.kv]
        assert (run.model, run.text, run.ctx, run.windows, adapter, *kvs) in made


def test_runs_have_names_of_their_own() -> None:
    names = [run.name for run in (*runs.evals(), *runs.needles())]
    assert len(names) == len(set(names))


def test_commands_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["commands", "--only", "needles-fier_k=32-pass"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(runs.SEEDS)
    assert all(
        line.startswith("python tools/needles.py") and "--kv fier:k=32 --task pass-key" in line for line in lines
    )


NEEDLES = """\
pass-key 8192 tokens, depth 5%: 100%
pass-key 8192 tokens, depth 95%: 50%
pass-key 8192 tokens, --kv onebit: 3 of 4 right
"""


def test_right_answers_are_read_from_what_needles_prints(tmp_path: pathlib.Path) -> None:
    run = runs.Needles("onebit", "pass-key", seed=1, n=4)
    assert run.outcome(NEEDLES, tmp_path, NOWHERE)["right_by_depth"] == {"5": 2, "95": 1}
    with pytest.raises(ValueError, match="do not add up"):
        run.outcome(NEEDLES.replace("50%", "100%"), tmp_path, NOWHERE)
    with pytest.raises(ValueError, match="unexpected output"):
        run.outcome(NEEDLES.replace("of 4", "of 5"), tmp_path, NOWHERE)


def test_runner_keeps_outcomes_and_makes_none_of_failures(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Echo(runs.Needles):
        def command(self, places: runs.Places, threads: int, out: pathlib.Path) -> list[str]:
            return ["python", "-c", f"print({NEEDLES!r}) if {self.seed} else exit(3)"]

    good, bad = Echo("onebit", "pass-key", seed=1, n=4), Echo("onebit", "pass-key", seed=0, n=4)
    for _ in range(2):
        runs.CommandRunner(NOWHERE, tmp_path, 1, 60).run([good, bad])
    printed = capsys.readouterr().out
    assert printed.count("exit 3") == 2
    assert printed.count("there already") == 1
    assert [path.name for path in tmp_path.iterdir()] == [f"{good.name}.json"]
    assert json.loads((tmp_path / f"{good.name}.json").read_text())["right"] == 3


def test_evaluations_run_on_a_gpu_only_where_it_has_the_schemes() -> None:
    gpu = runs.Places(pathlib.Path("M"), pathlib.Path("T"), pathlib.Path("A"), "cuda")
    assert "--device" in runs.Eval("demo", "t", ("onebit",)).command(gpu, 1, pathlib.Path("o"))
    assert "--device" not in runs.Eval("demo", "t", ("onebit", "h2o")).command(gpu, 1, pathlib.Path("o"))


def test_an_evaluation_of_the_plan_runs(tmp_path: pathlib.Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("It was late, and the rain fell on the old house. " * 20)
    places = runs.Places(tmp_path, tmp_path, tmp_path)
    run = runs.Eval("demo", "t.txt", ("dense:dtype=f16", "onebit"), ctx=128)
    program, *arguments = run.command(places, 1, tmp_path / "out.json")
    assert program == "edgekv"
    assert edgekv(arguments) == 0
    facts = run.outcome("", tmp_path / "out.json", places)
    assert (facts["device"], len(facts["results"])) == ("cpu", 2)
    assert data.commands([facts]) == [
        "edgekv eval --model demo --weights f32 --text t.txt --ctx 128 --windows 1 --kv dense:dtype=f16,onebit"
    ]


def test_plot_shows_every_panel_and_scheme() -> None:
    shown = tables.PLOT.read_text()
    for panel in PANELS:
        for label in points(*panel):
            assert label in shown
