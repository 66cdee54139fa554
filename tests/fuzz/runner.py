"""Runs cases in worker processes, within limits of time and memory, so that a crash ends no more than a worker.

A worker gets a line of JSON for each case, and answers with one.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from edgekv.errors import EdgeKVError
from edgekv.files import cache_root

from .mutate import KINDS

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SECONDS = 10.0  # for a case
START_SECONDS = 600.0  # kernels may have to be compiled
MEMORY = 2 << 30  # beyond what the process has when it is ready
ANSWER = "\x1fanswer "
Case = tuple[str, int]
SELF_TEST = "EDGEKV_FUZZ_SELF_TEST"  # where it is set, workers have these kinds of case, and no material
NEVER: dict[str, Callable[..., Any]] = {
    "crash": lambda *_: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": lambda *_: time.sleep(60),
    "hunger": lambda *_: bytearray(3 << 30),
    "nothing": lambda *_: None,
}


@dataclasses.dataclass
class Tally:
    """Cases by kind and outcome, seconds by kind, and each failure with its reason."""

    counts: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    seconds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failures: list[tuple[Case, str]] = dataclasses.field(default_factory=list)

    @property
    def n_cases(self) -> int:
        return sum(self.counts.values())

    def add(self, case: Case, outcome: str, took_s: float) -> None:
        self.seconds[case[0]] += took_s
        passed = outcome in ("success", "error")
        self.counts[case[0], outcome if passed else "failure"] += 1
        if not passed:
            self.failures.append((case, outcome))


class Worker:
    """A worker process, started anew after it died or was ended."""

    def __init__(self) -> None:
        self._start()

    def run(self, case: Case) -> str:
        """success, error, or what went wrong."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died after its last answer: `_answer` says so
            self._process.stdin.write(json.dumps(case).encode() + b"\n")
            self._process.stdin.flush()
        answer = self._answer(SECONDS)
        if isinstance(answer, dict):
            return str(answer["outcome"])
        self.close()
        self._start()
        return answer

    def close(self) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._scratch.cleanup()

    def _start(self) -> None:
        self._buffer = b""
        self._scratch = tempfile.TemporaryDirectory(prefix="edgekv-fuzz-", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.runner", self._scratch.name],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if not isinstance(started := self._answer(START_SECONDS), dict):
            self.close()
            raise RuntimeError(f"the worker does not start: {started}")

    def _answer(self, seconds: float) -> dict[str, object] | str:
        assert self._process.stdout is not None
        descriptor, deadline = self._process.stdout.fileno(), time.monotonic() + seconds
        mark = ANSWER.encode()
        while True:
            _, found, after = self._buffer.partition(mark)
            if found and b"\n" in after:
                line, _, self._buffer = after.partition(b"\n")
                answer: dict[str, object] = json.loads(line)
                return answer
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                return f"hang: more than {seconds:g} s"
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                return f"crash: the process ended with {self._process.wait()}"
            self._buffer += piece


def run(cases: Iterable[Case], seconds: float | None = None, worker: Worker | None = None) -> Tally:
    """Runs all cases, or as many as ``seconds`` allow once the worker, by default a new one, is ready."""
    tally, own = Tally(), worker or Worker()
    begun = time.monotonic()
    try:
        for case in cases:
            begin = time.monotonic()
            if seconds is not None and begin - begun > seconds:
                break
            outcome = own.run(case)
            tally.add(case, outcome, time.monotonic() - begin)
    finally:
        if worker is None:
            own.close()
    return tally


# In a worker


def main() -> None:
    scratch = pathlib.Path(sys.argv[1])
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_root() / "kernels"))
    os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
    warnings.simplefilter("ignore")
    made = None
    if SELF_TEST in os.environ:
        KINDS.update(NEVER)
    else:
        from . import model_kinds, use_kinds  # noqa: F401 - takes longer than a case may
        from .material import Material

        made = Material(scratch / "material", "EDGEKV_FUZZ_SECONDS" in os.environ)
        ready()
    taken = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    bound = taken + MEMORY if most == resource.RLIM_INFINITY else min(taken + MEMORY, most)
    resource.setrlimit(resource.RLIMIT_AS, (bound, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    say({"ready": True})
    for line in sys.stdin:
        kind, seed = json.loads(line)
        folder = scratch / "case"
        folder.mkdir()
        try:
            run_case(kind, seed, made, folder)
            outcome = "success"
        except EdgeKVError as error:
            outcome = "error" if "\n" not in str(error) else f"an error of several lines: {str(error)[:500]}"
        except BaseException:
            outcome = traceback.format_exc()
        say({"outcome": outcome})
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(scratch / "cache", ignore_errors=True)


def ready() -> None:
    """Compiles kernels and ends disk writes, so that they take no time of a case."""
    from edgekv.engine import loading

    os.fsync = lambda descriptor: None  # type: ignore[assignment]
    loading.warm_up = lambda *_: 0.0


def run_case(kind: str, seed: int, made: Any, folder: pathlib.Path) -> None:
    """Runs a case in its folder, which is the working folder too."""
    here = pathlib.Path.cwd()
    os.chdir(folder)
    try:
        KINDS[kind](made, folder, Random(f"{kind} {seed}"))
    finally:
        os.chdir(here)


def say(value: object) -> None:
    """Answers on standard output, to which libraries may print too."""
    print(f"\n{ANSWER}{json.dumps(value)}", flush=True)


if __name__ == "__main__":
    main()
