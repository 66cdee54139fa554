"""H1B-KV's Fig. 1 with every scheme: perplexity against bytes, both relative to a dense f16 cache; an SVG."""

from __future__ import annotations

import pathlib

import tables_paper as paper
from tables_data import evaluations, full_name, quality, ratio, short_name
from tables_h1b import over_fp16
from tables_runs import ADAPTERS, DENSE, DROPPING, OTHERS, TABLE1, TEXTS, TWO_STAGES

Point = tuple[float, float]  # bytes over those of dense f16, perplexity over its

PANELS = (
    ("gpt2-60m", "test.txt"),
    ("gpt2-60m", "heldout3.txt"),
    ("llama-40m", "heldout3.txt"),
    ("demo", "heldout3.txt"),
)
SHOWN = {full_name(kv) for kv in (*TABLE1, *OTHERS, *DROPPING, *TWO_STAGES)}
LEAST = 0.01  # percent above dense: what is closer, or better, is drawn here
COLOURS = {"h1b": "tab:red", "sign_keys": "tab:red", "onebit": "tab:blue", "bitplane": "tab:blue"}


def points(model: str, text: str) -> dict[str, Point]:
    """The schemes of SHOWN, and the adapted ones by their adapter's kind."""
    found: dict[str, Point] = {}
    for run in evaluations(model, text):
        for result in run["results"]:
            if result["kv"] in SHOWN:
                add(found, short_name(result["kv"]), model, text, result["kv"], None)
    for name, (owner, scheme) in ADAPTERS.items():
        if owner == model:
            add(found, f"{scheme}, adapted: {name.rpartition('-')[2]}", model, text, scheme, name)
    return found


def add(found: dict[str, Point], label: str, model: str, text: str, kv: str, adapter: str | None) -> None:
    result, dense = quality(model, text, kv, adapter=adapter), quality(model, text, DENSE)
    share = ratio(model, text, kv, adapter=adapter)
    if result and dense and share:
        found[label] = result["cache_bytes"] / dense["cache_bytes"], share


def printed() -> dict[str, Point]:
    """The paper's own points: Table I, WikiText-2."""
    return {row.name: (row.mb / paper.TABLE1[0].mb, over_fp16(row, 0)) for row in paper.TABLE1}


def height(point: Point) -> float:
    """Percent above dense, for a logarithmic axis."""
    return max(LEAST, 100 * (point[1] - 1))


def draw(path: pathlib.Path) -> None:
    """Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "edgekv"
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 2, figsize=(12, 11), sharex=True, sharey=True)
    for axes, (model, text) in zip(grid.flat, PANELS, strict=True):
        series = [(points(model, text), "o", None)]
        if (model, text) == PANELS[0]:
            series.append(({f"paper: {name}": point for name, point in printed().items()}, "x", "black"))
        for found, marker, colour in series:
            for label, point in found.items():
                chosen = colour or COLOURS.get(label.partition(":")[0].partition(",")[0], "tab:gray")
                where = point[0], height(point)
                axes.plot(*where, marker, color=chosen, markersize=4)
                axes.annotate(
                    label, where, color=chosen, fontsize=6, xytext=(3, 2), textcoords="offset points", rotation=15
                )
        axes.set(title=f"{model}, {TEXTS[text]}", xscale="log", yscale="log", xlim=(0.07, 2.2))
        axes.grid(visible=True, alpha=0.3)
    for axes in grid[-1]:
        axes.set_xlabel("cache bytes, share of dense f16 (8,192 tokens)")
    for axes in grid[:, 0]:
        axes.set_ylabel(f"perplexity above dense, % (at least {LEAST})")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
