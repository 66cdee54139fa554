"""Rewrite the tables of docs/quality.md from the JSON files that `edgekv eval --json` wrote into docs/data.

usage: python tools/quality.py [--check]     (--check: exit 1 when the page is out of date)

The page has a block per model and text, <!-- eval: NAME.json [NAME.json ...] --> ... <!-- /eval -->; what is
between is replaced. Files of one block must have the same settings: they are runs of different schemes.
"""

import json
import pathlib
import re
import sys
from typing import Any

from pages import rewrite

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE, DATA = ROOT / "docs" / "quality.md", ROOT / "docs" / "data"
FOUND = re.compile(r",(k_heads|v_heads|k_spread)=\d*")  # what a fit found for a scheme: too long for a table
BLOCK = re.compile(r"(<!-- eval: (\S[^>]*\S) -->\n).*?(<!-- /eval -->)", re.DOTALL)


def table(facts: dict[str, Any]) -> str:
    """Settings in a line, then a row per scheme, smallest cache last."""
    s, m = facts["settings"], facts["machine"]
    lines = [
        f"`{s['model']}` on `{s['text']}`: {s['windows']} window(s) of {s['ctx']} tokens, weights {s['weights']}; "
        f"{m['cpu']}, {s['threads']} threads, edgekv {m['versions']['edgekv']}.",
        "",
        "| `--kv` | perplexity | x dense | KL | KL, late | top-1 | cache bytes | of dense f16 | read per token |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    results = sorted(facts["results"], key=lambda r: -r["cache_bytes"])
    dense = max((r["cache_bytes"] for r in results if r["kv"] == "dense:dtype=f16"), default=None)
    for r in results:
        share = f"{r['cache_bytes'] / dense:.3f}" if dense else ""
        lines.append(
            f"| `{FOUND.sub('', r['kv'])}` | {r['perplexity']:.3f} | {r['perplexity_ratio']:.4f} | "
            f"{r['kl']:.4f} | {r['kl_second_half']:.4f} | {r['top1']:.3f} | {r['cache_bytes']:,} | {share} | "
            f"{r['bytes_read_per_token']:,} |"
        )
    return "\n".join(lines) + "\n"


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Runs of different schemes on the same model and text as one."""
    settings = [{k: v for k, v in run["settings"].items() if v is not None} for run in runs]
    if any(each != settings[0] for each in settings):
        raise SystemExit(f"different settings in one block: {settings}")
    return runs[0] | {"results": [result for run in runs for result in run["results"]]}


def updated(page: str) -> str:
    def fill(match: re.Match[str]) -> str:
        return (
            match[1]
            + table(merged([json.loads((DATA / name).read_text()) for name in match[2].split()]))
            + match[3]
        )

    return BLOCK.sub(fill, page)


if __name__ == "__main__":
    sys.exit(rewrite(PAGE, updated))
