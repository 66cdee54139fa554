"""Rewrite the parts of README.md that come from the code: the table of KV schemes.

usage: python tools/readme.py [--check]     (--check: exit 1 when the README is out of date)
"""

import pathlib
import re
import sys

from pages import rewrite

from edgekv import CACHES
from edgekv.kvcache import scheme_facts

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"(<!-- schemes: [^\n]*-->\n).*?(<!-- /schemes -->)", re.DOTALL)


def schemes_table() -> str:
    """A row per scheme: bytes are per token and KV head at head_dim 128, all counted."""
    rows = ["| `--kv` | what is kept | from | bytes per token and KV head | gives up |", "|---|---|---|---|---|"]
    for name in CACHES:
        facts = scheme_facts(name)
        each = facts["bytes_per_token_per_kv_head"]
        size = "as `--kv-budget` says" if each is None else f"{each:.1f}"
        rows.append(f"| `{name}` | {facts['summary']} | {facts['paper']} | {size} | {facts['gives_up']} |")
    return "\n".join(rows) + "\n"


def updated(text: str) -> str:
    return BLOCK.sub(lambda match: match[1] + schemes_table() + match[2], text)


if __name__ == "__main__":
    sys.exit(rewrite(README, updated))
