"""Draw docs/frontier.svg: KL against bytes, every scheme, from the JSON files of docs/data.

usage: python tools/frontier.py        (needs edgekv[plot])
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import matplotlib

from edgekv.kvcache import CacheSpec

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "edgekv"

from matplotlib import pyplot  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA, PICTURE = ROOT / "docs" / "data", ROOT / "docs" / "frontier.svg"
MODELS = {"demo": 16, "llama-40m": 16, "gpt2-60m": 96}  # layers times KV heads
TEXT, CTX = "heldout3.txt", 8192
MOST_KL = 0.12  # what breaks the text is left out
NAMES = {"kivi2", "int4", "kvcomp", "mikv", "h2o", "snapkv", "tova", "streaming"}
OURS = {"planes", "onebit", "bitplane"}


def results(model: str) -> Iterator[dict[str, Any]]:
    """All that was measured of the model on the text."""
    for path in sorted(DATA.glob(f"*-{model}*.json")):
        if path.name.startswith(("quality-", "tables-")) and "-two-" not in path.name:  # two windows, of one model
            content = json.loads(path.read_text())
            for run in content if isinstance(content, list) else [content]:
                settings = run.get("settings", {})
                place = settings.get("model"), settings.get("text"), settings.get("ctx"), settings.get("adapter")
                if place == (model, TEXT, CTX, None):
                    yield from run["results"]


def draw(axes: Any, model: str, n_heads: int) -> None:
    """One model: its schemes as points, bits by need as a line."""
    need = []
    for result in results(model):
        spec = CacheSpec.parse(result["kv"])
        size = result["cache_bytes"] / CTX / n_heads
        if spec.scheme.name == "planes" and spec.knobs.k_heads:
            need.append((size, result["kl"]))
        elif result["kl"] < MOST_KL and spec.scheme.name in NAMES | OURS:
            own = spec.scheme.name in OURS
            axes.plot(size, result["kl"], "o", markersize=4, color="tab:blue" if own else "tab:gray")
            bits = f" {spec.knobs.k_bits}+{spec.knobs.v_bits}" if spec.scheme.name == "planes" else ""
            label = f"{spec.scheme.name}{bits}" if own else spec.scheme.name
            axes.annotate(label, (size, result["kl"]), (4, 3), textcoords="offset points", fontsize=6)
    axes.plot(*zip(*sorted(need), strict=True), "o-", color="tab:red", label="planes, bits by need")
    axes.set(xscale="log", yscale="log", title=model, xlabel="bytes per token and KV head, all tokens")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize=7)


def main() -> None:
    figure, panels = pyplot.subplots(1, len(MODELS), figsize=(15, 5))
    for axes, (model, n_heads) in zip(panels, MODELS.items(), strict=True):
        draw(axes, model, n_heads)
    panels[0].set(ylabel="KL from dense, nats per token")
    figure.savefig(PICTURE, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
