"""Runs cases in worker processes, within limits of time; what fails is written down with what reproduces it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable

from .worker import ANSWER

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SECONDS = 10.0  # for a case
START_SECONDS = 600.0  # kernels may have to be compiled
Case = tuple[str, int]


@dataclasses.dataclass
class Tally:
    """Cases by kind and outcome, seconds by kind, and what failed: the case and why."""

    counts: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    seconds: collections.defaultdict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
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
    """One process; started anew after it died or was ended."""

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
            [sys.executable, "-m", "tests.fuzz.worker", self._scratch.name],
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


def run(
    cases: Iterable[Case],
    seconds: float | None = None,
    told: Callable[[Case, str, float], None] = lambda case, outcome, took_s: None,
    worker: Worker | None = None,
) -> Tally:
    """All cases, or as many as ``seconds`` allow once the worker, an own one by default, is ready.

    told: is told each case, its outcome and its seconds.
    """
    tally, own = Tally(), worker or Worker()
    begun = time.monotonic()
    try:
        for case in cases:
            begin = time.monotonic()
            if seconds is not None and begin - begun > seconds:
                break
            outcome = own.run(case)
            took_s = time.monotonic() - begin
            tally.add(case, outcome, took_s)
            told(case, outcome, took_s)
    finally:
        if worker is None:
            own.close()
    return tally
