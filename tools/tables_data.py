"""What docs/data holds, by model, text and scheme; bytes of any shape from the caches; Markdown."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from tables_runs import CTX, DATA, DENSE, WINDOWS

from edgekv.checkpoint.shapes import load_shape
from edgekv.kvcache import CacheSpec
from edgekv.models import architecture
from edgekv.models.config import ModelConfig

Facts = dict[str, Any]


@functools.cache
def outcomes(pattern: str) -> list[Facts]:
    """Everything in the files of that name: a list of outcomes, or what one `edgekv eval --json` wrote."""
    found: list[Facts] = []
    for path in sorted(DATA.glob(pattern)):
        content = json.loads(path.read_text())
        found += content if isinstance(content, list) else [content]
    for result in (result for run in found for result in run.get("results", ())):
        result["kv"] = full_name(result["kv"])  # of a version with other knobs
    return found


@functools.cache
def full_name(kv: str) -> str:
    """As results name it: with every knob."""
    return str(CacheSpec.parse(kv))


def evaluations(model: str, text: str, ctx: int = CTX, adapter: str | None = None) -> list[Facts]:
    """Runs of `edgekv eval` with these settings."""
    wanted = {"model": model, "text": text, "ctx": ctx, "adapter": adapter and f"{adapter}.safetensors"}
    wanted["windows"] = WINDOWS[model] * CTX // ctx
    runs = outcomes(f"quality-{model}-*.json") + outcomes(f"tables-{model}.json")
    return [run for run in runs if wanted.items() <= run["settings"].items()]


def source(model: str, text: str, kv: str, ctx: int = CTX, adapter: str | None = None) -> Facts | None:
    """The run that a scheme's figures are from: the first that has it."""
    for run in evaluations(model, text, ctx, adapter):
        if any(result["kv"] == full_name(kv) for result in run["results"]):
            return run
    return None


def quality(model: str, text: str, kv: str, ctx: int = CTX, adapter: str | None = None) -> Facts | None:
    """A scheme's result."""
    run = source(model, text, kv, ctx, adapter)
    return run and next(result for result in run["results"] if result["kv"] == full_name(kv))


def ratio(model: str, text: str, kv: str, ctx: int = CTX, adapter: str | None = None) -> float | None:
    """Perplexity over that of the checkpoint as it was trained, with a dense cache."""
    result, dense = quality(model, text, kv, ctx, adapter), quality(model, text, DENSE, ctx)
    return result["perplexity"] / dense["perplexity"] if result and dense else None


def sources(
    model: str, texts: Iterable[str], kvs: Sequence[str], ctx: int = CTX, adapter: str | None = None
) -> list[Facts]:
    """The runs that these schemes' figures are from."""
    found = [source(model, text, kv, ctx, adapter) for text in texts for kv in kvs]
    return [run for run in found if run]


def commands(runs: Iterable[Facts]) -> list[str]:
    """What made these evaluations, from their settings; those that differ in the text alone in one line."""
    texts: dict[str, list[str]] = {}
    for run in runs:
        texts.setdefault(_command(run), []).append(run["settings"]["text"])
    lines = []
    for command, of_command in texts.items():
        first, *others = dict.fromkeys(of_command)
        lines.append(command.format(first) + (f"    # and --text {', '.join(others)}" if others else ""))
    return lines


def _command(run: Facts) -> str:
    """With a place for the text; threads change nothing but the time."""
    s = run["settings"]
    adapter = f" --adapter {s['adapter']}" if s["adapter"] else ""
    device = f" --device {run['device']}" if run.get("device", "cpu") != "cpu" else ""
    schemes = ",".join(short_name(result["kv"]) for result in run["results"])
    return (
        f"edgekv eval --model {s['model']}{adapter} --weights {s['weights']} --text {{}} --ctx {s['ctx']} "
        f"--windows {s['windows']} --kv {schemes}{device}"
    )


@functools.cache
def short_name(kv: str) -> str:
    """Without knobs that are the scheme's defaults."""
    name, _, knobs = kv.partition(":")
    default = full_name(name).partition(":")[2].split(",")
    own = [knob for knob in knobs.split(",") if knob and knob not in default]
    if kv == full_name(DENSE):
        return DENSE
    return f"{name}:{','.join(own)}" if own else name


@functools.cache
def shape(name: str) -> ModelConfig:
    return architecture(load_shape(name)).config


def cache_bytes(name: str, kv: str, ctx: int = CTX) -> int:
    """Of a shape in models/, as the caches would allocate them."""
    return sum(cache.planned_bytes() for cache in CacheSpec.parse(kv).layers(shape(name), ctx))


def mb(n_bytes: int) -> str:
    """The papers' megabytes: 10^6 bytes."""
    return f"{n_bytes / 1e6:,.1f}"


def times(x: float | None) -> str:
    return "" if x is None else f"x{x:.3f}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def block(lines: Iterable[str]) -> str:
    """Commands, as Markdown shows code."""
    return "".join(f"\n    {line}" for line in lines).lstrip("\n") + "\n"
