"""Rewrites the tables of the documents that come from the code and from docs/lab/data, each between its marks:

    <!-- table: NAME --> ... <!-- /table -->

the pages of docs/lab/boards from the JSON files there, and edgekv/kvcache/published.json.

usage: python tools/docs/tables.py [--check]     (--check: exit 1 when a page is out of date)
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from typing import Any

from edgekv import CacheSpec
from edgekv.checkpoint.hub import read_shape
from edgekv.cli import build_parser
from edgekv.cli.models import SYSTEM_SHARE
from edgekv.engine.loading import SessionPlan
from edgekv.engine.model import Model
from edgekv.errors import CacheError
from edgekv.eval.bench import unread_model
from edgekv.eval.board import NA, Bandwidth, Board, Decode, Prompt, page, throttling
from edgekv.kvcache import scheme_facts, schemes
from edgekv.kvcache.choice import PUBLISHED, default_scheme
from edgekv.kvcache.registry import PRESETS
from edgekv.machine import format_bytes
from edgekv.power import METERS

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA, BOARDS = ROOT / "docs" / "lab" / "data", ROOT / "docs" / "lab" / "boards"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), BOARDS / "README.md"]
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)
MODELS = ("llama-40m", "gpt2-60m")
TEXT, TOKENS = "heldout3", 8192
CHOSEN = default_scheme()
WHEN = {
    "f16": "the context is short; the reference",
    "q8": "the gate passes it: large key biases break it",
    "q4": "the model was never gated",
    "q3": "the gate passes it: the best for its bytes",
    "q2": "memory is scarce and the gate passes it",
    "q1.5": "memory is scarcer: let the gate look first",
    "planes": "the model has no tokenizer, so that mixed bits can't be measured",
    "onebit": "speed matters most, and the gate passes it",
    "visual_planes": "a prompt is mostly pictures",
}
WHEN[CHOSEN] = f"**{WHEN[CHOSEN]}: what `auto` takes**"
"""What to take a scheme for, in the order in which to try them."""
FIRST = {"f16": "16 bits per number", "q4": "4 bits", "q2": "2 bits", "q1.5": "1.5 bits"}
LOSSES = dict.fromkeys(("q8", "q4", "q3", "q2", "q1.5", "onebit", "kivi2", "int4"), "")
LOSSES["h1b"] = ", without an adapter"
EARLIER = {
    **{"by_need": "mixed_bits", "k_spread": "key_channel_scales", "visual=planes": "visual_planes"},
    **{"k_heads": "key_bits_per_head", "v_heads": "value_bits_per_head"},
    **{",threshold=0.0": "", ",planes=5": "", ",text=f16": ""},
}
"""Names of schemes and options in earlier measurements -> those of today; nothing where an option is gone."""
OURS = {"dense", *(CacheSpec.parse(kv).scheme.name for kv in WHEN)}
GIB = 1 << 30
MEMORIES = (2, 4, 8, 16)
SHAPES = ("qwen3-0.6b", "llama3.2-1b", "qwen3-1.7b", "llama3.2-3b", "qwen3-4b", "llama3.1-8b", "qwen3-8b")
SCHEMES = {f"`{name}`": name for name in ("f16", CHOSEN, "q2")}
SERVED = 8192  # tokens that a server should hold at least
STEP = 1024
LARGEST = 3  # models that fit each
PREDICTED = {
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", "10 to 16"),
    "llama3.2-1b": ("meta-llama/Llama-3.2-1B", "6 to 9"),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", "4 to 6"),
}
"""Shapes that a Pi 5 runs in int8 -> the model, and its tokens/s behind SERVED others in q3, predicted."""
BOARDS_HEAD = (
    *("machine", "cores", "memory, GB/s", "shape, int4", "`dense` at 0", "at 8,192", "`onebit` at 8,192"),
    *("prompt of 512", "peak memory", "mJ per token", "throttling"),
)


def commands_table() -> str:
    """Returns a row per command, with what its help says."""
    rows = ["| `edgekv ...` | |", "|---|---|"]
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            rows += [f"| `{choice.dest}` | {choice.help} |" for choice in action._choices_actions]
    return "\n".join(rows) + "\n"


def meters_table() -> str:
    """Returns a row per sensor."""
    rows = ["| `--power` | sensor | the total includes, and leaves out | Hz |", "|---|---|---|---|"]
    rows += [f"| `{name}` | {kind.summary} | {kind.covers} | {kind.max_hz:g} |" for name, kind in METERS.items()]
    return "\n".join(rows) + "\n"


def read_measurements(model: str) -> dict[str, dict[str, Any]]:
    """Returns what `edgekv eval` found on held-out novels, by scheme as it is written today."""
    runs = [json.loads(path.read_text()) for path in sorted(DATA.glob(f"quality-{model}-{TEXT}*.json"))]
    return {str(_present(row["kv"])): row for run in runs for row in run["results"]}


def _present(kv: str) -> CacheSpec | None:
    """Returns a measured scheme with its options of today, or None where it is no more."""
    for earlier, name in EARLIER.items():
        kv = kv.replace(earlier, name)
    try:
        return CacheSpec.parse(kv).without_fit
    except CacheError:
        return None


def published() -> dict[str, Any]:
    """Returns what `edgekv.kvcache.choice.published_results` reads, from docs/lab/data."""
    attention: dict[str, float] = {}
    for name in ("bench", "bench-presets"):  # each beside its own f16; the latest counts
        timings = read_timings(name)
        attention |= {kv: times(timings, kv, "attention_ms_layer") for kv in timings}
    return {
        "quality_on": f"a Llama of 40 M parameters, {TOKENS:,} tokens of novels it was not trained on",
        "speed_on": f"layers of Llama 2 7B at {TOKENS:,} tokens, x86-64",
        "kl": {kv: row["kl"] for name, row in read_measurements(MODELS[0]).items() if (kv := _short(name))},
        "attention": attention,
        "worst_kl": worst_kl(),
    }


def read_timings(name: str) -> dict[str, dict[str, Any]]:
    """Returns what `edgekv bench` measured at TOKENS tokens on 4 layers of Llama 2 7B, by scheme."""
    rows = json.loads((DATA / f"{name}-llama2-7b.json").read_text())["timings"]
    return {kv: row for row in rows if row["depth"] == TOKENS and (kv := _short(row["kv"]))}


def times(timings: dict[str, dict[str, Any]], kv: str, part: str) -> float:
    """Returns how many times as fast as f16 a scheme is in a part of the time."""
    return float(timings["f16"][part] / timings[kv][part])


def worst_kl() -> dict[str, float]:
    """Returns each preset's largest KL on any model: held-out novels, and models with large key biases."""
    files = [*DATA.glob(f"quality-*-{TEXT}*"), *DATA.glob("key-bias-*")]
    rows = [row for path in sorted(files) for row in json.loads(path.read_text())["results"]]
    found: dict[str, list[float]] = {name: [] for name in PRESETS}
    for row in rows:
        if (short := _short(row["kv"])) in found:
            found[short].append(row["kl"])
    return {name: max(kls) for name, kls in found.items()}  # ValueError: a preset was never measured


def _short(kv: str) -> str | None:
    spec = _present(kv)
    return spec and spec.short


def first_table() -> str:
    """Returns README's row per preset that a newcomer compares."""
    quality, timings = [read_measurements(model) for model in MODELS], read_timings("bench-presets")
    rows = ["| cache (`--kv`) | size | loss | speed |", "|---|---:|---:|---:|"]
    for kv, words in FIRST.items():
        spec = CacheSpec.parse(kv)
        kls = " and ".join(f"{found[str(spec)]['kl']:.4f}" for found in quality)
        size = spec.bytes_per_token() / CacheSpec.parse("f16").bytes_per_token()
        name = f"{words} (`{kv}`){', the default for long contexts' if kv == CHOSEN else ''}"
        speed = f"{times(timings, kv, 'token_ms'):.1f}x"
        rows.append(f"| {name} | {size:.0%} | {'none' if kv == 'f16' else kls} | {speed} |")
    return "\n".join(rows) + "\n"


def speed_table() -> str:
    """Returns a row per scheme whose tokens were timed beside f16."""
    timings = read_timings("bench-presets")
    rows = [
        "| `--kv` | attention of a layer, ms | relative to `f16` | whole token, ms | relative |",
        "|---|---|---|---|---|",
    ]
    for kv, row in timings.items():
        cells = [f"`{kv}`"]
        for part in ("attention_ms_layer", "token_ms"):
            cells += [f"{row[part]:.2f}", f"{times(timings, kv, part):.1f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def quality_table() -> str:
    """Returns a row per scheme of LOSSES."""
    quality, exact = [read_measurements(model) for model in MODELS], CacheSpec.parse("f16").bytes_per_token()
    rows = [
        "| `--kv` | bytes of f16's | " + " | ".join(f"{model}: perplexity, KL, top-1" for model in MODELS) + " |"
    ]
    rows.append("|---|---:|---|---|")
    for kv, words in LOSSES.items():
        spec = CacheSpec.parse(kv)
        cells = [f"**`{kv}`**" if kv == CHOSEN else f"`{kv}`{words}", f"{spec.bytes_per_token() / exact:.0%}"]
        for found in quality:
            row = found[str(spec)]
            digits = 4 if row["perplexity_ratio"] < 2 else 2
            cells.append(f"x{row['perplexity_ratio']:.{digits}f}, {row['kl']:.4f}, {row['top1']:.3f}")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def schemes_table() -> str:
    """Returns a row per scheme of WHEN."""
    return _rows(WHEN, "take it when")


def papers_table() -> str:
    """Returns a row per scheme of a paper or baseline, and what it gives up."""
    return _rows(
        {name: scheme_facts(name)["tradeoff"] for name in sorted(schemes()) if name not in OURS}, "gives up"
    )


def _rows(kvs: dict[str, str], last: str) -> str:
    quality, speed = [read_measurements(model) for model in MODELS], published()["attention"]
    rows = [
        f"| `--kv` | bytes | {' | '.join(f'KL, {model}' for model in MODELS)} | speed | {last} |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for kv in kvs:
        spec, attention = CacheSpec.parse(kv), speed.get(_short(kv))
        cells = [f"`{kv}`", f"{spec.bytes_per_token():.1f}"]
        cells += [f"{found[str(spec)]['kl']:.4f}" if str(spec) in found else "-" for found in quality]
        cells += [f"{attention:.1f}x" if attention else "-", kvs[kv]]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def plan(model: Model, kv: str, ctx: int) -> SessionPlan:
    return SessionPlan.make(model, kv=kv, ctx=ctx, weights="q4")


def total(planned: SessionPlan) -> int:
    return sum(planned.parts().values())


def longest(model: Model, kv: str, memory: int) -> int:
    """Returns the tokens of context, in whole STEPs, that fit; 0 where none do."""
    low, high = 0, model.config.max_positions // STEP
    while low < high:
        middle = (low + high + 1) // 2
        if total(plan(model, kv, middle * STEP)) <= memory:
            low = middle
        else:
            high = middle - 1
    return low * STEP


def memory_table() -> str:
    """Returns a row for each of the largest models that fit each memory."""
    names = [f"longest with {name}" for name in SCHEMES]
    head = ("memory", "model", "weights", "`--ctx`", "cache", "in all", *names)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    models = [unread_model(shape, read_shape(shape)) for shape in SHAPES]
    least = [total(plan(model, CHOSEN, SERVED)) for model in models]
    for size in MEMORIES:
        memory = size * GIB - size * GIB // SYSTEM_SHARE
        fitting = [model for model, needed in zip(models, least, strict=True) if needed <= memory]
        for model in fitting[-LARGEST:]:
            found = {kv: longest(model, kv, memory) for kv in SCHEMES.values()}
            served = plan(model, CHOSEN, min(found[CHOSEN], 2 * SERVED))
            lengths = " | ".join(f"{n:,}" for n in found.values())
            facts = f"{format_bytes(served.weights_bytes)} | {served.ctx:,} | "
            facts += f"{format_bytes(served.cache_bytes)} | {format_bytes(total(served))}"
            lines.append(f"| {size} GB | `{model.name}` | {facts} | {lengths} |")
    return "\n".join(lines) + "\n"


def pi_table() -> str:
    """Returns the memory of each model of PREDICTED with q3, and its predicted speed."""
    rows = ["| model | memory | tokens/s, predicted |", "|---|---|---|"]
    for shape, (name, speed) in PREDICTED.items():
        model = unread_model(shape, read_shape(shape))
        planned = SessionPlan.make(model, kv="q3", ctx=SERVED, weights="int8")
        rows.append(f"| `{name}` | {format_bytes(total(planned))} | {speed} |")
    return "\n".join(rows) + "\n"


def boards() -> dict[str, Board]:
    """Reads every JSON file of BOARDS, by the name that it and its page have."""
    return {path.stem: Board.load(path) for path in sorted(BOARDS.glob("*.json"))}


def board_rows(name: str, board: Board) -> list[str]:
    """Returns a row per shape: tokens per second, and what belongs to them."""
    speeds = [m.gb_per_s for m in board.measured if isinstance(m, Bandwidth)]
    machine = (f"[{board.name}]({name}.md)", str(board.machine["cores"]), f"{max(speeds):.1f}" if speeds else "")
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
            f"{prompt.tokens_per_s:.1f}" if prompt else "",
            format_bytes(max(r.peak_memory_bytes for r in decoded.values())),
            first.energy.to_text() if first.energy else NA,
            throttling(board).partition(" (")[0],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def boards_table() -> str:
    """Returns the rows of every board."""
    lines = [line for name, board in boards().items() for line in board_rows(name, board)]
    return "\n".join([f"| {' | '.join(BOARDS_HEAD)} |", f"|{'---|' * len(BOARDS_HEAD)}", *lines]) + "\n"


TABLES = {
    "first": first_table,
    "speed": speed_table,
    "quality": quality_table,
    "commands": commands_table,
    "schemes": schemes_table,
    "papers": papers_table,
    "meters": meters_table,
    "memory": memory_table,
    "pi": pi_table,
    "boards": boards_table,
}


def main(arguments: list[str]) -> int:
    """Writes the pages, or with --check compares them; returns 1 where one is out of date."""
    fresh = {path: BLOCK.sub(lambda m: m[1] + TABLES[m[2]]() + m[3], path.read_text("utf-8")) for path in PAGES}
    fresh[PUBLISHED] = json.dumps(published(), indent=1) + "\n"
    fresh |= {BOARDS / f"{name}.md": page(board) for name, board in boards().items()}
    stale = [path for path, text in fresh.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        if "--check" in arguments:
            print(f"{path.relative_to(ROOT)} is out of date; run python tools/docs/tables.py")
        else:
            path.write_text(fresh[path], "utf-8")
    return int("--check" in arguments and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
