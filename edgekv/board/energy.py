"""Joules of a board's measurements: of a meter that is read meanwhile, or of an external one's log afterwards."""

from __future__ import annotations

import os
import time

import msgspec

from edgekv.board.record import Board, Decode, Energy, Idle, Measured, Prompt
from edgekv.board.surroundings import Watch
from edgekv.errors import PowerError
from edgekv.power import find_meter
from edgekv.power.base import Throttle
from edgekv.power.csv_log import CsvLog
from edgekv.power.sampler import PowerSampler
from edgekv.power.source import PowerSource, Unmetered
from edgekv.power.trace import Window


class Metering:
    """The meter at hand, read from `start` to `stop`; without one everything is None, and ``text`` says why."""

    def __init__(self, name: str = "auto") -> None:
        """Raises PowerError for a meter that is named and can't be read."""
        self.source: PowerSource
        try:
            meter, notes = find_meter(name, device="cpu")
        except PowerError as error:
            if name != "auto":
                raise
            self.source, self.text = Unmetered(str(error)), f"none: {error}"
        else:
            self.source, self.text = PowerSampler(meter, notes=notes), f"{meter.name}: {meter.covers}"

    def rest(self, seconds: float) -> Idle:
        """Waits to see what the machine draws, and does, at rest."""
        watch, started, begun = Watch(), time.time(), time.perf_counter()
        self.source.mark()
        time.sleep(seconds)
        self.source.mark()
        window = self._window(begun, time.perf_counter())
        watts, spread = (window.average_w, window.spread_w) if window else (None, None)
        return Idle(started, time.perf_counter() - begun, watts, spread, watch.others())

    def per_token(self, begun: float, ended: float, tokens: int, idle: Idle | None) -> Energy | None:
        """Of so many tokens between two moments of `time.perf_counter`; None: not measured."""
        window = self._window(begun, ended)
        name = self.source.about().meter
        return _energy(name, window, tokens, idle.watts if idle else None) if window and name else None

    def throttle(self) -> Throttle | None:
        return self.source.throttle()

    def _window(self, begun: float, ended: float) -> Window | None:
        try:
            return self.source.window(begun, ended)
        except PowerError:
            return None


def with_log(board: Board, path: str | os.PathLike[str]) -> None:
    """Puts the energies of an external meter's log into every measurement that it covers, by the system's clock.

    Raises PowerError where it can't be used, or covers none of them.
    """
    log = CsvLog(path, wall_clock=time.time, clock=time.time)  # its times as they are: Unix seconds

    def window(started: float, seconds: float) -> Window | None:
        try:
            return log.window(started, started + seconds)
        except PowerError:
            return None

    idle_w = None
    if board.idle is not None and (rest := window(board.idle.started, board.idle.seconds)):
        idle_w = rest.average_w
        board.idle = msgspec.structs.replace(board.idle, watts=idle_w, spread_w=rest.spread_w)
    found = 0
    measured: list[Measured] = []
    for m in board.measured:
        if isinstance(m, (Decode, Prompt)) and (seen := window(m.span.started, m.span.seconds)):
            tokens = m.tokens * m.runs if isinstance(m, Prompt) else m.tokens
            m = msgspec.structs.replace(m, energy=_energy("csv", seen, tokens, idle_w))
            found += 1
        measured.append(m)
    if not found:
        raise PowerError(
            f"{os.fspath(path)}: covers none of the measurements; the meter's clock and this machine's must agree"
        )
    board.measured, board.meter = measured, f"csv: {log.about().covers}"


def _energy(meter: str, window: Window, tokens: int, idle_w: float | None) -> Energy:
    net = None if idle_w is None else window.joules - idle_w * window.seconds
    return Energy(
        meter=meter,
        mj_per_token=1e3 * window.joules / tokens,
        error_mj=None if window.error_j is None else 1e3 * window.error_j / tokens,
        net_mj_per_token=None if net is None else 1e3 * net / tokens,
        average_w=window.average_w,
    )
