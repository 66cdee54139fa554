"""How many of the truly most attended tokens cheap scores of the keys find, on a model's own queries and keys.

    python tools/recall.py --model models/demo --text book.txt --json recall.json

prints a row per scheme: the bytes that it reads to score a token, as a share of the f16 key's (load); for a choice
of 64, 128 and 256 tokens per query head the share of the 64 tokens of highest score that is among them (recall);
and the share of the attention that the 256 hold (mass). Queries are taken from the later half of the text, every
256 tokens, so that no scheme has tokens outside of whole groups or pages; all layers and heads count alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from edgekv.kernels import Kernels
from edgekv.kernels.aligned import zeros
from edgekv.kvcache.codec_planes import CentredPlanes
from edgekv.kvcache.codecs import F16, Codec
from edgekv.kvcache.dense import Dense
from edgekv.kvcache.geometry import Geometry
from edgekv.kvcache.onebit import OneBit
from edgekv.kvcache.papers.fier import SignIndex
from edgekv.kvcache.papers.quest import PageIndex
from edgekv.kvcache.papers.retrieval import Index
from edgekv.kvcache.planes import KEY_SCALES
from edgekv.machine import machine_info
from edgekv.session.devices import find_device
from edgekv.session.model import Model
from edgekv.session.plan import SessionPlan
from edgekv.tokenizer import load_tokenizer
from edgekv.types import F32

TOP = 64  # tokens to find
CHOICES = (64, 128, 256)  # tokens chosen
STRIDE = 256  # tokens between queries: a multiple of every group and page

Shape = tuple[int, int, int]  # KV heads, tokens, channels


@dataclasses.dataclass
class Scorer:
    """Scores of tokens, or of pages of ``unit`` tokens, and the bytes read per token as a share of f16 keys."""

    unit: int
    load: float
    scores: Callable[[F32, int, F32], None]  # (queries, tokens, result)


def by_index(index: Index, keys: Any, kernels: Kernels) -> Scorer:
    """A summary of the keys as `fier` and `quest` keep it."""
    index.bind({name: zeros(*spec) for name, spec in index.layout().items()}, kernels)
    index.encode(keys, 0, index.n_blocks)
    load = index.block_bytes / (index.block * index.n_kv_heads * index.head_dim * 2)
    return Scorer(index.unit, load, lambda q, n, s: kernels.scores(index, q, 0, n // index.unit, s))


def by_codec(codec: Codec, keys: Any, kernels: Kernels) -> Scorer:
    """Keys as a codec stores them."""
    codec.bind({name: zeros(*spec) for name, spec in codec.layout().items()}, kernels)
    codec.encode(keys.view(np.float16).astype(np.float32), 0)
    load = codec.token_bytes / (codec.n_kv_heads * codec.head_dim * 2)
    return Scorer(1, load, lambda q, n, s: kernels.scores(codec, q, 0, n, s))


def newest_first(q: F32, n: int, s: F32) -> None:
    s[:] = np.arange(n)


def scorers(shape: Shape, keys: Any, kernels: Kernels) -> dict[str, Scorer]:
    """What is compared, on one layer's keys (float16 bits)."""
    fier = {
        f"fier g={group}{'' if levels == 'mad' else ' ' + levels}": SignIndex(*shape, group, levels)
        for levels in ("mad", "minmax")
        for group in (32, 128, 256)
    }
    quest = {f"quest p={page}": PageIndex(*shape, page) for page in (8, 16, 32)}
    indexes = {name: by_index(index, keys, kernels) for name, index in (fier | quest).items()}
    knobs = OneBit.Knobs()
    signs = CentredPlanes(*shape, bits=1, key_scale=KEY_SCALES[1], seed=knobs.seed)
    scan = {"onebit, bitplane": by_codec(signs, keys, kernels)}
    return indexes | scan | {"newest tokens": Scorer(1, 0.0, newest_first)}


class Tally:
    """Recall and mass of every scheme, one entry per layer, query and head."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.load: dict[str, float] = {}
        self.recall: dict[str, list[F32]] = {}  # name -> per layer (positions, heads, choices)
        self.mass: dict[str, list[F32]] = {}

    def layer(self, geometry: Geometry, queries: F32, keys: F32) -> None:
        shape = geometry.n_kv_heads, keys.shape[1], geometry.head_dim
        exact = F16(*shape)
        exact.bind({name: zeros(*spec) for name, spec in exact.layout().items()}, self.kernels)
        exact.encode(keys, 0)
        schemes = scorers(shape, exact.arrays["half"], self.kernels)
        schemes["exact"] = Scorer(1, 1.0, lambda q, n, s: self.kernels.scores(exact, q, 0, n, s))
        found = {name: [] for name in schemes}
        for n in range(keys.shape[1] // 2, keys.shape[1] + 1, STRIDE):
            q = np.ascontiguousarray(queries[:, n - 1]).reshape(geometry.n_kv_heads, geometry.n_rep, -1)
            truth = np.empty((*q.shape[:2], n), np.float32)
            self.kernels.scores(exact, q, 0, n, truth)
            for name, scorer in schemes.items():
                s = np.empty((*q.shape[:2], n // scorer.unit), np.float32)
                scorer.scores(q, n, s)
                found[name].append(compare(truth, s, scorer.unit))
        for name, rows in found.items():
            self.load[name] = schemes[name].load
            self.recall.setdefault(name, []).append(np.array([recall for recall, _ in rows]))
            self.mass.setdefault(name, []).append(np.array([mass for _, mass in rows]))

    def results(self) -> list[dict[str, Any]]:
        def means(layers: list[F32]) -> dict[int, float]:
            return dict(zip(CHOICES, np.mean(layers, (0, 1, 2)).tolist(), strict=True))

        return [
            {
                "scheme": name,
                "load": load,
                "recall": means(self.recall[name]),
                "mass": means(self.mass[name]),
                "recall_by_layer": [means([layer]) for layer in self.recall[name]],
            }
            for name, load in self.load.items()
        ]


def compare(truth: F32, s: F32, unit: int) -> tuple[F32, F32]:
    """(heads, choices) each: recall of the TOP by `truth`, and attention held, by the best of s (heads, units)."""
    truth, s = truth.reshape(-1, truth.shape[-1]), s.reshape(-1, s.shape[-1])
    top = np.argpartition(-truth, TOP, axis=1)[:, :TOP]
    weights = np.exp(truth - truth.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    recall, mass = np.empty((2, len(truth), len(CHOICES)), np.float32)
    for i, k in enumerate(CHOICES):
        chosen = np.zeros(s.shape, bool)
        np.put_along_axis(chosen, np.argpartition(-s, k // unit, axis=1)[:, : k // unit], True, axis=1)
        chosen = np.repeat(chosen, unit, axis=1)
        recall[:, i] = np.take_along_axis(chosen, top, axis=1).mean(1)
        mass[:, i] = (weights * chosen).sum(1)
    return recall, mass


class Probe(Dense):
    """A dense layer that hands over its prompt's queries and keys."""

    measure: Callable[[Geometry, F32, F32], None]

    def prefill(self, queries: F32, keys: F32, values: F32) -> None:
        self.measure(self.geometry, queries, keys)
        super().prefill(queries, keys, values)


def run(model: Model, text: str, ctx: int | None) -> tuple[list[dict[str, Any]], int]:
    """The results, and the tokens they were measured on."""
    plan = SessionPlan.make(model, kv="dense", ctx=ctx, weights="f32")
    tokens = load_tokenizer(model.tokenizer_path, config=model.raw_config).encode(text)
    n = min(len(tokens), plan.ctx) // (2 * STRIDE) * 2 * STRIDE
    if not n:
        raise SystemExit(f"the text has {len(tokens)} tokens: it must have {2 * STRIDE} or more")
    c = model.config
    decoder = find_device("cpu").decoder(model, model.weight_format("f32"), n, 2, None)
    tally = Tally(decoder.kernels)
    caches = []
    for i in range(c.n_layers):
        probe = Probe(Geometry(c.n_heads, c.n_kv_heads, c.head_dim, n, i, c.n_layers), Dense.Knobs())
        probe.measure = tally.layer
        probe.allocate(decoder.kernels, decoder.workspace)
        caches.append(probe)
    decoder.prefill(decoder.embed(np.asarray(tokens[:n]), 0), caches)
    return tally.results(), n


def table(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    head = ["scheme", "load", *(f"recall, {k} chosen" for k in CHOICES), f"mass, {CHOICES[-1]} chosen"]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for r in results:
        numbers = [*(r["recall"][k] for k in CHOICES), r["mass"][CHOICES[-1]]]
        lines.append(" | ".join([r["scheme"], f"{r['load']:.3f}", *(f"{x:.3f}" for x in numbers)]))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder with its tokenizer")
    parser.add_argument("--text", required=True, help="UTF-8 text")
    parser.add_argument("--ctx", type=int, help="tokens of it (default 8192 or the model's)")
    parser.add_argument("--json", help="write the results, with recall by layer")
    arguments = parser.parse_args()
    model = Model.open(arguments.model)
    results, n = run(model, pathlib.Path(arguments.text).read_text(encoding="utf-8"), arguments.ctx)
    print(table(results))
    if arguments.json:
        settings = {"model": model.path.name, "text": pathlib.Path(arguments.text).name, "tokens": n, "top": TOP}
        machine = {name: machine_info()[name] for name in ("cpu", "architecture", "cores", "versions")}
        facts = {"results": results, "settings": settings, "machine": machine}
        pathlib.Path(arguments.json).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
