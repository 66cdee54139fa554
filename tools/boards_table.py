"""Rewrite docs/boards from its JSON files: each one's page, the table of all in README.md, and schema.json.

usage: python tools/boards_table.py [--check]     (--check: exit 1 where something is out of date)
"""

from __future__ import annotations

import json
import pathlib
import re
import sys

from pages import rewrite

from edgekv.board.page import energy_text, others, page, throttling
from edgekv.board.record import Bandwidth, Board, Decode, Prompt, json_schema, load
from edgekv.machine import format_bytes

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "docs" / "boards"
BLOCK = re.compile(r"(<!-- boards: [^\n]*-->\n).*?(<!-- /boards -->)", re.DOTALL)
HEAD = (
    *("machine", "cores", "memory, GB/s", "shape, int4", "`dense` at 0", "at 8,192", "`onebit` at 8,192"),
    *("prompt of 512", "first token", "peak memory", "mJ per token", "throttling", "other programs"),
)


def boards(folder: pathlib.Path = FOLDER) -> dict[str, Board]:
    """Every JSON file of the folder, by the name that it and its page have."""
    files = [path for path in sorted(folder.glob("*.json")) if path.name != "schema.json"]
    return {path.stem: load(path) for path in files}


def rows(name: str, board: Board) -> list[str]:
    """A line per shape: tokens per second, and what belongs to them."""
    speeds = [m.gb_per_s for m in board.measured if isinstance(m, Bandwidth)]
    m = board.machine
    machine = (f"[{m.name}]({name}.md)", str(m.cores), f"{max(speeds):.1f}" if speeds else "")
    lines = []
    for shape in board.plan.shapes:
        decoded = {(r.kv, r.depth): r for r in board.measured if isinstance(r, Decode) and r.shape == shape}
        prompt = next((r for r in board.measured if isinstance(r, Prompt) and r.shape == shape), None)
        if not decoded:
            continue
        at = [decoded.get(key) for key in (("dense", 0), ("dense", 8192), ("onebit", 8192))]
        first = at[0] or next(iter(decoded.values()))
        cells = [
            *machine,
            f"`{shape}`",
            *(f"{1e3 / r.token_ms:.2f}" if r else "" for r in at),
            *((f"{prompt.tokens_per_s:.1f}", f"{prompt.first_token_s:.2f} s") if prompt else ("", "")),
            format_bytes(max(r.peak_memory_bytes for r in decoded.values())),
            energy_text(first.energy),
            throttling(board).partition(" (")[0],
            f"{others(board):.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def updated(text: str) -> str:
    """README.md with its table."""
    lines = [line for name, board in boards().items() for line in rows(name, board)]
    table = "\n".join([f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}", *lines]) + "\n"
    return BLOCK.sub(lambda match: match[1] + table + match[2], text)


def main() -> int:
    (FOLDER / "schema.json").touch()
    status = rewrite(FOLDER / "schema.json", lambda text: json.dumps(json_schema(), indent=1) + "\n")
    for name, board in boards().items():
        (FOLDER / f"{name}.md").touch()
        status |= rewrite(FOLDER / f"{name}.md", lambda text, board=board: page(board))
    return status | rewrite(FOLDER / "README.md", updated)


if __name__ == "__main__":
    sys.exit(main())
