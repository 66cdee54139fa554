"""The sampling thread: known signals in real time, and sensors that fail, lie, hang and vanish in mid-run."""

import errno
import itertools
import math
import threading
import time
from collections.abc import Callable

import numpy as np
import power_trees as trees
import pytest

from edgekv.errors import PowerError
from edgekv.power import PowerSampler
from edgekv.power import energy as sampler
from edgekv.power.energy import Window
from edgekv.power.meters import Reading


def until(condition: Callable[[], bool]) -> None:
    """Waits for what a busy machine may take long for."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def sample(
    read: Callable[[], float], seconds: float, **options: float
) -> tuple[Window, PowerSampler, float, float]:
    """The window, the sampler and the moments between which it was sampled."""
    meter = PowerSampler(trees.Signal(read), **options)
    meter.start()
    start = time.perf_counter()
    time.sleep(seconds)
    until(lambda: len(meter.trace().times_s) > 5)
    end = time.perf_counter()
    meter.stop()
    return meter.window(start, end), meter, start, end


def test_a_known_signal_in_real_time() -> None:
    origin = time.perf_counter()

    def watts(t: float) -> float:
        return 6.0 if t % 0.5 < 0.25 else 2.0

    window, _, start, end = sample(lambda: watts(time.perf_counter() - origin), 1.0)
    grid = np.linspace(start - origin, end - origin, 100_001)
    exact = np.mean([watts(t) for t in grid]) * (end - start)
    assert abs(window.joules - exact) <= window.error_j + 0.01 * exact


def test_errors_cost_samples_and_are_counted() -> None:
    problems = [OSError(errno.EIO, "Input/output error"), ValueError("garbage"), RuntimeError("a driver's own")]
    calls, impossible = 0, itertools.cycle([math.nan, math.inf, -500.0, 1e9])

    def read() -> float:
        nonlocal calls
        calls += 1
        if calls % 3:
            return 4.0 if calls % 3 == 1 else next(impossible)
        raise problems[calls // 3 % 3]

    window, meter, start, end = sample(read, 0.5)
    assert window.joules == pytest.approx(4.0 * (end - start))
    assert meter.about().losses.keys() == {
        *(f"total reads {watts} W" for watts in (math.nan, math.inf, -500.0, 1e9)),
        *("input/output error", "garbage", "a driver's own"),
    }


def test_a_sensor_that_vanishes_in_mid_run() -> None:
    gone = threading.Event()

    def read() -> float:
        if gone.is_set():
            raise OSError(errno.ENODEV, "No such device")
        return 4.0

    meter = PowerSampler(trees.Signal(read))
    meter.start()
    start = time.perf_counter()
    until(lambda: len(meter.trace().times_s) > 5)
    gone.set()
    time.sleep(0.3)
    until(lambda: sum(meter.about().losses.values()) > 1)
    end = time.perf_counter()
    meter.stop()
    window = meter.window(start, end)
    assert window.longest_gap_s > 0.2
    assert window.joules == pytest.approx(4.0 * (end - start))
    assert meter.about().losses["no such device"] > 1
    with pytest.raises(PowerError, match="no such device"):
        meter.window(end - 0.1, end)


def test_a_sensor_that_never_answers_again_does_not_hold_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "STOP_S", 0.05)
    hanging, release = threading.Event(), threading.Event()
    calls = 0

    def read() -> float:
        nonlocal calls
        calls += 1
        if calls > 5:
            hanging.set()
            release.wait(60)
        return 4.0

    meter = PowerSampler(trees.Signal(read))
    meter.start()
    start = time.perf_counter()
    assert hanging.wait(60)
    time.sleep(0.3)
    end = time.perf_counter()
    meter.stop()
    assert meter._thread.is_alive()
    window = meter.window(start, end)
    assert window.longest_gap_s > 0.2
    release.set()
    meter._thread.join(60)
    assert not meter._thread.is_alive()


def test_a_late_answer_belongs_to_no_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "LATE_S", -1.0)
    meter = PowerSampler(trees.Signal(lambda: 4.0))
    meter.start()
    meter.stop()
    assert meter.about().losses.keys() == {"took longer than -1.0 s"}
    assert len(meter.trace().times_s) == 0


def test_costly_readings_become_rare_and_a_rate_beyond_the_meter_is_refused() -> None:
    ahead = sampler.CPU_AHEAD_S
    assert sampler.pause_s(ahead, 0.0) == sampler.pause_s(ahead + 0.006, 2.0) == 0
    assert sampler.pause_s(ahead + 0.006, 0.5) == pytest.approx(0.5)
    for hz in (0.0, -1.0, 101.0, float("nan")):
        with pytest.raises(PowerError, match="at most 100 times per second"):
            PowerSampler(trees.Signal(lambda: 4.0), hz=hz)


def test_the_edges_of_a_phase_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meter that is read once in 100 s has a sample at every mark, with all that it can tell."""

    class Costly(trees.Signal):
        def read_edge(self) -> Reading:
            return Reading(power_w={"total": 4.0}, energy_j={"total": 4.0 * time.perf_counter()})

    monkeypatch.setattr(sampler, "MARK_S", 60.0)
    meter = PowerSampler(Costly(lambda: 4.0), hz=0.01)
    meter.start()
    spans = []
    for _ in range(3):
        meter.mark()
        start = time.perf_counter()
        time.sleep(0.05)
        spans.append((start, time.perf_counter()))
        meter.mark()
    meter.stop()
    assert len(meter.trace().times_s) == 1 + 6 + 1
    for start, end in spans:
        window = meter.window(start, end)
        assert window.joules == pytest.approx(4.0 * (end - start), rel=0.2)
        assert window.n_samples == 0
