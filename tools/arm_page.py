"""Rewrite the tables of docs/arm.md from docs/data: counted instructions, and what a roofline predicts of boards.

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
BLOCK = re.compile(r"(<!-- (counts|predictions): (\S+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)


def counts(facts: dict[str, list[dict[str, Any]]]) -> str:
    """A row per kernel, a column per processor; and what the inner loop is made of on the first two."""
    cpus = list(facts)
    lines = ["| kernel | " + " | ".join(cpus) + " | inner loop on the first | on the second |"]
    lines.append("|---" * (len(cpus) + 3) + "|")
    for rows in zip(*facts.values(), strict=True):
        numbers = " | ".join(f"{row['instructions_per_token']:g}" for row in rows)
        made = " | ".join(parts(row) for row in rows[:2])
        lines.append(f"| {rows[0]['kernel']} | {numbers} | {made} |")
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
        lines.append("| `--kv` | depth | ms/token | weights | attention | attention waits for | J/token |")
        lines.append("|---" * 7 + "|")
        for p in board["predictions"]:
            joules = "n/a" if p["joules"] is None else f"{p['joules']:.1f}"
            times = " | ".join(f"{p[name]:.0f}" for name in ("token_ms", "weights_ms", "attention_ms"))
            note = "" if p["fits"] else "; more than its RAM"
            lines.append(f"| `{p['kv']}` | {p['depth']:,} | {times} | {p['bound']}{note} | {joules} |")
        lines.append("")
    return "\n".join(lines)


TABLES: dict[str, Callable[[Any], str]] = {"counts": counts, "predictions": predictions}


def updated(page: str) -> str:
    def fill(match: re.Match[str]) -> str:
        facts = json.loads((DATA / match[3]).read_text(encoding="utf-8"))
        return match[1] + TABLES[match[2]](facts) + match[4]

    return BLOCK.sub(fill, page)


if __name__ == "__main__":
    sys.exit(rewrite(PAGE, updated))
