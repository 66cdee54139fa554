"""Joules from samples, each with a bound on what the samples leave open.

Between two samples power is taken as a straight line (the trapezoid rule). The bound: a power that moves from one
sample's value to the next in any way, without leaving the range between them, can't differ by more. Across a gap,
and beyond the first or last sample, the range is that of all samples. The sensor's own error comes on top.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from edgekv.errors import PowerError
from edgekv.types import F64


@dataclasses.dataclass(frozen=True)
class Integral:
    """``joules`` within plus or minus ``error_j``."""

    joules: float
    error_j: float


def integrate_power(times_s: F64, watts: F64, start_s: float, end_s: float, gap_s: float) -> Integral:
    """The trapezoid rule over start..end; times (n,) ascending, watts (n,), n >= 1.

    Intervals longer than ``gap_s`` are gaps.
    """
    t = np.concatenate([[min(start_s, times_s[0])], times_s, [max(end_s, times_s[-1])]])
    p = np.concatenate([watts[:1], watts, watts[-1:]])
    left, right = np.clip(t[:-1], start_s, end_s), np.clip(t[1:], start_s, end_s)
    width, length = right - left, np.diff(t)
    slope = np.divide(np.diff(p), length, out=np.zeros_like(length), where=length > 0)
    mean = p[:-1] + slope * ((left + right) / 2 - t[:-1])
    low, high = np.minimum(p[:-1], p[1:]), np.maximum(p[:-1], p[1:])
    unseen = length > gap_s
    unseen[[0, -1]] = True
    low, high = np.where(unseen, watts.min(), low), np.where(unseen, watts.max(), high)
    error = width * np.maximum(high - mean, mean - low)
    return Integral(float(width @ mean), float(error.sum()))


def integrate_counter(
    times_s: F64, joules: F64, start_s: float, end_s: float, most_w: float = 0.0, stale_j: float = 0.0
) -> Integral:
    """The rise of an energy counter over start..end; times (n,) ascending, joules (n,) never falling, n >= 2.

    Only the two ends are open: the counter does not say when, between two readings, energy was spent. It was never
    at more than ``most_w``, the largest power sampled, or the largest mean between readings. ``stale_j``: what the
    counter's values at the two ends may not contain yet. Readings that equal the one before show a counter that
    had not ticked yet, and are left out. Raises PowerError if none ever rises.
    """
    ticked = np.concatenate([[True], np.diff(joules) > 0])
    t, e = times_s[ticked], joules[ticked]
    if len(t) < 2:
        raise PowerError("the energy counter did not move")
    rise, length = np.diff(e), np.diff(t)
    power = rise / length
    most_w = max(most_w, float(power.max()))
    width = np.clip(t[1:], start_s, end_s) - np.clip(t[:-1], start_s, end_s)
    inner = rise * width / length
    least, most = np.maximum(0.0, rise - most_w * (length - width)), np.minimum(rise, most_w * width)
    error = np.maximum(most - inner, inner - least)
    known = Integral(float(inner.sum()), float(error.sum()) + stale_j)
    before_s, after_s = max(0.0, t[0] - start_s), max(0.0, end_s - t[-1])
    return _extend(_extend(known, before_s, power[0], power), after_s, power[-1], power)


def _extend(known: Integral, seconds: float, nearest_w: float, power: F64) -> Integral:
    """Time that no reading covers, at the nearest power; it may have been any that occurred."""
    error = seconds * max(power.max() - nearest_w, nearest_w - power.min())
    return Integral(known.joules + seconds * nearest_w, known.error_j + float(error))


def gaps_in(times_s: F64, start_s: float, end_s: float, gap_s: float) -> F64:
    """Lengths of the intervals without a sample that are longer than ``gap_s``, cut to start..end."""
    t = np.concatenate([[start_s], times_s[(times_s > start_s) & (times_s < end_s)], [end_s]])
    lengths = np.diff(t)
    return lengths[lengths > gap_s]
