"""Rewrite the tables of docs/arm.md from docs/data: counts, cycles, and what a roofline predicts of boards.

usage: python tools/arm_page.py [--check]     (--check: exit 1 when the page is out of date)
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

from pages import rewrite

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE, DATA = ROOT / "docs" / "arm.md", ROOT / "docs" / "data"
BLOCK = re.compile(r"(<!-- (counts|predictions|tokens): (\S+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)


def counts(facts: dict[str, Any]) -> str:
    """A row per kernel; for each processor instructions and cycles, and the inner loop of the first."""
    cpus = facts["cpus"]
    lines = [
        "| kernel | "
        + " | ".join(f"{cpu}: instructions | cycles" for cpu in cpus)
        + " | inner loop of the first |"
    ]
    lines.append("|---" * (2 * len(cpus) + 2) + "|")
    for rows in zip(*cpus.values(), strict=True):
        numbers = " | ".join(f"{row['instructions_per_token']:g} | {row['cycles_per_token']:g}" for row in rows)
        lines.append(f"| {rows[0]['kernel']} | {numbers} | {parts(rows[0])} |")
    return "\n".join(lines) + "\n"


def parts(row: dict[str, Any]) -> str:
    """Its length and its most frequent vector instructions."""
    vectors = sorted(((n, name) for name, n in row["mnemonics"].items() if "." in name[2:]), reverse=True)[:4]
    return f"{row['loop']}: " + ", ".join(f"{n} `{name}`" for n, name in vectors)


def predictions(facts: dict[str, Any]) -> str:
    """A table per board."""
    lines = []
    for board in facts["boards"]:
        lines += [f"{board['board']}. {board['assumed']}.", ""]
        lines.append(
            "| `--kv` | depth | ms/token | weights | attention | waits for | J/token | must print | x dense |"
        )
        lines.append("|---" * 9 + "|")
        dense = {p["depth"]: p["token_ms"] for p in board["predictions"] if p["kv"].startswith("dense")}
        for p in board["predictions"]:
            joules = "n/a" if p["joules"] is None else f"{p['joules']:.2g}"
            times = " | ".join(f"{p[name]:.3g}" for name in ("token_ms", "weights_ms", "attention_ms"))
            note = "" if p["fits"] else "; more than its RAM"
            must = " to ".join(f"{rate:.3g}" for rate in p["tokens_per_s"]) + " tokens/s"
            name, ratio = p["kv"].partition(":")[0], f"{dense[p['depth']] / p['token_ms']:.2f}"
            lines.append(
                f"| `{name}` | {p['depth']:,} | {times} | {p['bound']}{note} | {joules} | {must} | {ratio} |"
            )
        lines.append("")
    return "\n".join(lines)


def tokens(facts: dict[str, Any]) -> str:
    """A row per program and cache: millions of instructions of one token, by part."""
    lines = ["| program | cache | linear blocks | attention | rotation | rest | in all |", "|---" * 7 + "|"]
    for row in facts["tokens"]:
        millions = " | ".join(
            f"{row[part] / 1e6:.2f}" for part in ("linear", "attention", "rope", "rest", "whole")
        )
        lines.append(f"| {row['program']} | `{row['cache']}` | {millions} |")
    return "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[Any], str]] = {"counts": counts, "predictions": predictions, "tokens": tokens}


def updated(page: str) -> str:
    def fill(match: re.Match[str]) -> str:
        facts = json.loads((DATA / match[3]).read_text(encoding="utf-8"))
        return match[1] + TABLES[match[2]](facts) + match[4]

    return BLOCK.sub(fill, page)


if __name__ == "__main__":
    sys.exit(rewrite(PAGE, updated))
