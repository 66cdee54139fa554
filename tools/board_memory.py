"""What fits a board of 2, 4, 8 or 16 GB: the table of docs/images.md, as `edgekv budget --memory` computes it.

python tools/board_memory.py [--check]     (--check: exit 1 when the page is out of date)
"""

from __future__ import annotations

import pathlib
import re
import sys

from pages import rewrite

from edgekv.checkpoint.shapes import read_shape
from edgekv.cli.budget import SYSTEM_SHARE
from edgekv.machine import format_bytes
from edgekv.quality.shape_model import unread_model
from edgekv.session.model import Model
from edgekv.session.plan import SessionPlan

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "images.md"
BLOCK = re.compile(r"(<!-- memory -->\n).*?(<!-- /memory -->)", re.DOTALL)
GIB = 1 << 30
MEMORIES = (2, 4, 8, 16)
SHAPES = ("qwen3-0.6b", "llama3.2-1b", "qwen3-1.7b", "llama3.2-3b", "qwen3-4b", "llama3.1-8b", "qwen3-8b")
CHOSEN = "planes:by_need=true"  # what packaging/ starts; it passes the gate on the demo model
SCHEMES = ("dense", CHOSEN, "onebit")
SERVED = 8192  # tokens that a server should hold at least
STEP = 1024
MODELS = 3  # the largest that fit each


def plan(model: Model, kv: str, ctx: int) -> SessionPlan:
    return SessionPlan.make(model, kv=kv, ctx=ctx, weights="int4", available=0)


def total(planned: SessionPlan) -> int:
    return sum(planned.parts().values())


def longest(model: Model, kv: str, memory: int) -> int:
    """Tokens of context, in whole STEPs, that fit; 0: none."""
    low, high = 0, model.config.max_positions // STEP
    while low < high:
        middle = (low + high + 1) // 2
        if total(plan(model, kv, middle * STEP)) <= memory:
            low = middle
        else:
            high = middle - 1
    return low * STEP


def table() -> str:
    """A row for each of the largest models that fit each memory."""
    lines = [
        "| memory | model | weights | `--kv` | `--ctx` | cache | in all | longest with "
        + " | ".join(f"`{kv}`" for kv in SCHEMES)
        + " |"
    ]
    lines.append("|---" * (7 + len(SCHEMES)) + "|")
    models = [unread_model(shape, read_shape(shape)) for shape in SHAPES]
    for size in MEMORIES:
        memory = size * GIB - size * GIB // SYSTEM_SHARE
        fitting = [model for model in models if longest(model, CHOSEN, memory) >= SERVED]
        for model in fitting[-MODELS:]:
            served = plan(model, CHOSEN, min(longest(model, CHOSEN, memory), 2 * SERVED))
            lengths = " | ".join(f"{longest(model, kv, memory):,}" for kv in SCHEMES)
            facts = f"{format_bytes(served.weights_bytes)} | `{CHOSEN}` | {served.ctx:,} | "
            facts += f"{format_bytes(served.cache_bytes)} | {format_bytes(total(served))}"
            lines.append(f"| {size} GB | `{model.name}` | {facts} | {lengths} |")
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    return BLOCK.sub(lambda match: match[1] + table() + match[2], page)


if __name__ == "__main__":
    sys.exit(rewrite(PAGE, updated))
