"""The tables of KV schemes of the README and the site, from the registry and docs/data."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Collection
from typing import Any

from edgekv import CACHES, CacheSpec
from edgekv.errors import CacheError
from edgekv.kvcache import scheme_facts
from edgekv.kvcache.geometry import Geometry
from edgekv.quality.figures import figures

DATA = pathlib.Path(__file__).resolve().parent.parent / "docs" / "data"
MODELS = ("llama-40m", "gpt2-60m")
TEXT, TOKENS = "heldout3", 8192
WHEN = {
    "dense": "there is memory enough; the reference",
    "planes:by_need=true": "first choice: a sixth of f16's bytes",
    "planes:k_bits=3,v_bits=3,by_need=true": "nothing may show",
    "planes:k_bits=1.5,v_bits=1.5": "the context must go further",
    "planes": "a model has no tokenizer to measure what its heads need",
    "planes:v_bits=1": "likewise, and the context must go further",
    "onebit": "every microsecond counts, and the gate passes it",
    "bitplane": "the cache outgrows the processor's caches by far: it reads a fifth of its bytes",
    "kivi2": "keys have large biases or outlier channels",
    "steps": "a bound on the bytes matters more than which bits: `--kv-budget`",
    "visual=planes": "a prompt is mostly pictures",
    "visual1": "comparing, on pictures",
    "int4": "comparing; large key biases break it",
    "kvcomp": "comparing; the fewest bytes at its KL, the slowest to read",
    "h1b": "comparing, or with an adapter",
    "sign_keys": "comparing, or with an adapter",
    "mikv": "comparing",
    "streaming": "only the latest tokens matter",
    "h2o": "comparing; what is evicted can't be asked for",
    "snapkv": "one question about a long prompt, and no second one",
    "tova": "comparing; what is evicted can't be asked for",
    "fier": "comparing; saves time and no memory",
    "quest": "comparing; saves time and no memory",
}
"""What to take a scheme for; the first ones are ours or usual, in the order in which to try them."""
BEST = (
    "dense",
    "planes:k_bits=3,v_bits=3,by_need=true",
    "kivi2",
    "planes:by_need=true",
    "planes:k_bits=1.5,v_bits=1.5",
    "onebit",
)


def size(kv: str) -> float | None:
    """Bytes per token and KV head of 128 channels at 8,192 tokens; None for a scheme that keeps to a budget."""
    spec = CacheSpec.parse(kv)
    if spec.own_budget is not None:
        return None
    n = 4  # heads, which may have bits of their own
    cache = spec.scheme(Geometry(n_heads=n, n_kv_heads=n, head_dim=128, capacity=TOKENS), spec.knobs)
    return cache.planned_bytes() / n / TOKENS


def measured(model: str) -> dict[str, dict[str, Any]]:
    """What `edgekv eval` found on held-out novels, by scheme as it is written today."""
    runs = [json.loads(path.read_text()) for path in sorted(DATA.glob(f"quality-{model}-{TEXT}*.json"))]
    return {_present(row["kv"]): row for run in runs for row in run["results"]}


def _present(kv: str) -> str:
    """With all knobs that are asked for; as it stands where its knobs are no more."""
    try:
        spec = CacheSpec.parse(kv)
    except CacheError:
        return kv
    found: dict[str, Any] = dict.fromkeys(getattr(spec.knobs, "found", ()), "")  # what was given out to heads
    return str(CacheSpec(spec.scheme, dataclasses.replace(spec.knobs, **found)))


def schemes_table() -> str:
    """A row per scheme, and what each of them keeps and gives up."""
    rows = _rows(WHEN)
    rows += ["", "| `--kv` | what is kept | from | gives up |", "|---|---|---|---|"]
    for name in CACHES:
        facts = scheme_facts(name)
        rows.append(f"| `{name}` | {facts['summary']} | {facts['paper']} | {facts['gives_up']} |")
    return "\n".join(rows) + "\n"


def short_table() -> str:
    """Those of BEST."""
    return "\n".join(_rows(BEST)) + "\n"


def _rows(kvs: Collection[str]) -> list[str]:
    quality, speed = [measured(model) for model in MODELS], figures(list(kvs))
    rows = [
        f"| `--kv` | bytes | {' | '.join(f'KL, {model}' for model in MODELS)} | speed | take it when |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for kv in kvs:
        spec, each, attention = str(CacheSpec.parse(kv)), size(kv), speed[kv].attention
        cells = [f"`{kv}`", "as given" if each is None else f"{each:.1f}"]
        cells += [f"{found[spec]['kl']:.4f}" if spec in found else "-" for found in quality]
        cells += [f"{attention:.1f}x" if attention else "-", WHEN[kv]]
        rows.append(f"| {' | '.join(cells)} |")
    return rows
