"""Rewrite the tables of docs/visual.md from docs/data/visual-*.json, which tools/visual_eval.py wrote.

usage: python tools/visual_page.py [--check]     (--check: exit 1 when the page is out of date)

The page has a block per table, <!-- visual: NAME --> ... <!-- /visual -->; what is between is replaced.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pages import rewrite

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE, DATA = ROOT / "docs" / "visual.md", ROOT / "docs" / "data"
BLOCK = re.compile(r"(<!-- visual: (\S+) -->\n).*?(<!-- /visual -->)", re.DOTALL)
ATTRIBUTES = ("count", "shape", "colour", "size", "position", "digits", "whole")
TEXTS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L", "CIDEr")
Result = dict[str, Any]


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def name(result: Result) -> str:
    """A row's scheme as --kv has it, or as the code that its pictures are in."""
    kv = result["kv"]
    if kv.startswith("coded:"):
        return f"pictures as `{kv.removeprefix('coded:')}`"
    budget = re.search(r"budget=(\d+)", result["scheme"])
    return f"`{kv}:budget={budget[1]}`" if budget else f"`{kv}`"


def whole(result: Result) -> str:
    return f"{100 * result['accuracy']['whole']:.1f}"


def both(result: Result) -> list[str]:
    return [whole(result), f"{result['CIDEr']:.2f}"]


def bits_table(results: list[Result]) -> str:
    """16 bits, then keys and values, keys alone and values alone at every number of bits."""
    dense, *rest = results
    threes = [rest[i : i + 3] for i in range(0, len(rest), 3)]
    rows = [["16", *both(dense) * 3]]
    for together, keys, values in threes:
        bits = re.search(r"bits=(\d)", together["kv"])[1]
        rows.append([bits, *both(together), *both(keys), *both(values)])
    ends = ("keys and values", "keys", "values")
    return markdown(["bits", *(head for end in ends for head in (f"{end}: things", "CIDEr"))], rows)


def group_and_quantile(kv: str) -> tuple[str, str]:
    if kv.startswith("floored:"):
        return "`head`, rounded down", kv.removeprefix("floored:")
    match = re.search(r"group=(.*),quantile=(.*)", kv)
    return f"`{match[1]}`", match[2]


def one_bit_table(results: list[Result]) -> str:
    """A row per group, a column per quantile."""
    cells = {group_and_quantile(r["kv"]): r for r in results}
    groups, quantiles = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    rows = [
        [
            group,
            f"{cells[group, quantiles[0]]['visual']:,}",
            *(" / ".join(both(cells[group, quantile])) for quantile in quantiles),
        ]
        for group in groups
    ]
    return markdown(["group", "bytes", *(f"quantile {quantile}" for quantile in quantiles)], rows)


def calibrated_table(results: list[Result]) -> str:
    """A row per setting of group=channel: how far out the levels lie, and how far the largest score is pulled."""
    dense, *calibrated = results
    rows = [["16 bits", "", "", f"{dense['visual']:,}", *both(dense), str(dense["same"])]]
    for r in calibrated:
        k_range, v_range = re.search(r"k_range=([^,]+),v_range=([^,]+)", r["kv"]).groups()
        pull = re.search(r"pull=(.*)", r["kv"])
        rows.append([k_range, v_range, pull[1] if pull else "0", f"{r['visual']:,}", *both(r), str(r["same"])])
    return markdown(["k_range", "v_range", "pull", "bytes", "things", "CIDEr", "same"], rows)


def captions_table(results: list[Result]) -> str:
    rows = []
    for r in results:
        shares = [f"{100 * r['accuracy'][attribute]:.1f}" for attribute in ATTRIBUTES]
        texts = [f"{r[text]:.3f}" for text in TEXTS]
        rows.append([name(r), f"{r['visual']:,}", *shares, *texts, str(r["same"])])
    return markdown(["cache", "bytes", *ATTRIBUTES, *TEXTS, "same"], rows)


def pictures_table(results: list[Result]) -> str:
    rows = []
    for r in results:
        sizes = r["visual"], r["bytes"] - r["visual"], r["bytes"]
        rows.append([str(r["pictures"]), name(r), *(f"{size:,}" for size in sizes), *both(r)])
    return markdown(["pictures", "cache", "bytes, pictures", "bytes, text", "together", "things", "CIDEr"], rows)


def objects_table(results: list[Result]) -> str:
    counts = list(results[0]["by_things"])
    rows = []
    for r in results:
        shares = [f"{100 * r['by_things'][n]:.0f}" for n in counts]
        rows.append([str(r["pictures"]), name(r), *shares, whole(r)])
    return markdown(["pictures", "cache", *counts, "all"], rows)


TABLES: dict[str, Callable[[list[Result]], str]] = {
    "bits": bits_table,
    "one-bit": one_bit_table,
    "calibrated": calibrated_table,
    "captions": captions_table,
    "pictures": pictures_table,
    "objects": objects_table,
}


def table(kind: str, facts: dict[str, Any]) -> str:
    return TABLES[kind](facts["results"])


def updated(page: str) -> str:
    def fill(match: re.Match[str]) -> str:
        return match[1] + table(match[2], json.loads((DATA / f"visual-{match[2]}.json").read_text())) + match[3]

    return BLOCK.sub(fill, page)


if __name__ == "__main__":
    sys.exit(rewrite(PAGE, updated))
