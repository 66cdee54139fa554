"""Captions of the scenes model through edgekv, with pictures in the KV cache at 16 bits to 1: docs/visual.md.

    python tools/visual_eval.py --run captions.json                  every row of every table, in processes
    python tools/visual_eval.py --score captions.json                docs/data/visual-*.json from these captions
    python tools/visual_page.py                                      docs/visual.md's tables from the JSON

`--run` needs `.[vision]`, `--score` `.[visual-eval]`. Every row captions the same fresh scenes, of 1 to 10 things
in turn, greedily; prompts with several pictures ask about one of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image
from visual_captions import describe, pictures
from visual_metrics import measures
from visual_scenes import MAX_THINGS, Scene, draw_scene, render
from visual_schemes import spec

from edgekv import Session
from edgekv.files import atomic_write
from edgekv.kvcache import CacheSpec
from edgekv.machine import machine_info

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "data"
SEED, MAX_ANSWER, TEXT = 20, 160, 200  # tokens of an answer at most; of all text around the pictures
CHUNK = 20  # scenes that a process takes at a time

DENSE, ONE_BIT = "dense:dtype=f16", "visual1:group=head,quantile=0.1"
PER_TOKEN = "visual1:group=head+token,quantile=0.1"
DROPPING = ("h2o", "streaming")  # with as many tokens as fit into the bytes of ONE_BIT
OURS = "visual=planes:k_bits=1,v_bits=1"
CHANNEL = "visual1:group=channel,quantile=0"
CALIBRATED = f"{CHANNEL},k_range=0.5,v_range=0.3"
EQUAL_BYTES = [
    *(ONE_BIT, CALIBRATED, OURS, PER_TOKEN),
    *(
        "visual=planes:k_bits=1,v_bits=2",
        "visual1:bits=2,quantile=0.05",
        "visual1:bits=2,group=head+token,quantile=0.05",
    ),
    *("visual1:bits=4,quantile=0", "coded:h1b", "coded:bitplane"),
]
COMPARED = (DENSE, ONE_BIT, PER_TOKEN, OURS, *DROPPING)


@dataclasses.dataclass(frozen=True)
class Row:
    kv: str  # as visual_schemes.spec reads it
    pictures: int = 1


PLAIN = "group=tensor,quantile=0"
QUANTILES = (0, 0.02, 0.05, 0.1, 0.2)
RANGES = [(1, 1), (0.7, 0.3), (0.5, 0.3), (0.35, 0.3)]
PULLS = (0.5, 1)
TABLES: dict[str, list[Row]] = {
    "bits": [
        Row(DENSE),
        *(
            Row(kv)
            for bits in (8, 4, 3, 2, 1)
            for kv in (f"visual1:bits={bits},{PLAIN}", f"split:{bits},8", f"split:8,{bits}")
        ),
    ],
    "one-bit": [
        *(
            Row(f"visual1:group={group},quantile={q}")
            for group in ("tensor", "head", "head+token")
            for q in QUANTILES
        ),
        *(Row(f"floored:{quantile}") for quantile in QUANTILES),
    ],
    "calibrated": [
        Row(DENSE),
        *(Row(f"{CHANNEL},k_range={k},v_range={v}") for k, v in RANGES),
        *(Row(f"{CALIBRATED},pull={pull}") for pull in PULLS),
    ],
    "captions": [Row(DENSE), *(Row(kv) for kv in EQUAL_BYTES)],
    "pictures": [Row(kv, n) for n in (1, 2, 4) for kv in COMPARED],
    "objects": [Row(kv, n) for n in (1, 4) for kv in COMPARED],
}


@dataclasses.dataclass(frozen=True)
class Sample:
    """Scene ``i`` of a row: what the pictures of the prompt show, and which of them is asked about."""

    scenes: list[Scene]
    asked: int
    images: list[Image.Image]

    @classmethod
    def draw(cls, i: int, n_pictures: int) -> Sample:
        rng, asked = np.random.default_rng([SEED, n_pictures, i]), i // MAX_THINGS % n_pictures
        scenes = [draw_scene(rng, 1 + i % MAX_THINGS if j == asked else None) for j in range(n_pictures)]
        return cls(scenes, asked, [Image.fromarray(render(scene, rng)) for scene in scenes])

    @property
    def prompt(self) -> str:
        return pictures(len(self.scenes)) + describe(self.asked if len(self.scenes) > 1 else None)


def context(n_pictures: int) -> int:
    return 256 * n_pictures + TEXT


@functools.cache
def base_session(model: str) -> Session:
    """The weights that a process's sessions share."""
    return Session.load(model, kv=DENSE, ctx=context(4), threads=1)


def row_spec(row: Row, base: Session) -> CacheSpec:
    """The row's scheme; for one that drops tokens, with the largest budget within the bytes of ONE_BIT."""
    if row.kv not in DROPPING:
        return spec(row.kv)
    full = base.fork(kv=spec(ONE_BIT), ctx=context(row.pictures))
    sample = Sample.draw(0, row.pictures)
    full.prefill(sample.prompt, sample.images)
    room = full.state.nbytes
    for budget in range(context(row.pictures), 1, -1):
        dropping = spec(f"{row.kv}:budget={budget}")
        if sum(cache.planned_bytes() for cache in dropping.layers(base.config, context(row.pictures))) <= room:
            return dropping
    raise ValueError(f"no budget of {row.kv} fits into {room} bytes")


def caption(model: str, row: Row, first: int, last: int) -> dict[str, Any]:
    """Captions of scenes first..last of a row, and what its cache takes."""
    base = base_session(model)
    session = base.fork(kv=row_spec(row, base), ctx=context(row.pictures))
    written = []
    for i in range(first, last):
        sample = Sample.draw(i, row.pictures)
        session.reset()
        steps = session.generate(sample.prompt, images=sample.images, max_new_tokens=MAX_ANSWER)
        written.append("".join(step.text for step in steps))
    report = session.report()
    visual = report.visual_cache_bytes
    if visual is None:  # the scheme keeps all tokens alike: the pictures' share
        visual = round(report.cache_bytes * 256 * row.pictures / context(row.pictures))
    return {"captions": written, "scheme": str(session.plan.kv), "bytes": report.cache_bytes, "visual": visual}


def run(model: str, rows: Sequence[Row], n_scenes: int, jobs: int) -> dict[str, Any]:
    """Captions of every row, by ``jobs`` processes."""
    tasks = [(model, row, a, min(a + CHUNK, n_scenes)) for row in rows for a in range(0, n_scenes, CHUNK)]
    tasks.sort(key=lambda task: -task[1].pictures)
    results: dict[Row, dict[int, dict[str, Any]]] = {row: {} for row in rows}
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        pending = [(task, pool.apply_async(caption, task)) for task in tasks]
        for (_, row, first, _), result in pending:
            results[row][first] = result.get()
    machine = machine_info()
    return {
        "scenes": n_scenes,
        "rows": [
            dataclasses.asdict(row)
            | parts[0]
            | {"machine": {name: machine[name] for name in ("cpu", "architecture", "cores", "versions")}}
            | {"captions": [text for first in sorted(parts) for text in parts[first]["captions"]]}
            for row, parts in results.items()
        ],
    }


def scored(
    done: dict[str, Any], tables: Sequence[str], before: Sequence[dict[str, Any]] = ()
) -> dict[str, dict[str, Any]]:
    """For each of ``tables`` what docs/data holds: the settings, and every row's measures.

    ``same``: how many captions are those of DENSE, word for word. before: rows scored earlier, for those that
    these captions lack.
    """
    asked = {
        n: [sample.scenes[sample.asked] for i in range(done["scenes"]) if (sample := Sample.draw(i, n))]
        for n in {row["pictures"] for row in done["rows"]}
    }
    exact = {row["pictures"]: row["captions"] for row in done["rows"] if row["kv"] == DENSE}
    results = {Row(row["kv"], row["pictures"]): row for row in before}
    for row in done["rows"]:
        facts = {name: value for name, value in row.items() if name != "captions"}
        facts["same"] = sum(a == b for a, b in zip(row["captions"], exact[row["pictures"]], strict=True))
        results[Row(row["kv"], row["pictures"])] = facts | measures(row["captions"], asked[row["pictures"]])
    settings = {"model": "models/scenes", "scenes": done["scenes"]}
    return {name: {"settings": settings, "results": [results[row] for row in TABLES[name]]} for name in tables}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "models" / "scenes"))
    parser.add_argument("--run", type=pathlib.Path, metavar="FILE", help="write captions to FILE")
    parser.add_argument(
        "--score",
        type=pathlib.Path,
        metavar="FILE",
        help="write docs/data/visual-*.json from FILE, rows that it lacks as they were",
    )
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), help="which tables")
    parser.add_argument("--scenes", type=int, default=100, help="scenes of each row")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    args = parser.parse_args()
    if args.run:
        rows = list(dict.fromkeys(row for name in args.tables for row in TABLES[name]))
        atomic_write(args.run, json.dumps(run(args.model, rows, args.scenes, args.jobs)).encode())
    if args.score:
        done = json.loads(args.score.read_text())
        files = [path for path in (DATA / f"visual-{name}.json" for name in TABLES) if path.exists()]
        stored = [json.loads(path.read_text()) for path in files]
        alike = [facts for facts in stored if facts["settings"]["scenes"] == done["scenes"]]
        before = [row for facts in alike for row in facts["results"]]
        for name, facts in scored(done, args.tables, before).items():
            atomic_write(DATA / f"visual-{name}.json", (json.dumps(facts, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
