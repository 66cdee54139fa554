"""Makes the measurements of a plan within a time, keeps each at once, and goes on where another run ended."""

from __future__ import annotations

import pathlib
import shutil
import time
from collections.abc import Callable

from edgekv.board import measure
from edgekv.board.energy import Metering
from edgekv.board.measure import Opened
from edgekv.board.plan import Step, probes, steps
from edgekv.board.record import Board, LeftOut, Measured, save
from edgekv.errors import EdgeKVError
from edgekv.linear.store import is_store
from edgekv.machine import available_memory_bytes, format_bytes
from edgekv.types import TaskProgress

MOST_ATTEMPTS = 2  # beginnings without an end: the process was killed in the middle
NO_TIME = "no time was left"
Say = Callable[[str], None]


class Run:
    """One run of `edgekv board`; ``board`` is written to ``path`` after every measurement.

    seconds: that it may take. say: is told of every measurement, in a line.
    """

    def __init__(
        self,
        board: Board,
        path: pathlib.Path,
        metering: Metering,
        seconds: float,
        say: Say,
        progress: TaskProgress,
    ) -> None:
        self.board, self.path, self.metering = board, path, metering
        self._say, self._progress = say, progress
        self._deadline = time.perf_counter() + seconds
        self._opened: Opened | None = None

    def go(self) -> None:
        """All that there is time for. A measurement that raises an EdgeKVError is left out with its reason."""
        board = self.board
        board.left_out, board.finished = [], False
        self.metering.source.start()
        try:
            if board.idle is None:
                board.idle = self.metering.rest(board.plan.idle_s)
            for probe in probes(board.machine.cores):
                if board.find(probe.key) is None:
                    self._keep(probe.run())
            for step in steps(board.plan, board.machine.cores):
                if board.find(step.key) is None:
                    self._try(step)
            self._close()
            board.finished = all(left.why != NO_TIME for left in board.left_out)
        finally:
            self.metering.source.stop()
            save(board, self.path)

    def _try(self, step: Step) -> None:
        board, why = self.board, self._obstacle(step)
        if why is None:
            board.attempts[step.key] = board.attempts.get(step.key, 0) + 1
            save(board, self.path)
            try:
                result = step.run(self._open(step), self.metering, board)
            except (EdgeKVError, MemoryError) as error:
                why = str(error) or "out of memory"
            except KeyboardInterrupt:  # not the measurement's fault: it may begin anew
                del board.attempts[step.key]
                raise
            else:
                self._keep(result)
            board.attempts.pop(step.key, None)
        if why is not None:
            board.left_out.append(LeftOut(step.key, why))

    def _keep(self, result: Measured) -> None:
        self.board.measured.append(result)
        self.board.attempts.pop(result.key, None)
        save(self.board, self.path)
        self._say(f"{result.key}: {result.text}")

    def _obstacle(self, step: Step) -> str | None:
        """Why the measurement can't be made now; None: nothing is in its way."""
        if self.board.attempts.get(step.key, 0) >= MOST_ATTEMPTS:
            return f"{MOST_ATTEMPTS} runs ended in the middle of it (was there too little memory?)"
        needed = measure.needed_bytes(step.shape, self.board.plan, step.kv, step.depth)
        free = available_memory_bytes()
        if self._opened is not None:
            held = measure.weights_bytes(self._opened.name, self.board.plan)
            free += held  # in use already, or given back before the next one is opened
        if needed > free:
            return f"needs {format_bytes(needed)} of memory, {format_bytes(free)} is free"
        return NO_TIME if time.perf_counter() + self._estimate(step) > self._deadline else None

    def _estimate(self, step: Step) -> float:
        """Seconds that it will take, by what its like took on other shapes, in proportion to their weights."""
        board, plan = self.board, self.board.plan
        size = {name: measure.weights_bytes(name, plan) for name in plan.shapes}
        known = {other.key: other for other in steps(plan, board.machine.cores)}
        rates = [
            (known[m.key].kind, m.span.took_s / size[known[m.key].shape]) for m in board.measured if m.key in known
        ]
        alike = [rate for kind, rate in rates if kind == step.kind] or [rate for _, rate in rates]
        seconds = size[step.shape] * alike[-1] if alike else plan.seconds
        if self._opened is None or self._opened.name != step.shape:
            opening = max((s.opening_s / s.weights_bytes for s in board.shapes), default=0.0)
            making = max((s.making_s / s.weights_bytes for s in board.shapes), default=0.0)
            is_made = is_store(measure.weights_folder(step.shape, plan))
            seconds += size[step.shape] * (opening + (0.0 if is_made else making))
        return seconds

    def _open(self, step: Step) -> Opened:
        """The step's shape on its threads; the one that was open is given back."""
        opened = self._opened
        if opened is not None and (opened.name, opened.threads) == (step.shape, step.threads):
            return opened
        self._close(step.shape)
        del opened
        self._opened = opened = measure.open_shape(step.shape, self.board.plan, step.threads, self._progress)
        before = next((s for s in self.board.shapes if s.name == step.shape), None)
        if before is None:
            self.board.shapes.append(opened.facts)
        elif step.threads == self.board.plan.threads:  # those that its rows are measured with
            making_s = before.making_s + opened.facts.making_s
            facts = measure.with_making(opened.facts, making_s)
            self.board.shapes = [facts if s.name == step.shape else s for s in self.board.shapes]
        return opened

    def _close(self, next_shape: str | None = None) -> None:
        """Gives the open shape back; its weights go too, where this board made them and needs them no more."""
        opened, self._opened = self._opened, None
        if opened is None or opened.name == next_shape:
            return
        own = any(s.name == opened.name and s.making_s > 0 for s in self.board.shapes)
        later = [left for left in self.board.left_out if left.why == NO_TIME]
        if own and not any(left.what.startswith(f"{opened.name},") for left in later):
            shutil.rmtree(measure.weights_folder(opened.name, self.board.plan), ignore_errors=True)
