"""Rewrite the tables of docs/performance.md and docs/performance-history.md from JSON in docs/data.

usage: python tools/performance.py [--check]     (--check: exit 1 when a page is out of date)

A block <!-- bench: NAME.json --> ... <!-- /bench --> holds what `edgekv bench --json` measured of a token, prefill
what it measured of prompts, compare what `tools/compare_llamacpp.py --json` did; what is between is replaced.
"""

import json
import pathlib
import re
import sys
from typing import Any

from pages import rewrite

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS, DATA = ROOT / "docs", ROOT / "docs" / "data"
PAGES = DOCS / "performance.md", DOCS / "performance-history.md"
BLOCK = re.compile(r"(<!-- (\w+): (\S+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
ORDER = ("matmul", "append", "score", "select", "value", "choose", "attend", "rope", "sampling", "python")


def bench(facts: dict[str, Any]) -> list[str]:
    """A table of `edgekv bench --json`, with the parts that the file has."""
    s, measured = facts["settings"], facts["timings"][0]["parts"]
    columns = [part for part in ORDER if part in measured]
    lines = [
        f"`{s['model']}`, {s['layers']} layers, {s['weights']} weights; {machine(facts)}, {s['threads']} threads, "
        f"memory read at {facts['bandwidth'] / 1e9:.1f} GB/s.",
        "",
        f"| `--kv` | depth | ms/token | {' | '.join(columns)} "
        "| attention/layer | MB read/layer | GB/s | x floor |",
        "|---|" + "---|" * (len(columns) + 6),
    ]
    for t in facts["timings"]:
        parts = " | ".join(f"{t['parts'][part]:.2f}" for part in columns)
        lines.append(
            f"| `{t['kv'].partition(':')[0]}` | {t['depth']:,} | {t['token_ms']:.2f} | {parts} | "
            f"{t['attention_ms_layer']:.3f} | {t['bytes_read_layer'] / 1e6:.1f} | {t['gb_per_s']:.1f} | "
            f"{t['times_floor']:.2f} |"
        )
    return lines


def prefill(facts: dict[str, Any]) -> list[str]:
    s = facts["settings"]
    lines = [
        f"`{s['model']}`, {s['layers']} layers, {s['weights']} weights; {machine(facts)}, {s['threads']} threads.",
        "",
        "| `--kv` | tokens | tokens/s | s | in matmuls | BLAS GFLOP/s | x floor |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = (
        f"| `{p['kv'].partition(':')[0]}` | {p['tokens']:,} | {p['tokens_per_s']:.0f} | {p['seconds']:.2f} | "
        f"{p['matmul_s'] / p['seconds']:.0%} | {p['blas_flops'] / 1e9:.0f} | {p['times_floor']:.2f} |"
        for p in facts["prefill"]
    )
    return [*lines, *rows]


def compare(facts: dict[str, Any]) -> list[str]:
    s = facts["settings"]
    lines = [
        f"`{s['shape']}`, {s['layers']} layers; {machine(facts)}, {s['threads']} threads; "
        f"medians of {s['rounds']} rounds.",
        "",
        "| | depth | setting | ms/token | of all rounds | x llama.cpp's best |",
        "|---|---|---|---|---|---|",
    ]
    for r in facts["results"]:
        depth = f"{int(r['depth']):,}" if r["depth"].isdigit() else f"prefill of {s['prefill']}"
        setting = r["setting"].partition(":")[0] if r["program"] == "edgekv" else r["setting"]
        rounds = ", ".join(f"{ms:.2f}" for ms in r["all_ms"])
        lines.append(
            f"| {r['program']} | {depth} | `{setting}` | {r['ms']:.2f} | {rounds} | {r['times_faster']:.2f} |"
        )
    return lines


def machine(facts: dict[str, Any]) -> str:
    m = facts["machine"]
    return f"{m['cpu']}, {m['cores']} cores, {m['ram_bytes'] / 2**30:.0f} GiB, edgekv {m['versions']['edgekv']}"


TABLES = {"bench": bench, "prefill": prefill, "compare": compare}


def updated(page: str) -> str:
    def fill(match: re.Match[str]) -> str:
        lines = TABLES[match[2]](json.loads((DATA / match[3]).read_text()))
        return match[1] + "\n".join(lines) + "\n" + match[4]

    return BLOCK.sub(fill, page)


if __name__ == "__main__":
    sys.exit(max([rewrite(page, updated) for page in PAGES]))
