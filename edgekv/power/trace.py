"""What a meter said over time, and the energy between two moments of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from edgekv.errors import PowerError
from edgekv.power.integrate import Integral, gaps_in, integrate_counter, integrate_power
from edgekv.types import F64

MIN_SAMPLES = 2  # of power within a window; with fewer nothing in it was seen
GOOD_ERROR = 0.1  # of a counter's joules: up to this it is preferred to the samples of power
MOST_ERROR = 0.5  # of a counter's joules, where there are fewer; beyond that it did not see the window either
GAP_PERIODS = 3.0  # an interval longer than this many typical ones is a gap


@dataclasses.dataclass(frozen=True)
class Window:
    """Energy between two moments; None is "not measured".

    joules: the energy counter's, or the trapezoid rule's where that is known better; counter_j and integrated_j:
    both, where the meter gives both. error_j bounds what the samples leave open. spread_w: standard deviation of
    the samples' watts. gap_s, the total, and longest_gap_s are of intervals without samples; rails_j has the rails
    that were read throughout.
    """

    seconds: float
    joules: float
    error_j: float | None
    average_w: float
    peak_w: float | None = None
    spread_w: float | None = None
    n_samples: int | None = None
    rate_hz: float | None = None
    gap_s: float | None = None
    longest_gap_s: float | None = None
    counter_j: float | None = None
    integrated_j: float | None = None
    rails_j: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Trace:
    """Samples of a meter: times (n,) in seconds, power and energy (n, n_rails), NaN where a rail did not answer.

    total: the rails that add up to the total; tick_s: how old an energy counter's value can be; losses: lost
    samples by reason; cpu_share: processor time of the samples between marks, as a share of one core.
    """

    times_s: F64
    power_w: F64
    energy_j: F64
    rails: tuple[str, ...]
    total: tuple[str, ...]
    tick_s: float = 0.0
    losses: Mapping[str, int] = dataclasses.field(default_factory=dict)
    cpu_share: float | None = None

    @property
    def gap_s(self) -> float:
        """From this length on an interval is a gap."""
        return GAP_PERIODS * float(np.median(np.diff(self.times_s))) if len(self.times_s) > 1 else 0.0

    def watts(self, rails: tuple[str, ...] | None = None) -> F64:
        """(n,) power of the rails (default: the total's) at each sample.

        From counters: the mean since the sample before (the first: until the next).
        """
        power = self._sum(self.power_w, rails or self.total)
        if np.isfinite(power).any() or len(self.times_s) < 2:
            return power
        mean = np.diff(self._sum(self.energy_j, rails or self.total)) / np.diff(self.times_s)
        return np.concatenate([mean[:1], mean])

    def window(self, start_s: float, end_s: float) -> Window:
        """The energy from start to end, on ``times_s``'s clock. Raises PowerError where too little was seen."""
        inside = (self.times_s >= start_s) & (self.times_s <= end_s)
        n, seconds, watts = int(inside.sum()), end_s - start_s, self.watts()[inside]
        counter, trapezoid = self._integrals(self.total, start_s, end_s)
        if n < MIN_SAMPLES:
            trapezoid = None
            counter = counter if counter and counter.error_j <= MOST_ERROR * counter.joules else None
        best = _better(counter, trapezoid)
        if best is None:
            raise PowerError(self._too_few(n, seconds))
        gaps = gaps_in(self.times_s, start_s, end_s, self.gap_s)
        return Window(
            seconds=seconds,
            joules=best.joules,
            error_j=best.error_j,
            average_w=best.joules / seconds,
            peak_w=float(np.nanmax(watts)) if n else None,
            spread_w=float(np.nanstd(watts)) if n else None,
            n_samples=n,
            rate_hz=n / seconds,
            gap_s=float(gaps.sum()),
            longest_gap_s=float(gaps.max(initial=0.0)),
            counter_j=None if counter is None else counter.joules,
            integrated_j=None if trapezoid is None else trapezoid.joules,
            rails_j=self._rails(start_s, end_s, inside),
        )

    def _integrals(
        self, rails: tuple[str, ...], start_s: float, end_s: float
    ) -> tuple[Integral | None, Integral | None]:
        """By the energy counter, and by the trapezoid rule."""
        power, energy = self._sum(self.power_w, rails), self._sum(self.energy_j, rails)
        seen, counted = np.isfinite(power), np.isfinite(energy)
        counter = trapezoid = None
        if seen.any():
            trapezoid = integrate_power(self.times_s[seen], power[seen], start_s, end_s, self.gap_s)
        if counted.sum() > 1:
            most_w = float(power[seen].max(initial=0.0))
            stale_j = self.tick_s * sum(self._most_before(rails, edge_s) for edge_s in (start_s, end_s))
            counter = integrate_counter(self.times_s[counted], energy[counted], start_s, end_s, most_w, stale_j)
        return counter, trapezoid

    def _most_before(self, rails: tuple[str, ...], edge_s: float) -> float:
        """The largest power seen about one tick of the counter before a moment."""
        watts, around = self.watts(rails), self.tick_s + self.gap_s
        near = np.isfinite(watts) & (self.times_s >= edge_s - around) & (self.times_s <= edge_s + self.gap_s)
        return float(watts[near].max()) if near.any() else float(np.nanmax(watts))

    def _rails(self, start_s: float, end_s: float, inside: npt.NDArray[np.bool_]) -> dict[str, float]:
        """Joules of each rail with a value in every sample."""
        known = np.isfinite(self.power_w[inside]) | np.isfinite(self.energy_j[inside])
        always = np.all(known, axis=0)
        found = {}
        for i, rail in enumerate(self.rails):
            best = _better(*self._integrals((rail,), start_s, end_s)) if always[i] else None
            if best is not None:
                found[rail] = best.joules
        return found

    def _sum(self, values: F64, rails: tuple[str, ...]) -> F64:
        """(n,) of values (n, n_rails); NaN where one of the rails did not answer."""
        total: F64 = values[:, [self.rails.index(rail) for rail in rails]].sum(axis=1)
        return total

    def _too_few(self, n: int, seconds: float) -> str:
        lost = ", ".join(f"{count} x {why}" for why, count in self.losses.items())
        if lost:
            return f"{n} samples in {seconds:.3g} s; lost: {lost}"
        return f"{n} samples in {seconds:.3g} s: too short for this meter"


def _better(counter: Integral | None, trapezoid: Integral | None) -> Integral | None:
    """The counter's wherever it is good: it misses nothing between samples, and no sensor's delay is in it."""
    if counter is not None and counter.error_j <= GOOD_ERROR * counter.joules:
        return counter
    known = [integral for integral in (counter, trapezoid) if integral is not None]
    return min(known, key=lambda integral: integral.error_j, default=None)
