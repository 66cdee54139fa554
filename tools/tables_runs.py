"""What tools/tables.py measures, each run a command of the product, and how its results are kept.

A run's outcome is a JSON file in the work folder; `collect` gathers them into docs/data/tables-*.json.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import queue
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from edgekv.checkpoint.tensors import TensorFile
from edgekv.files import atomic_write
from edgekv.session.cuda_device import SCHEMES

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "data"
CTX = 8192

WINDOWS = {"gpt2-60m": 1, "llama-40m": 2, "demo": 2}  # model -> windows of CTX tokens
TEXTS = {"heldout3.txt": "novels", "test.txt": "WikiText-2", "ptb.test.txt": "Penn Treebank"}
ADAPTERS = {
    "gpt2-h1b-paper": ("gpt2-60m", "h1b"),
    "gpt2-h1b-head": ("gpt2-60m", "h1b"),
    "gpt2-h1b-qkv": ("gpt2-60m", "h1b"),
    "gpt2-h1b-learned": ("gpt2-60m", "h1b"),
    "llama-h1b-paper": ("llama-40m", "h1b"),
    "llama-h1b-head": ("llama-40m", "h1b"),
    "llama-h1b-qkv": ("llama-40m", "h1b"),
    "llama-h1b-learned": ("llama-40m", "h1b"),
    "llama-onebit-head": ("llama-40m", "onebit"),
}

DENSE = "dense:dtype=f16"
TABLE1 = (DENSE, "int4", "kivi2", "sign_keys", "h1b", "h1b:fit=head", "onebit", "onebit:v_bits=1")
AT_ONCE = (*TABLE1, "bitplane:threshold=0.00025")  # in one run, when `bitplane` scanned all keys
TWO_STAGES = ("bitplane", "bitplane:threshold=0.0002")  # since
OTHERS = ("dense:dtype=q8", "kivi2:bits=4", "kvcomp", "onebit:v_bits=4", "fier", "quest")
DROPPING = ("h2o", "snapkv", "tova", "streaming", "mikv")  # on a CPU only
ABLATION = ("h1b:tau=1", "h1b:sketch_bits=512", "h1b:sketch_bits=128", "h1b:sketch_bits=64")
LENGTHS = (1024, 2048, 4096, 8192)
BY_LENGTH = (DENSE, "fier:k=256", "quest:k=256", "fier:k=1024", "quest:k=1024", "onebit")

TASKS = ("pass-key", "four-codes")
KEEPING = (DENSE, "int4", "kivi2", "mikv", "kvcomp", "sign_keys", "h1b", "h1b:fit=head")
KEEPING += ("onebit", "onebit:v_bits=1", "bitplane")
AT_AN_EIGHTH = ("h2o", "tova", "streaming", "snapkv")  # 1,024 tokens, their default
BUDGETS = (32, 64, 128, 256, 512)
BUDGETED = {
    "H2O": "h2o:budget={}",
    "StreamingLLM": "streaming:budget={}",
    "TOVA": "tova:budget={}",
    "SnapKV": "snapkv:budget={},observe=16,interval=16",
    "Quest": "quest:k={}",
    "Fier": "fier:k={}",
    "Quest, no layer exempt": "quest:k={},skip=0",
    "Fier, no layer exempt": "fier:k={},skip=0",
}
PROMPTS = 10  # of a task and a run: one at each depth
SEEDS = (1, 2)


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the reader keeps models, texts and adapters, and what evaluations run on where it can."""

    models: pathlib.Path
    texts: pathlib.Path
    adapters: pathlib.Path
    device: str = "cpu"

    def model(self, name: str) -> pathlib.Path:
        return ROOT / "models" / "demo" if name == "demo" else self.models / name


@dataclasses.dataclass(frozen=True)
class Eval:
    """Schemes on a text: `edgekv eval`."""

    model: str
    text: str
    kv: tuple[str, ...]
    ctx: int = CTX
    windows: int = 1
    adapter: str | None = None

    @property
    def name(self) -> str:
        first = self.kv[0] if self.adapter is None else self.adapter
        return slug("eval", self.model, self.text, self.ctx, first, len(self.kv))

    @property
    def file(self) -> str:
        return f"tables-{self.model}.json"

    def command(self, places: Places, threads: int, out: pathlib.Path) -> list[str]:
        device = ["--device", places.device] if self.device(places) != "cpu" else []
        adapter = ["--adapter", str(places.adapters / f"{self.adapter}.safetensors")] if self.adapter else []
        return [
            *("edgekv", "eval", "--model", str(places.model(self.model)), *adapter),
            *("--weights", "f32", "--text", str(places.texts / self.text), "--ctx", str(self.ctx)),
            *("--windows", str(self.windows), "--kv", ",".join(self.kv), "--threads", str(threads)),
            *("--json", str(out), *device),
        ]

    def device(self, places: Places) -> str:
        """The one that is asked for, unless it lacks one of the schemes."""
        lacking = places.device == "cuda" and {kv.partition(":")[0] for kv in self.kv} - set(SCHEMES)
        return "cpu" if lacking else places.device

    def outcome(self, stdout: str, out: pathlib.Path, places: Places) -> dict[str, Any]:
        """What the command wrote, and where it was computed."""
        return json.loads(out.read_text()) | {"device": self.device(places)}


@dataclasses.dataclass(frozen=True)
class Needles:
    """Retrieval by the demo model: tools/needles.py."""

    kv: str
    task: str
    seed: int
    n: int = PROMPTS

    @property
    def name(self) -> str:
        return slug("needles", self.kv, self.task, self.n, self.seed)

    @property
    def file(self) -> str:
        return "tables-needles.json"

    def command(self, places: Places, threads: int, out: pathlib.Path) -> list[str]:
        return [
            *("python", "tools/needles.py", "--model", str(places.model("demo"))),
            *("--text", str(places.texts / "heldout3.txt"), "--kv", self.kv, "--task", self.task),
            *("--length", str(CTX), "-n", str(self.n), "--seed", str(self.seed)),
        ]

    def outcome(self, stdout: str, out: pathlib.Path, places: Places) -> dict[str, Any]:
        """Right answers by depth, from what the command prints."""
        depths = {int(d): int(share) for d, share in re.findall(r"depth (\d+)%: (\d+)%", stdout)}
        (right, of) = re.findall(r"(\d+) of (\d+) right", stdout)[-1]
        if int(of) != self.n or not depths:
            raise ValueError(f"unexpected output:\n{stdout}")
        per_depth = self.n // len(depths)
        by_depth = {str(depth): round(share * per_depth / 100) for depth, share in depths.items()}
        if sum(by_depth.values()) != int(right):
            raise ValueError(f"the depths do not add up to {right}:\n{stdout}")
        return dataclasses.asdict(self) | {"length": CTX, "right": int(right), "right_by_depth": by_depth}


Run = Eval | Needles
PROGRAMS = {"edgekv": [sys.executable, "-m", "edgekv"], "python": [sys.executable]}  # of this environment


def slug(*parts: object) -> str:
    return "-".join(re.sub(r"[^\w.=]+", "_", str(part)) for part in parts)


def evals() -> Iterator[Eval]:
    """Table I, II and V, adapters, Fig. 5. `llama-40m` and `gpt2-60m` have Table I's schemes in quality-*.json.

    So have all models `bitplane` on the first two texts.
    """
    for model, windows in WINDOWS.items():
        for text in ("heldout3.txt", "test.txt"):
            if model == "demo":
                yield Eval(model, text, AT_ONCE, CTX, windows)
                yield Eval(model, text, OTHERS, CTX, windows)
                yield Eval(model, text, DROPPING, CTX, windows)
            yield Eval(model, text, ABLATION, CTX, windows)
        yield Eval(model, "ptb.test.txt", AT_ONCE, CTX, windows)
        yield Eval(model, "ptb.test.txt", ("bitplane",), CTX, windows)
        yield Eval(model, "ptb.test.txt", ("h2o",), CTX, windows)
        for ctx in LENGTHS:
            yield Eval(model, "heldout3.txt", BY_LENGTH, ctx, windows * CTX // ctx)
    for adapter, (model, scheme) in ADAPTERS.items():
        if adapter.endswith("-learned"):
            yield Eval(model, "heldout3.txt", (scheme,), CTX, WINDOWS[model], adapter)
            continue
        of_paper = (DENSE, "h1b", "h1b:keys_only=true", *ABLATION)
        for text in TEXTS:
            kv = of_paper if adapter.endswith("-paper") and text != "ptb.test.txt" else (DENSE, scheme)
            yield Eval(model, text, kv, CTX, WINDOWS[model], adapter)


def needles() -> Iterator[Needles]:
    """Every scheme that keeps all tokens, and budgets of those that do not; round after round."""
    for seed in SEEDS:
        for task in TASKS:
            for name, pattern in BUDGETED.items():
                if task == "pass-key" or "exempt" not in name:
                    yield from (Needles(pattern.format(budget), task, seed) for budget in BUDGETS)
            yield from (Needles(kv, task, seed) for kv in (*KEEPING, *AT_AN_EIGHTH))


class CommandRunner:
    """Runs commands side by side, each on cores of its own, until they are done or time is up."""

    def __init__(self, places: Places, work: pathlib.Path, jobs: int, seconds: float) -> None:
        self.places, self.work = places, work
        self.deadline = time.monotonic() + seconds
        cores = sorted(os.sched_getaffinity(0))
        self.threads = max(1, len(cores) // jobs)
        self.cores: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        for i in range(jobs):
            self.cores.put([cores[(i * self.threads + k) % len(cores)] for k in range(self.threads)])
        self.pool = concurrent.futures.ThreadPoolExecutor(jobs, initializer=self._settle)

    def _settle(self) -> None:
        """A worker thread's programs inherit its cores."""
        os.sched_setaffinity(0, self.cores.get())

    def run(self, runs: Sequence[Run]) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        for line in self.pool.map(self._line, runs):
            print(line, flush=True)

    def _line(self, run: Run) -> str:
        """What came of it; its outcome is in the work folder, whole or not at all."""
        final, out = self.work / f"{run.name}.json", self.work / f"{run.name}.partial"
        if final.exists():
            return f"{run.name}: there already"
        begin = time.monotonic()
        if begin >= self.deadline:
            return f"{run.name}: no time left"
        program, *arguments = run.command(self.places, self.threads, out)
        try:
            done = subprocess.run(
                [*PROGRAMS[program], *arguments],
                capture_output=True,
                text=True,
                timeout=self.deadline - begin if self.deadline < math.inf else None,
                cwd=ROOT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{run.name}: no time left"
        if done.returncode:
            return f"{run.name}: exit {done.returncode}: {done.stderr[-500:]}"
        try:
            atomic_write(final, json.dumps(run.outcome(done.stdout, out, self.places)).encode())
        except ValueError as error:
            return f"{run.name}: {error}"
        out.unlink(missing_ok=True)
        return f"{run.name}: {time.monotonic() - begin:.0f} s"


def collect(places: Places, work: pathlib.Path) -> None:
    """The outcomes in ``work`` into docs/data: a file per model, one for retrieval, one for the adapters."""
    found: dict[str, list[Any]] = {}
    for run in (*evals(), *needles()):
        path = work / f"{run.name}.json"
        if path.exists():
            found.setdefault(run.file, []).append(brief(json.loads(path.read_text())))
    adapters = [places.adapters / f"{name}.safetensors" for name in ADAPTERS]
    found["tables-adapters.json"] = [provenance(path) for path in adapters if path.exists()]
    for name, outcomes in found.items():
        (DATA / name).write_text("[\n" + ",\n".join(map(json.dumps, outcomes)) + "\n]\n")


def brief(facts: dict[str, Any]) -> dict[str, Any]:
    """Without what says nothing about the figures."""
    if "machine" in facts:
        facts["machine"] = {name: facts["machine"][name] for name in ("cpu", "architecture", "versions")}
    return facts


def provenance(path: pathlib.Path) -> dict[str, Any]:
    """How an adapter came to be: what tools/adapt.py wrote into it."""
    facts: dict[str, Any] = {"name": path.stem}
    for key, value in TensorFile(path).metadata.items():
        facts[key] = json.loads(value) if value[:1] in "[{" else value
    return facts
