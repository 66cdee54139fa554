"""Puts the tables of a tools/gpu_check.py run into docs/gpu.md, each below its mark <!-- table: NAME -->.

usage: python tools/gpu_page.py FOLDER/gpu.json

Keeps the file as docs/data/gpu-h200.json. A table that the run does not have stays as it is. The text around the
tables is written by hand.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE, DATA = ROOT / "docs" / "gpu.md", ROOT / "docs" / "data" / "gpu-h200.json"


def with_tables(page: str, tables: dict[str, str]) -> str:
    """The page with each table in its place; ValueError for one that has none."""
    for name, table in tables.items():
        place = re.compile(rf"(<!-- table: {re.escape(name)} -->\n)(\|.*\n)*")
        page, found = place.subn(lambda match, table=table: f"{match[1]}{table}\n", page)
        if found != 1:
            raise ValueError(f"{PAGE} has {found} marks for the table {name}")
    return page


def main(path: str) -> int:
    text = pathlib.Path(path).read_text()
    PAGE.write_text(with_tables(PAGE.read_text(), json.loads(text)["tables"]))
    DATA.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
