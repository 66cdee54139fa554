"""Pictures and tables: labels apart, legends outside, names in full, lines that fit."""

import itertools
import json
import pathlib
from typing import Any

import numpy as np
import pytest

from edgekv.cli import bench, evaluate, gate, main, plots
from edgekv.cli.tables import WIDTH, fitted
from edgekv.power.trace import Trace
from edgekv.quality.bench import Timing
from edgekv.quality.evaluate import Quality
from edgekv.quality.gate import GateLimits, judge

DATA = pathlib.Path(__file__).resolve().parent.parent / "docs" / "data"


def qualities() -> list[Quality]:
    """Those that were measured of one model, many of them close to each other."""
    rows = []
    for path in sorted(DATA.glob("quality-llama-40m-heldout3*.json")):
        rows += json.loads(path.read_text())["results"]
    return [Quality(**{**row, "notes": ()}) for row in rows]


def timings() -> list[Timing]:
    return [Timing(**row) for row in json.loads((DATA / "bench-llama2-7b.json").read_text())["timings"]]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is drawn, instead of files."""
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.append(figure))
    yield drawn
    from matplotlib import pyplot

    pyplot.close("all")


def test_labels_lie_apart_and_families_are_joined(figures: list[Any]) -> None:
    results = qualities()
    plots.plot_quality(results, 8192, "x.png")
    (axes,) = figures[0].axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert len(axes.texts) == len(results) > 15
    figures[0].canvas.draw()
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert len(boxes) == len(results)  # knobs tell forms of a scheme apart
    overlapping = [(a, b) for a, b in itertools.combinations(boxes, 2) if boxes[a].overlaps(boxes[b])]
    assert overlapping == []
    assert all(axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 for box in boxes.values())
    families = {name.partition(":")[0] for name in boxes}
    assert sorted(len(line.get_xdata()) for line in axes.lines) == sorted(
        sum(name.partition(":")[0] == family for name in boxes) for family in families
    )
    drawn = {(x, y) for line in axes.lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)}
    assert (results[0].cache_bytes / 8192, max(results[0].kl, plots.LEAST_KL)) in drawn


def test_the_legend_of_times_is_outside(figures: list[Any]) -> None:
    plots.plot_times(timings(), "x.png")
    (axes,) = figures[0].axes
    figures[0].canvas.draw()
    assert axes.get_legend().get_window_extent().x0 >= axes.bbox.x1
    said = [text.get_text() for text in axes.texts]
    assert len(said) == len(timings())
    assert all("GB/s" in text and "floor" in text for text in said)
    assert max(text.get_window_extent().x1 for text in axes.texts) <= axes.bbox.x1


def test_power_over_time(figures: list[Any]) -> None:
    watts = np.array([[2.0, 1.0], [3.0, 1.0], [4.0, 1.0]])
    trace = Trace(np.array([10.0, 10.5, 11.0]), watts, np.full((3, 2), np.nan), ("cpu", "rest"), ("cpu", "rest"))
    plots.plot_power(trace, "x.png")
    total, cpu, rest = figures[0].axes[0].lines
    assert total.get_xdata().tolist() == [0, 0.5, 1]
    assert total.get_ydata().tolist() == [3, 4, 5]
    assert (cpu.get_label(), rest.get_label()) == ("cpu", "rest")


def test_tables_fit_and_name_schemes_in_full() -> None:
    verdicts = [judge(quality, (3, 20), GateLimits()) for quality in qualities()]
    for narrow in (
        evaluate.table(qualities(), 8192),
        bench.table(timings()),
        gate.table([verdict for verdict in verdicts if verdict.passed]),
        gate.table(verdicts).partition("\nonebit")[0],
    ):
        lines = narrow.splitlines()
        assert max(map(len, lines)) <= WIDTH
    text = evaluate.table(qualities(), 8192)
    assert "kivi2:bits=4 " in text
    assert "h1b:fit=head " in text
    assert "top1 late" not in text
    assert "top1 late" in evaluate.table(qualities(), 8192, wide=True)
    assert "sampling" in bench.table(timings(), wide=True)
    assert gate.table(verdicts).count("failed: ") == sum(not verdict.passed for verdict in verdicts) > 0


def test_fitted() -> None:
    rows = [["kv", "n", "what"], ["a", "10", "x" * 200]]
    narrow = fitted(rows, left=(0, 2))
    assert narrow[0] == "kv   n  what"
    assert len(narrow[1]) == WIDTH
    assert narrow[1].endswith("...")
    assert len(fitted(rows, left=(0, 2), wide=True)[1]) > 200


def test_commands_write_pictures(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("The old man walked along the road to the village, and the rain fell. " * 12)
    command = ["eval", "--text", str(text), "--kv", "dense,kivi2", "--ctx", "128"]
    assert main([*command, "--plot", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "--ctx", "64", "--kv", "dense", "--tokens", "1", "--plot", str(tmp_path / "b.svg")]) == 0
    assert b"<svg" in (tmp_path / "b.svg").read_bytes()
    capsys.readouterr()
    for bad in ("/no/folder/x.png", str(tmp_path / "x.doc")):
        assert main([*command, "--plot", bad]) == 2
        assert capsys.readouterr().err.count("\n") == 1
