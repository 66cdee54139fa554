"""Draws docs/pictures/schemes.svg: the cache's bytes, KL divergence, and attention's speed.

usage: python tools/docs/pictures.py     (needs matplotlib)
"""

from __future__ import annotations

import pathlib

from tables import MODELS, OURS, ROOT, TOKENS, WHEN, published, read_measurements

from edgekv import CacheSpec
from edgekv.kvcache import schemes

MODEL = MODELS[1]
LEAST = 1e-5  # nats: rounding


def points() -> dict[str, tuple[float, float]]:
    """Returns percent of f16's bytes and KL of the measured lossy schemes, by name."""
    found = read_measurements(MODEL)
    exact = found[str(CacheSpec.parse("dense"))]["cache_bytes"]
    specs = [
        spec
        for spec in map(CacheSpec.parse, {**WHEN, **schemes()})
        if found.get(str(spec), {"kl": 0})["kl"] > LEAST
    ]
    return {s.short: (100 * found[str(s)]["cache_bytes"] / exact, found[str(s)]["kl"]) for s in specs}


def draw(path: pathlib.Path) -> None:
    """Draws the picture with matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "edgekv", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.6, 4.6))
    found = points()
    speed = published()["attention"]
    colours = ["tab:blue" if name.partition(":")[0] in OURS else "tab:gray" for name in found]
    for (name, point), colour in zip(found.items(), colours, strict=True):
        times = speed.get(name)
        axes.plot(*point, "o", color=colour, markersize=6, markerfacecolor=colour if times else "white")
    labels = [f"{name} ({speed[name]:.1f}x)" if name in speed else name for name in found]
    axes.axvline(100, color="black", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", yscale="log", xlim=(9, 140))
    axes.set_xlabel("bytes of the cache, % of f16's")
    axes.set_ylabel("KL from the exact cache, nats")
    axes.set_title(
        f"{MODEL}, {TOKENS:,} tokens of held-out novels; in brackets, filled: speed of attention, times f16's",
        fontsize=9,
    )
    axes.set_xticks([12.5, 25, 50, 100], ["12.5", "25", "50", "100"])
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.25)
    for point, label, colour in zip(found.values(), labels, colours, strict=True):
        axes.annotate(label, point, (5, 3), textcoords="offset points", fontsize=7, color=colour)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    draw(ROOT / "docs" / "pictures" / "schemes.svg")
