"""What was measured of the KV schemes, from the files of docs/data: what `edgekv caches` shows."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from edgekv.checkpoint.shipped import CHECKOUT, INSTALLED
from edgekv.errors import CacheError
from edgekv.files import read_object
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.choice import DEFAULT

FOLDERS = (CHECKOUT.parent / "docs" / "data", INSTALLED.parent / "docs" / "data")
QUALITY = ("quality-llama-40m-heldout3*.json", "llama-40m, 8,192 tokens of heldout3")
SPEED = ("bench-llama2-7b*.json", "layers of Llama 2 7B at 8,192 tokens, x86-64")
GATE = "gate-demo.json"


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one scheme with its default knobs; None: not measured.

    kl: mean KL divergence from dense in f32 (QUALITY says on what), nats. attention: how many times as fast as
    dense's one layer's attention is (SPEED).
    """

    kl: float | None = None
    attention: float | None = None


def figures(names: list[str]) -> dict[str, Figures]:
    """By scheme."""
    kl = _by_spec(QUALITY[0], "results", "kl")
    ms = _by_spec(SPEED[0], "timings", "attention_ms_layer")
    exact = ms.get(str(CacheSpec.parse(DEFAULT)))
    found = {}
    for name in names:
        spec = str(CacheSpec.parse(name))
        ratio = exact / ms[spec] if exact and ms.get(spec) else None
        found[name] = Figures(kl.get(spec), ratio)
    return found


def recommended() -> str | None:
    """The scheme that the gate recommends for the demo model: the smallest that passed."""
    for content in _contents(GATE):
        kv = content.get("recommended")
        if isinstance(kv, str):
            return kv
    return None


def _by_spec(pattern: str, rows: str, field: str) -> dict[str, float]:
    """A field of every row in the files, by the scheme with all its knobs; of several depths the 8,192's."""
    found = {}
    for content in _contents(pattern):
        for row in content.get(rows, ()):
            if row.get("depth", 8192) == 8192:
                found[_present(row["kv"])] = float(row[field])
    return found


def _present(kv: str) -> str:
    """A scheme as it is written today; as it stands where that is no longer possible."""
    try:
        return str(CacheSpec.parse(kv))
    except CacheError:
        return kv


def _contents(pattern: str) -> Iterator[dict[str, Any]]:
    folder = next((folder for folder in FOLDERS if folder.is_dir()), None)
    for path in sorted(folder.glob(pattern)) if folder else ():
        content = _read(path)
        if content is not None:
            yield content


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        return read_object(path)
    except ValueError:
        return None
