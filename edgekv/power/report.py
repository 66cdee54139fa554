"""Energy per token as a report: gross, above idle, corrected, each with what it rests on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from edgekv.power.base import Correction
from edgekv.power.conditions import throttle_text
from edgekv.power.source import MeterInfo
from edgekv.power.trace import Window


@dataclasses.dataclass(frozen=True)
class Idle:
    """What the machine drew at rest just before the run: mean and standard deviation of its samples."""

    watts: float
    spread_w: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class PhaseEnergy:
    """Energy of one phase (prefill, decode), summed over its ``spans``; None is "not measured", ``reason`` why.

    joules within error_j: gross, the sum of the meter's total. net: above idle; its error contains the idle
    power's spread. corrected: with the meter's correction. The sensor's own error comes on top.
    """

    tokens: int | None
    seconds: float
    spans: int
    joules: float | None = None
    error_j: float | None = None
    net_j: float | None = None
    net_error_j: float | None = None
    corrected_j: float | None = None
    mj_per_token: float | None = None
    net_mj_per_token: float | None = None
    corrected_mj_per_token: float | None = None
    average_w: float | None = None
    peak_w: float | None = None
    n_samples: int | None = None
    rate_hz: float | None = None
    gap_s: float | None = None
    longest_gap_s: float | None = None
    counter_j: float | None = None
    integrated_j: float | None = None
    rails_j: Mapping[str, float] = dataclasses.field(default_factory=dict)
    reason: str | None = None

    @classmethod
    def of(
        cls, windows: list[Window], tokens: int | None, idle: Idle | None, correction: Correction | None
    ) -> PhaseEnergy:
        """Of the windows in which the phase ran, at least one."""
        seconds, joules = sum(w.seconds for w in windows), sum(w.joules for w in windows)
        error = _sum([w.error_j for w in windows])
        net = None if idle is None else joules - idle.watts * seconds
        net_error = None if idle is None or error is None else error + idle.spread_w * seconds
        corrected = None if correction is None else correction.joules(joules, seconds)
        samples = _sum([w.n_samples for w in windows])
        rails = set.intersection(*(set(w.rails_j) for w in windows))
        return cls(
            tokens=tokens,
            seconds=seconds,
            spans=len(windows),
            joules=joules,
            error_j=error,
            net_j=net,
            net_error_j=net_error,
            corrected_j=corrected,
            mj_per_token=_per_token(joules, tokens),
            net_mj_per_token=_per_token(net, tokens),
            corrected_mj_per_token=_per_token(corrected, tokens),
            average_w=joules / seconds,
            peak_w=max((w.peak_w for w in windows if w.peak_w is not None), default=None),
            n_samples=None if samples is None else int(samples),
            rate_hz=None if samples is None else samples / seconds,
            gap_s=_sum([w.gap_s for w in windows]),
            longest_gap_s=max((w.longest_gap_s for w in windows if w.longest_gap_s is not None), default=None),
            counter_j=_sum([w.counter_j for w in windows]),
            integrated_j=_sum([w.integrated_j for w in windows]),
            rails_j={rail: sum(w.rails_j[rail] for w in windows) for rail in windows[0].rails_j if rail in rails},
        )

    def to_text(self, name: str, correction: Correction | None) -> str:
        """For people, in a line."""
        if self.joules is None:
            return f"{name} n/a: {self.reason}"
        if self.tokens:
            parts = [f"{name} {self.mj_per_token:.4g} mJ/token gross"]
            parts += [f"{self.net_mj_per_token:.4g} above idle"] if self.net_mj_per_token is not None else []
            if correction and self.corrected_mj_per_token is not None:
                parts.append(f"{self.corrected_mj_per_token:.4g} {correction.name}")
            tokens = f"{self.tokens} tokens, "
        else:
            parts, tokens = [name], ""
        within = f" ± {self.error_j:.2g}" if self.error_j is not None else ""
        parts[-1] += f" ({tokens}{self.seconds:.2f} s, {self.joules:.4g}{within} J)"
        parts.append(f"{self.average_w:.3g} W average")
        parts += [f"{self.peak_w:.3g} W peak"] if self.peak_w is not None else []
        if self.counter_j and self.integrated_j:
            parts.append(f"integrated power {100 * (self.integrated_j / self.counter_j - 1):+.2g}% to the counter")
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class EnergyReport:
    """Energy of a run by phase, and everything a reader needs to judge it."""

    about: MeterInfo
    idle: Idle | None
    phases: Mapping[str, PhaseEnergy]
    throttling: tuple[str, ...] | None

    def rows(self) -> list[tuple[str, str]]:
        """(topic, text) for a report on a terminal."""
        about = self.about
        label = "ESTIMATE" if about.estimate else "energy"
        phases = [(label, phase.to_text(name, about.correction)) for name, phase in self.phases.items()]
        return [*self.source_rows(), *(phases if about.meter else ())]

    def source_rows(self) -> list[tuple[str, str]]:
        """What the figures rest on, or why there are none."""
        about, idle = self.about, self.idle
        if about.meter is None:
            reasons = {phase.reason for phase in self.phases.values()}
            return [("energy", f"n/a: {reason}") for reason in sorted(filter(None, reasons))]
        rows = [("power", self._meter_text())]
        if idle is not None:
            spread = f"{idle.watts:.3g} W ± {idle.spread_w:.2g}"
            rows.append(("idle", f"{spread} over {idle.seconds:.1f} s before the run"))
        if self._samples():
            rows.append(("sampling", self._sampling_text()))
        if not about.estimate:
            rows.append(("clocks", throttle_text(self.throttling)))
        return rows + [("note", note) for note in about.notes]

    def _meter_text(self) -> str:
        about = self.about
        total = " + ".join(about.total) if len(about.total) <= 4 else f"the sum of {len(about.total)} rails"
        parts = [f"{about.meter}: {total}" if total else f"{about.meter}", about.covers]
        if about.correction:
            parts.append(f"not corrected; {about.correction}")
        return "; ".join(part for part in parts if part)

    def _samples(self) -> int:
        return sum(phase.n_samples or 0 for phase in self.phases.values())

    def _sampling_text(self) -> str:
        seconds = sum(phase.seconds for phase in self.phases.values() if phase.n_samples)
        parts = [f"{self._samples()} samples, {self._samples() / seconds:.1f} Hz"]
        if self.about.cpu_share is not None:
            parts.append(f"{100 * self.about.cpu_share:.2f}% of one core")
        gaps = sum(phase.gap_s or 0.0 for phase in self.phases.values())
        longest = max(phase.longest_gap_s or 0.0 for phase in self.phases.values())
        parts.append(f"gaps {gaps:.2f} s in all, the longest {longest:.2f} s" if gaps else "no gaps")
        parts += [f"lost {count} x {why}" for why, count in self.about.losses.items()]
        return ", ".join(parts)


def _per_token(joules: float | None, tokens: int | None) -> float | None:
    return 1e3 * joules / tokens if joules is not None and tokens else None


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
