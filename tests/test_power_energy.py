"""Joules against signals of known energy, against a second method, and within the stated error."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv.errors import PowerError
from edgekv.power.integrate import integrate_counter, integrate_power
from edgekv.power.trace import Trace
from edgekv.types import F64

START, END = 2.0, 12.0  # metered part of a run of 15 s

# name: (watts at time t, joules from 0 to t)
SIGNALS: dict[str, tuple[Callable[[F64], F64], Callable[[float], float]]] = {
    "constant": (lambda t: np.full_like(t, 5.0), lambda t: 5.0 * t),
    "ramp": (lambda t: 2.0 + 0.7 * t, lambda t: 2.0 * t + 0.35 * t * t),
    "square": (
        lambda t: np.where(t % 2.0 < 0.7, 9.0, 3.0),
        lambda t: 3.0 * t + 6.0 * (0.7 * (t // 2.0) + min(t % 2.0, 0.7)),
    ),
    "sine": (
        lambda t: 6.0 + 2.0 * np.sin(2 * np.pi * t / 1.7),
        lambda t: 6.0 * t + 2.0 * 1.7 / (2 * np.pi) * (1 - np.cos(2 * np.pi * t / 1.7)),
    ),
}


def regular(rng: np.random.Generator) -> F64:
    return np.arange(0, 15, 0.02)


def irregular(rng: np.random.Generator) -> F64:
    return np.cumsum(rng.uniform(0.005, 0.035, 750))


def dropped(rng: np.random.Generator) -> F64:
    times = irregular(rng)
    return times[rng.random(len(times)) > 0.1]


SAMPLINGS = {"regular": regular, "irregular": irregular, "dropped": dropped}


def power_trace(times: F64, watts: F64) -> Trace:
    nothing = np.full((len(times), 1), np.nan)
    return Trace(times, watts[:, None], nothing, ("total",), ("total",))


def counter_trace(times: F64, joules: F64) -> Trace:
    nothing = np.full((len(times), 1), np.nan)
    return Trace(times, nothing, joules[:, None], ("total",), ("total",))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("signal", SIGNALS)
def test_known_signals_within_one_percent_and_within_the_stated_error(signal: str, sampling: str) -> None:
    watts, joules = SIGNALS[signal]
    times = SAMPLINGS[sampling](np.random.default_rng(3))
    window = power_trace(times, watts(times)).window(START, END)
    exact = joules(END) - joules(START)
    assert window.joules == pytest.approx(exact, rel=0.01)
    assert window.error_j is not None
    assert abs(window.joules - exact) <= window.error_j + 1e-9
    assert window.error_j < 0.06 * exact
    assert window.average_w == pytest.approx(exact / (END - START), rel=0.01)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("signal", SIGNALS)
def test_a_second_method_agrees(signal: str, sampling: str) -> None:
    """The samples' straight lines on a fine grid, added up as rectangles."""
    times = SAMPLINGS[sampling](np.random.default_rng(4))
    values = SIGNALS[signal][0](times)
    grid = np.linspace(START, END, 400_001)
    middles = (grid[1:] + grid[:-1]) / 2
    rectangles = np.interp(middles, times, values).sum() * (grid[1] - grid[0])
    assert integrate_power(times, values, START, END, 1.0).joules == pytest.approx(rectangles, rel=1e-6)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("signal", SIGNALS)
def test_a_counter_of_the_same_signal_agrees(signal: str, sampling: str) -> None:
    times = SAMPLINGS[sampling](np.random.default_rng(5))
    joules = SIGNALS[signal][1]
    counted = np.floor([1000 * joules(float(t)) for t in times]) / 1000  # it ticks in millijoules
    window = counter_trace(times, counted).window(START, END)
    exact = joules(END) - joules(START)
    assert window.joules == pytest.approx(exact, rel=0.005)
    assert window.error_j is not None
    assert abs(window.joules - exact) <= window.error_j + 0.002


def test_a_gap_is_shown_and_bounded() -> None:
    watts, joules = SIGNALS["square"]
    times = np.arange(0, 15, 0.02)
    times = times[(times < 4.99) | (times > 8.29)]
    window = power_trace(times, watts(times)).window(START, END)
    whole = power_trace(np.arange(0, 15, 0.02), watts(np.arange(0, 15, 0.02))).window(START, END)
    exact = joules(END) - joules(START)
    assert window.longest_gap_s == window.gap_s == pytest.approx(3.32)
    assert window.error_j is not None
    assert whole.error_j is not None
    assert abs(window.joules - exact) <= window.error_j
    assert window.error_j > whole.error_j + 3.2 * 3.0  # anything between 3 and 9 W may have happened
    assert whole.gap_s == 0


def test_a_sensor_that_vanishes_leaves_a_bounded_end() -> None:
    watts, joules = SIGNALS["square"]
    times = np.arange(0, 7, 0.02)
    window = power_trace(times, watts(times)).window(START, END)
    exact = joules(END) - joules(START)
    assert window.error_j is not None
    assert abs(window.joules - exact) <= window.error_j
    assert window.gap_s == pytest.approx(5.02)
    counted = counter_trace(times, np.array([joules(float(t)) for t in times])).window(START, END)
    assert counted.error_j is not None
    assert abs(counted.joules - exact) <= counted.error_j
    assert counted.gap_s == pytest.approx(5.02)


def test_a_gap_costs_a_counter_nothing() -> None:
    joules = SIGNALS["square"][1]
    times = np.arange(0, 15, 0.02)
    times = times[(times < 5.0) | (times > 8.3)]
    window = counter_trace(times, np.array([joules(float(t)) for t in times])).window(START, END)
    assert window.joules == pytest.approx(joules(END) - joules(START), abs=1e-6 + 0.2)
    assert window.error_j is not None
    assert window.error_j < 0.4


def test_a_counter_that_ticks_slower_than_it_is_read() -> None:
    times = np.arange(0, 15, 0.02)
    joules = 5.0 * np.floor(times / 0.11) * 0.11
    window = counter_trace(times, joules).window(START, END)
    assert window.error_j is not None
    assert abs(window.joules - 50) <= window.error_j
    assert window.error_j < 1.3


def test_a_counter_that_never_moves_is_not_zero_joules() -> None:
    times = np.arange(0, 15, 0.02)
    with pytest.raises(PowerError, match="did not move"):
        counter_trace(times, np.zeros_like(times)).window(START, END)
    with pytest.raises(PowerError, match="did not move"):
        integrate_counter(times, np.zeros_like(times), START, END)


@given(
    st.lists(st.tuples(st.floats(0.01, 2.0), st.floats(0.0, 20.0), st.booleans()), min_size=3, max_size=40),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
)
def test_the_error_bounds_any_signal_that_stays_between_its_samples(
    steps: list[tuple[float, float, bool]], a: float, b: float
) -> None:
    """Between samples the true power holds the earlier value or has the later one already."""
    times = np.cumsum([step[0] for step in steps])
    watts = np.array([step[1] for step in steps])
    start, end = sorted(times[0] + np.array([a, b]) * (times[-1] - times[0]))
    exact = 0.0
    for i in range(len(times) - 1):
        width = max(0.0, min(times[i + 1], end) - max(times[i], start))
        exact += width * (watts[i + 1] if steps[i][2] else watts[i])
    found = integrate_power(times, watts, float(start), float(end), 1.0)
    assert abs(found.joules - exact) <= found.error_j + 1e-9


@given(st.lists(st.floats(0.01, 3.0), min_size=3, max_size=30), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_windows_add_up(steps: list[float], a: float, b: float) -> None:
    times = np.cumsum(steps)
    watts = 5.0 + np.sin(times)
    cut, end = sorted(times[0] + np.array([a, b]) * (times[-1] - times[0]))
    parts = [integrate_power(times, watts, *span, 1.0).joules for span in ((times[0], cut), (cut, end))]
    assert sum(parts) == pytest.approx(integrate_power(times, watts, times[0], end, 1.0).joules)


def test_too_few_samples_are_no_measurement() -> None:
    times = np.arange(0, 15, 0.1)
    trace = power_trace(times, np.full_like(times, 5.0))
    with pytest.raises(PowerError, match=r"1 samples in 0\.05 s: too short for this meter"):
        trace.window(1.06, 1.11)
    empty = power_trace(np.empty(0), np.empty(0))
    with pytest.raises(PowerError, match="0 samples"):
        empty.window(0.0, 1.0)


def test_rails_and_their_total() -> None:
    times = np.arange(0, 15, 0.02)
    power = np.stack([np.full_like(times, 2.0), np.full_like(times, 3.0), np.full_like(times, 1.0)], axis=1)
    power[100, 2] = np.nan  # a side rail that failed once
    nothing = np.full_like(power, np.nan)
    window = Trace(times, power, nothing, ("cpu", "gpu", "inside"), ("cpu", "gpu")).window(START, END)
    assert window.joules == pytest.approx(50)
    assert window.rails_j == {"cpu": pytest.approx(20), "gpu": pytest.approx(30)}
    assert window.peak_w == pytest.approx(5)
    assert window.rate_hz == pytest.approx(50, rel=0.01)


def test_energy_and_power_beside_each_other() -> None:
    """Joules come from the counter, the peak from the watts, and the trapezoid's joules are kept to compare."""
    times = np.arange(0, 15, 0.05)
    watts, joules = SIGNALS["square"]
    counted = np.array([joules(float(t)) for t in times])
    trace = Trace(times, watts(times)[:, None], counted[:, None], ("gpu0",), ("gpu0",))
    window = trace.window(START, END)
    exact = joules(END) - joules(START)
    assert window.joules == pytest.approx(exact, rel=0.005)
    assert window.integrated_j == pytest.approx(exact, rel=0.01)
    assert window.peak_w == 9.0


def test_a_costly_counter_that_is_read_at_the_edges_only() -> None:
    """Watts all the time, joules just outside the window: the counter is the better known of the two."""
    watts, joules = SIGNALS["square"]
    times = np.sort(np.concatenate([np.arange(0, 15, 0.05), [START - 0.004, END + 0.004]]))
    counted = np.where(np.isin(times, [START - 0.004, END + 0.004]), [joules(float(t)) for t in times], np.nan)
    window = Trace(times, watts(times)[:, None], counted[:, None], ("gpu0",), ("gpu0",)).window(START, END)
    exact = joules(END) - joules(START)
    assert window.joules == window.counter_j == pytest.approx(exact, rel=0.002)
    assert window.integrated_j == pytest.approx(exact, rel=0.01)
    assert window.error_j is not None
    assert abs(window.joules - exact) <= window.error_j < 0.01 * exact


def test_a_counter_far_from_the_window_gives_way_to_the_samples() -> None:
    watts, joules = SIGNALS["ramp"]
    times = np.arange(0, 15, 0.05)
    counted = np.where(np.arange(300) % 100 == 0, [joules(float(t)) for t in times], np.nan)
    window = Trace(times, watts(times)[:, None], counted[:, None], ("gpu0",), ("gpu0",)).window(6.0, 7.0)
    assert window.joules == window.integrated_j == pytest.approx(joules(7.0) - joules(6.0), rel=1e-3)
    assert window.counter_j != window.integrated_j


def test_a_short_window_between_two_readings_of_a_counter() -> None:
    """No sample inside, the edges just outside: a counter still knows, and a slow one says that it does not."""
    times = np.array([0.0, 4.999, 5.021, 10.0])
    trace = counter_trace(times, 7.0 * times)
    window = trace.window(5.0, 5.02)
    assert window.joules == pytest.approx(0.14)
    assert (window.n_samples, window.peak_w) == (0, None)
    with pytest.raises(PowerError, match="too short"):
        dataclasses.replace(trace, tick_s=0.1).window(5.0, 5.02)


def test_a_slow_counter_may_be_behind_at_both_ends() -> None:
    """It ticks each 0.1 s: the bound has a tenth of a second of the power there, not of the run's peak."""
    times = np.arange(0, 15, 0.05)
    watts = np.where(times < 1.0, 600.0, 100.0)
    joules = np.cumsum(watts) * 0.05
    stale = np.interp(np.floor(times / 0.1) * 0.1, times, joules)
    trace = Trace(times, watts[:, None], stale[:, None], ("gpu0",), ("gpu0",), tick_s=0.1)
    window = trace.window(START, END)
    assert window.counter_j is not None
    assert window.error_j is not None
    assert abs(window.counter_j - 1000.0) <= window.error_j < 40.0
