"""A board's page of Markdown, from its record alone."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence

from edgekv.kvcache import CacheSpec
from edgekv.machine import format_bytes
from edgekv.power.board import Bandwidth, Board, Decode, Energy, Prompt

SHARED = 0.05  # of the cores' time for other programs: from here on the page says so
MOSTLY = 0.5
NA = "n/a"


def page(board: Board) -> str:
    """Write the whole page."""
    started = min((m.span.started for m in board.measured), default=0.0)
    day = datetime.datetime.fromtimestamp(started, datetime.timezone.utc)
    parts = [
        f"# {board.machine.name}\n",
        f"edgekv {board.machine.versions.get('edgekv')}, {day:%Y-%m-%d}. Written by `edgekv board`, which "
        "[README.md](README.md) explains; the figures with all that belongs to them are in the JSON file beside "
        "this page.\n",
        *_warnings(board),
        _facts(board),
    ]
    if read := [(str(m.threads), f"{m.gb_per_s:.1f}") for m in board.measured if isinstance(m, Bandwidth)]:
        parts += ["## Memory, read in order\n", table(("threads", "GB/s"), read)]
    if decoded := [m for m in board.measured if isinstance(m, Decode)]:
        parts += _decoding(board, decoded)
    if prompts := [m for m in board.measured if isinstance(m, Prompt)]:
        head = ("shape", "cache", "tokens", "tokens/s", "first token", "peak memory", "mJ per token")
        parts += ["## Prompts\n", "The best of at most three.\n", table(head, map(_prompt, prompts))]
    return "\n".join([*parts, *_skipped(board)])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def throttling(board: Board) -> str:
    """Name what limited the clocks at any time."""
    known = [m.span.throttling for m in board.measured if m.span.throttling is not None]
    if not known:
        return "not known (nothing here reports it)"
    return ", ".join(sorted({limit for limits in known for limit in limits})) or "none"


def others(board: Board) -> float:
    """Return the share of the cores' time that other programs took while something was measured."""
    spans = [m.span for m in board.measured]
    took = sum(span.took_s for span in spans)
    return sum(span.others * span.took_s for span in spans) / took if took else 0.0


def _warnings(board: Board) -> list[str]:
    lines, share = [], others(board)
    if share > SHARED:
        what = "are lower than they would be alone" if share < MOSTLY else "say nothing about the machine"
        lines.append(
            f"The machine was shared: other programs took {share:.0%} of the cores' time. The figures {what}.\n"
        )
    if board.plan.shapes == ("tiny",):
        lines.append("A smoke test on a tiny model: its figures say nothing about the machine.\n")
    return lines


def _facts(board: Board) -> str:
    m, around, spans, idle = board.machine, board.surroundings, [m.span for m in board.measured], board.idle
    warmest = max((span.temperature_c for span in spans if span.temperature_c is not None), default=None)
    clocks = [span.clock_mhz for span in spans if span.clock_mhz is not None]
    rows = [
        ("processor", f"{m.cpu or 'not named'}, {m.architecture}, {m.cores} cores"),
        ("memory", format_bytes(m.ram_bytes)),
        ("system", m.os),
        ("versions", ", ".join(f"{name} {version}" for name, version in m.versions.items())),
        ("as its owner says", around.about or "nothing was said"),
        ("cooling", "; ".join(around.cooling) or "nothing that the system names"),
        ("clocks", "; ".join(around.clocks) or "not named by the system"),
        ("clock at the ends of measurements", f"{min(clocks):.0f} to {max(clocks):.0f} MHz" if clocks else NA),
        ("warmest", f"{warmest:.1f} C" if warmest is not None else NA),
        ("throttling", throttling(board)),
        ("power meter", board.meter),
        ("at rest", NA if idle is None or idle.watts is None else f"{idle.watts:.2f} W"),
        ("other programs", f"{others(board):.0%} of the cores' time"),
    ]
    return table(("", ""), rows)


def _decoding(board: Board, rows: list[Decode]) -> list[str]:
    tables: dict[str, Callable[[Decode], str]] = {
        "Tokens per second:": lambda r: f"{1e3 / r.token_ms:.2f}",
        "Milliseconds per token, of which weight products + attention; the fastest and the 95th percentile:": (
            lambda r: (
                f"{r.token_ms:.1f}, {r.matmul_ms:.1f} + {r.attention_ms:.1f}; "
                f"{r.token_ms_best:.1f} to {r.token_ms_p95:.1f}"
            )
        ),
        "Peak memory of the process:": lambda r: format_bytes(r.peak_memory_bytes),
        "GB/s, as the bytes that a token must read over its time:": (
            lambda r: f"{r.bytes_read / r.token_ms / 1e6:.1f}"
        ),
    }
    if any(row.energy for row in rows):
        head = "Millijoules per token, with what the samples leave open; without what it drew at rest:"
        tables[head] = lambda r: energy_text(r.energy)
    chosen = [
        f"`{s.name}` {s.decode_threads} for a token's weight products, {s.prompt_threads} for a prompt's, "
        f"{s.threads} for attention"
        for s in board.shapes
    ]
    found, plan = {(r.shape, r.depth, r.kv): r for r in rows}, board.plan
    head_row = ("shape", "depth", *(f"`{CacheSpec.parse(kv).short}`" for kv in plan.schemes))
    parts = [
        "## Decoding\n",
        "Random weights in the model's shape, all layers; synthetic keys and values up to the depth; the median "
        f"token of {plan.seconds:g} s. Threads {'asked for' if plan.threads else 'chosen at load'}: "
        f"{'; '.join(chosen)}.\n",
    ]
    for head, text in tables.items():
        lines = []
        for shape, depth in dict.fromkeys((s, d) for s in plan.shapes for d in plan.depths):
            cells = [found.get((shape, depth, kv)) for kv in plan.schemes]
            if any(cells):
                lines.append((f"`{shape}`", str(depth), *(text(r) if r else "" for r in cells)))
        parts += [f"{head}\n", table(head_row, lines)]
    return parts


def energy_text(energy: Energy | None) -> str:
    """Write millijoules per token, with their error and those above idle."""
    if energy is None:
        return NA
    error = "" if energy.error_mj is None else f" ± {energy.error_mj:.2g}"
    net = "" if energy.net_mj_per_token is None else f"; {energy.net_mj_per_token:.4g}"
    return f"{energy.mj_per_token:.4g}{error}{net}"


def _prompt(r: Prompt) -> tuple[str, ...]:
    speed, memory = (f"{r.tokens_per_s:.1f}", f"{r.first_token_s:.2f} s"), format_bytes(r.peak_memory_bytes)
    return f"`{r.shape}`", f"`{r.kv}`", str(r.tokens), *speed, memory, energy_text(r.energy)


def _skipped(board: Board) -> list[str]:
    by_reason: dict[str, dict[str, None]] = {}
    begun = {m.step.shape for m in board.measured}
    for skipped in board.left_out:
        shape = skipped.what.partition(", ")[0]
        by_reason.setdefault(skipped.why, {})[skipped.what if shape in begun else f"all of {shape}"] = None
    lines = [f"- {why}: {'; '.join(what)}" for why, what in by_reason.items()]
    return ["## Left out\n", *lines, ""] if lines else []
