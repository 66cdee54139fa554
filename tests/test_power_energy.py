"""Joules against signals of known energy and within the stated error; phases, requests and logs as reports."""

import dataclasses
import datetime
import errno
import itertools
import math
import pathlib
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import power_trees as trees
import pytest
from helpers import raises, until

from edgekv.errors import PowerError
from edgekv.power import PowerSampler, energy
from edgekv.power.energy import CsvLog, EnergyMeter, SharedMeter, Trace, Window
from edgekv.power.meters import Reading, Throttle
from edgekv.types import F64

START, END = 2.0, 12.0  # metered part of a run of 15 s

# name: (watts at time t, joules from 0 to t)
SIGNALS: dict[str, tuple[Callable[[F64], F64], Callable[[float], float]]] = {
    "ramp": (lambda t: 2.0 + 0.7 * t, lambda t: 2.0 * t + 0.35 * t * t),
    "square": (
        lambda t: np.where(t % 2.0 < 0.7, 9.0, 3.0),
        lambda t: 3.0 * t + 6.0 * (0.7 * (t // 2.0) + min(t % 2.0, 0.7)),
    ),
}


def trace_of(times: F64, watts: F64 | float = np.nan, joules: F64 | float = np.nan, tick_s: float = 0) -> Trace:
    """One rail; NaN where nothing was read."""
    power, counted = (np.broadcast_to(values, times.shape)[:, None] for values in (watts, joules))
    return Trace(times, power, counted, ("VIN",), ("VIN",), tick_s)


@pytest.mark.parametrize("signal", SIGNALS)
def test_power_and_counter_of_known_signals_within_the_stated_error(signal: str) -> None:
    """At irregular moments, of which a tenth is lost."""
    (watts, joules), rng = SIGNALS[signal], np.random.default_rng(3)
    times, exact = np.cumsum(rng.uniform(0.005, 0.035, 750)), joules(END) - joules(START)
    times = times[rng.random(len(times)) > 0.1]
    counted = np.floor([1000 * joules(float(t)) for t in times]) / 1000  # it ticks in millijoules
    for trace, within in ((trace_of(times, watts(times)), 0.01), (trace_of(times, joules=counted), 0.005)):
        window = trace.window(START, END)
        assert window.joules == pytest.approx(exact, rel=within)
        assert abs(window.joules - exact) <= window.error_j + 0.002
        assert window.error_j < 0.06 * exact
        assert window.average_w == pytest.approx(exact / (END - START), rel=0.01)


@pytest.mark.parametrize("seed", range(4))
def test_the_error_bounds_a_power_that_changes_anywhere_between_samples_and_windows_add_up(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 40))
    times, watts, is_later = np.cumsum(rng.uniform(0.01, 2.0, n)), rng.uniform(0, 20, n), rng.random(n) < 0.5
    held = np.where(is_later[:-1], watts[1:], watts[:-1])
    found = energy.integrate_power(times, watts, times[0], times[-1])
    assert abs(found.joules - np.diff(times) @ held) <= found.error_j + 1e-9
    middle = rng.uniform(times[0], times[-1])
    parts = [energy.integrate_power(times, watts, *span) for span in ((times[0], middle), (middle, times[-1]))]
    assert sum(part.joules for part in parts) == pytest.approx(found.joules)


def test_what_is_known_too_badly_is_no_measurement() -> None:
    times = np.arange(0, 15, 0.1)
    trace = trace_of(times, 5.0)
    with pytest.raises(PowerError, match=r"1 samples in 0\.05 s: too short for this meter"):
        trace.window(1.06, 1.11)
    with pytest.raises(PowerError, match="0 samples"):
        trace_of(np.empty(0)).window(0.0, 1.0)
    with pytest.raises(PowerError, match="did not move"):  # and not zero joules
        trace_of(times, joules=0.0).window(START, END)
    with_gap = trace_of(times[(times < 4) | (times > 8)], 5.0)
    with pytest.raises(PowerError, match="too short"):
        with_gap.window(3.0, 9.0)  # for most of it nothing was seen


def test_rails_and_their_total() -> None:
    times = np.arange(0, 15, 0.02)
    power = np.broadcast_to([2.0, 3.0, 1.0], (len(times), 3)).copy()
    power[100, 2] = np.nan  # a side rail that failed once
    nothing = np.full_like(power, np.nan)
    window = Trace(times, power, nothing, ("cpu", "gpu", "inside"), ("cpu", "gpu")).window(START, END)
    assert window.rails_j == {"cpu": pytest.approx(20), "gpu": pytest.approx(30)}
    assert (window.joules, window.peak_w) == (pytest.approx(50), pytest.approx(5))


def test_a_costly_counter_that_is_read_at_the_edges_only() -> None:
    """Watts all the time, joules just outside the window: the counter is preferred where it knows the window."""
    watts, joules = SIGNALS["square"]
    times = np.sort(np.concatenate([np.arange(0, 15, 0.05), [START - 0.004, END + 0.004]]))
    counted = np.where(np.isin(times, [START - 0.004, END + 0.004]), [joules(float(t)) for t in times], np.nan)
    trace, exact = trace_of(times, 2 * watts(times), counted), joules(END) - joules(START)
    window = trace.window(START, END)
    assert window.joules == pytest.approx(exact, rel=0.002)
    assert abs(window.joules - exact) <= window.error_j < 0.01 * exact
    assert trace.window(START, START + 1.0).joules == pytest.approx(2 * joules(1.0), rel=0.05)


def test_a_short_window_between_two_readings_of_a_counter() -> None:
    """No sample inside, the edges just outside: a counter still knows, and a slow one says that it does not."""
    times = np.array([0.0, 4.999, 5.021, 10.0])
    trace = trace_of(times, joules=7.0 * times)
    window = trace.window(5.0, 5.02)
    assert window.joules == pytest.approx(0.14)
    assert (window.n_samples, window.peak_w) == (0, None)
    with pytest.raises(PowerError, match="too short"):
        dataclasses.replace(trace, tick_s=0.1).window(5.0, 5.02)


def test_a_slow_counter_may_be_behind_at_both_ends() -> None:
    times = np.arange(0, 15, 0.05)
    stale = 100.0 * np.floor(times / 0.1) * 0.1
    window = trace_of(times, joules=stale, tick_s=0.1).window(START + 0.07, END)
    assert abs(window.joules - 993.0) <= window.error_j < 30.0


class Recorded(energy.PowerSource):
    """A source with a known trace: 3 W until 10 s, then 9 W."""

    def __init__(self) -> None:
        times = np.arange(0.0, 30.0, 0.01)
        watts = np.where(times < 10.0, 3.0 + 0.1 * np.sign(np.sin(40 * times)), 9.0)
        self.trace = trace_of(times, watts)

    def window(self, start_s: float, end_s: float) -> Window:
        return self.trace.window(start_s, end_s)

    def about(self) -> energy.MeterInfo:
        return energy.MeterInfo("ina238", "the board", rails=("VIN",), total=("VIN",))

    def read_throttle(self) -> Throttle | None:
        return Throttle()


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that only sleeping moves on by itself."""
    clock = Clock(2.0)
    monkeypatch.setattr("edgekv.power.energy.time.sleep", lambda s: setattr(clock, "now", clock.now + s))
    return clock


def test_phases_apart_gross_and_above_idle(clock: Clock, tmp_path: pathlib.Path) -> None:
    with EnergyMeter(Recorded(), idle_s=5.0, root=tmp_path, clock=clock) as meter:
        clock.now = 12.0
        with meter.phase("prefill", tokens=100):
            clock.now = 14.0
        with meter.phase("decode") as decode:
            clock.now = 20.0
            decode.tokens += 12
        with pytest.raises(PowerError, match="has run already"), meter.phase("decode"):
            pass
    report = meter.report()
    assert report.idle.watts == pytest.approx(3.0, rel=0.01)
    prefill, found = report.phases["prefill"], report.phases["decode"]
    assert prefill.mj_per_token == pytest.approx(180.0)
    assert (found.tokens, found.seconds, found.peak_w) == (12, 6.0, 9.0)
    assert found.net_j == pytest.approx(54.0 - 18.0, rel=0.01)
    assert found.mj_per_token == pytest.approx(4500.0)
    assert found.net_mj_per_token == pytest.approx(3000.0, rel=0.01)
    assert found.rails_j == {"VIN": pytest.approx(54.0)}
    assert found.n_samples == pytest.approx(600, abs=3)
    ((topic, line),) = report.rows()
    assert topic == "energy"
    prefill, decode, meter = line.split("; ")
    assert prefill == "prefill 18 J, 180 mJ per token (120 above idle), 9 W"
    assert decode == "decode 54 J, 4500 mJ per token (3000 above idle), 9 W"
    assert meter == "measured by ina238: the board"


def test_an_interrupt_at_rest_stops_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = PowerSampler(trees.Signal(lambda: 4.0))
    monkeypatch.setattr("edgekv.power.energy.time.sleep", lambda s: signal.default_int_handler(2, None))
    with pytest.raises(KeyboardInterrupt), EnergyMeter(sampler, idle_s=1.0):
        pass
    sampler._thread.join(5)
    assert not sampler._thread.is_alive()


def test_a_phase_that_is_interrupted_is_still_metered(clock: Clock, tmp_path: pathlib.Path) -> None:
    meter = EnergyMeter(Recorded(), idle_s=0.0, root=tmp_path, clock=clock)
    with pytest.raises(KeyboardInterrupt), meter:  # noqa: PT012
        clock.now = 12.0
        with meter.phase("decode", tokens=3):
            clock.now = 15.0
            raise KeyboardInterrupt
    report = meter.report()
    assert report.idle is report.phases["decode"].net_j is None
    assert report.phases["decode"].joules == pytest.approx(27.0)


# Requests that one meter sees at once


class Driven(SharedMeter):
    """A shared meter that is read when the test says so, at 6 W."""

    def __init__(self, clock: Clock, counts: bool) -> None:
        super().__init__(trees.Signal(lambda: 6.0))
        self._clock, self._counts = clock, counts

    def mark(self) -> None:
        now_s = self._clock.now
        self._keep(now_s, Reading(energy_j={"total": 6.0 * now_s}) if self._counts else Reading({"total": 6.0}))


@pytest.mark.parametrize("counts", [False, True])
def test_requests_share_intervals_by_tokens(clock: Clock, monkeypatch: pytest.MonkeyPatch, counts: bool) -> None:
    """All joules while there is a request, and no other, whoever begins and ends when."""
    monkeypatch.setattr("edgekv.power.energy.time.perf_counter", clock)
    meter = Driven(clock, counts)
    meter.mark()

    def compute(seconds: float, **tokens: float) -> None:
        clock.now += seconds
        for name, n in tokens.items():
            shares[name].tokens += n
        meter.mark()

    shares = {}
    clock.now += 100.0  # at rest: nobody's
    with meter.share() as shares["a"]:
        for _ in range(4):
            compute(1.0, a=5)  # 24 J of its own
        with meter.share() as shares["b"]:
            compute(1.0, a=1, b=3)  # 1.5 J and 4.5 J
            compute(1.0)  # nobody's token was ready: it goes with the next interval
            compute(1.0, a=1, b=1)  # 12 J in halves
            compute(1.0, b=2)
        compute(1.0, a=1)
        compute(0.5)  # after its last token
    clock.now += 100.0
    assert shares["a"].joules == pytest.approx(24 + 1.5 + 6 + 9)
    assert shares["b"].joules == pytest.approx(4.5 + 6 + 6)
    assert [share.watts for share in shares.values()] == [pytest.approx(6.0)] * 2
    with meter.share() as shares["c"]:
        compute(1.0, c=1)
    assert shares["c"].joules is None  # a meter that was read at its ends alone does not know
    with meter.share() as shares["d"]:
        compute(1.0)
        compute(1.0)
        compute(1.0)
    assert shares["d"].joules == pytest.approx(18.0)  # alone, and cancelled before its first token


def test_a_shared_meter_rests_between_requests_and_says_nothing_of_a_sensor_that_fails() -> None:
    readings, fails = itertools.count(), threading.Event()
    seen = 0

    def read() -> float:
        nonlocal seen
        seen = next(readings)
        if fails.is_set():
            raise OSError(errno.ENODEV, "No such device")
        return 4.0

    meter = SharedMeter(trees.Signal(read))
    meter.start()
    at_rest = seen
    time.sleep(0.1)
    assert seen == at_rest
    with meter.share() as known:
        begun_s, before = time.perf_counter(), seen
        until(lambda: seen > before + 20)
        known.tokens = 1
        seconds = time.perf_counter() - begun_s
    assert known.joules == pytest.approx(4.0 * seconds, rel=0.5)
    with meter.share() as unknown:
        fails.set()
        before = seen
        until(lambda: seen > before + 20)
        unknown.tokens = 1
    assert (unknown.joules, unknown.watts) == (None, None)
    meter.stop()


UNIX = 1_790_000_000.0


def iso(unix_s: float, hours: int) -> str:
    zone = datetime.timezone(datetime.timedelta(hours=hours))
    return datetime.datetime.fromtimestamp(unix_s, zone).isoformat()


FORMS: dict[str, tuple[str, Callable[[float, float], str]]] = {  # header, and a line of a time and watts
    "header": ("time,watts", lambda t, w: f"{t:.3f},{w}"),
    "utc": ("Timestamp,Power (W),Voltage", lambda t, w: f"{iso(t, 0).replace('+00:00', 'Z')},{w},5.1"),
    "zone": ("datetime,w", lambda t, w: f"{iso(t, -7)},{w}"),
}


def write_log(path: pathlib.Path, times: F64, watts: F64, form: str = "header") -> pathlib.Path:
    head, line = FORMS[form]
    path.write_text("\n".join([head, *map(line, times, watts)]) + "\n")
    return path


@pytest.mark.parametrize("form", FORMS)
def test_a_log_is_aligned_by_its_timestamps(form: str, tmp_path: pathlib.Path, clock: Clock) -> None:
    times = UNIX + np.arange(0, 20, 0.1)
    watts = np.where(times - UNIX < 8.0, 2.0, 6.0)
    path = write_log(tmp_path / "log.csv", times, watts, form)
    clock.now = 500.0  # the run's clock is 500 at UNIX + 1
    log = CsvLog(path, wall_clock=lambda: UNIX + 1 + clock.now - 500.0, clock=clock)
    with EnergyMeter(log, idle_s=5.0, root=tmp_path, clock=clock) as meter:
        clock.now = 509.0
        with meter.phase("decode", tokens=10):
            clock.now = 514.0
    report = meter.report()
    assert report.idle.watts == pytest.approx(2.0)
    assert report.phases["decode"].joules == pytest.approx(30.0, rel=1e-6)
    assert report.about.meter == "csv"


def test_half_written_lines_are_lost_and_a_set_clock_is_refused(tmp_path: pathlib.Path, clock: Clock) -> None:
    times, offset = UNIX + np.arange(0, 5, 0.1), [UNIX]
    path = write_log(tmp_path / "log.csv", times, np.full(50, 2.0))
    path.write_text(f"# a meter\n{path.read_text()}{UNIX},nan\nwhat,ever\n{UNIX + 5:.3f}")
    log = CsvLog(path, wall_clock=lambda: offset[0] + clock.now, clock=clock)
    log.start()
    log.stop()
    assert log.window(1.0, 3.0).joules == pytest.approx(4.0)
    assert log.about().losses == {"lines that are not a time and watts": 3}
    with pytest.raises(PowerError, match=r"covers \d\d:\d\d:\d\d to .*, this ran"):
        log.window(100.0, 200.0)
    offset[0] += 3.0
    log.stop()
    with pytest.raises(PowerError, match=r"set by \+3.00 s"):
        log.window(1.0, 3.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "can't be read"),
        ("", "holds no line"),
        ("volts,amperes\n1,2\n", "not understood"),
        ("time,watts\n0.1,5\n0.2,5\n", "not understood"),
    ],
)
def test_a_log_that_cannot_be_used(content: str | None, message: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log.csv"
    if content is not None:
        path.write_text(content)
    with raises(PowerError, "Unix seconds or ISO 8601", match=message):
        CsvLog(path)


# The sampling thread: known signals in real time, and sensors that fail, lie, hang and vanish in mid-run


def sample(read: Callable[[], float], seconds: float) -> tuple[Window, PowerSampler, float, float]:
    """The window, the sampler and the moments between which it was sampled."""
    meter = PowerSampler(trees.Signal(read))
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
    last = time.perf_counter()
    gone.set()
    time.sleep(0.3)
    until(lambda: sum(meter.about().losses.values()) > 1)
    end = time.perf_counter()
    meter.stop()
    assert meter.window(start, last).joules == pytest.approx(4.0 * (last - start))
    assert meter.about().losses["no such device"] > 1
    with pytest.raises(PowerError, match="no such device"):
        meter.window(end - 0.1, end)


def test_a_sensor_that_never_answers_again_does_not_hold_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "STOP_S", 0.05)
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
    assert hanging.wait(60)
    time.sleep(0.3)
    end = time.perf_counter()
    meter.stop()
    assert meter._thread.is_alive()
    with pytest.raises(PowerError, match="samples in"):
        meter.window(end - 0.2, end)
    assert len(meter.trace().times_s) == 5
    release.set()
    meter._thread.join(60)
    assert not meter._thread.is_alive()


def test_the_edges_of_a_phase_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meter that is read once in 100 s has a sample at every mark, with all that it can tell."""

    class Costly(trees.Signal):
        max_hz = 0.01

        def read_edge(self) -> Reading:
            return Reading(power_w={"total": 4.0}, energy_j={"total": 4.0 * time.perf_counter()})

    monkeypatch.setattr(energy, "MARK_S", 60.0)
    meter = PowerSampler(Costly(lambda: 4.0))
    meter.start()
    spans = []
    for _ in range(3):
        meter.mark()
        start = time.perf_counter()
        time.sleep(0.3)
        spans.append((start, time.perf_counter()))
        meter.mark()
    meter.stop()
    assert len(meter.trace().times_s) == 1 + 6 + 1
    for start, end in spans:
        window = meter.window(start, end)
        assert window.joules == pytest.approx(4.0 * (end - start), rel=0.25)
        assert window.n_samples == 0
