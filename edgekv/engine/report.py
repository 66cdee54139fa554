"""The report of a run: counts, times and bytes, which the session fills, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from edgekv.engine.decoder import Decoder
from edgekv.engine.drafts import DraftCounts
from edgekv.engine.loading import SessionPlan
from edgekv.engine.runner import State
from edgekv.kvcache.choice import size_text
from edgekv.kvcache.recurrent import attending
from edgekv.machine import format_bytes, machine_info, peak_rss_bytes
from edgekv.power.energy import EnergyReport
from edgekv.vision.model import ImagesReport

FinishReason = Literal["stop", "length"]
"""OpenAI's: "stop" where the text came to its end, "length" where it was cut off."""


@dataclass
class RunReport:
    """Counts and times of one run; None is "not measured", never 0.

    settings: every setting of the run by its option's name, such as kv, weights, ctx, threads, seed.
    model: `name`, `n_parameters`, and the shapes.
    prefill_tokens: tokens of the prompt that were computed, without those in the cache. prefill_s: their seconds.
    decode_latencies_s: seconds of each decode step, one entry per token; tokens of one pass share its time.
    drafts: counts of the tokens that were guessed; None before a text.
    compile_s: seconds of compiling kernels while the session was opened, in no other figure.
    time_to_first_token_s: seconds from the prompt to the first token's text.
    cache_bytes: of all layers' caches; f16_cache_bytes: the same in f16. weights_bytes: that decoding
    maps. peak_rss_bytes: of the process so far.
    bytes_read_per_token: weights and cache that one decode step reads.
    state_bytes: states of layers that do not attend, with their snapshots; None where all attend.
    images: those of the prompt.
    energy: joules by phase, where a meter was used.
    machine: `edgekv.machine.machine_info`.
    notes: warnings that belong to the numbers, a line each.
    finish_reason: None while the text goes on, or where it was interrupted.
    finish_message: the same for people, with the limit that was reached.
    decode_tokens: all tokens but the first, which counts as the prompt's.
    achieved_gb_per_s: memory bandwidth of the median step, in 1e9 bytes.
    """

    settings: dict[str, Any]
    model: dict[str, Any]
    prefill_tokens: int = 0
    prefill_s: float | None = None
    decode_latencies_s: list[float] = field(default_factory=list)
    time_to_first_token_s: float | None = None
    images: ImagesReport | None = None
    cache_bytes: int | None = None
    f16_cache_bytes: int | None = None
    state_bytes: int | None = None
    weights_bytes: int | None = None
    bytes_read_per_token: int | None = None
    peak_rss_bytes: int | None = None
    energy: EnergyReport | None = None
    notes: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    finish_message: str | None = None
    drafts: DraftCounts | None = None
    compile_s: float = 0.0
    machine: dict[str, Any] = field(default_factory=machine_info)
    decode_tokens: int = 0
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    latency_median_ms: float | None = None
    latency_p95_ms: float | None = None
    achieved_gb_per_s: float | None = None

    def __post_init__(self) -> None:
        self._pass_start = 0  # where the latest pass begins in decode_latencies_s

    def add_latency(self, seconds: float, same_pass: bool) -> None:
        """Adds a token's seconds. same_pass: it came from the same pass as the one before."""
        latencies = self.decode_latencies_s
        self._pass_start = self._pass_start if same_pass else len(latencies)
        of_pass = [*latencies[self._pass_start :], seconds]
        latencies[self._pass_start :] = [math.fsum(of_pass) / len(of_pass)] * len(of_pass)

    def derived(self) -> RunReport:
        """Computes the speeds from the counts and times, and returns itself."""
        latencies, self.decode_tokens = self.decode_latencies_s, len(self.decode_latencies_s)
        self.prefill_tokens_per_s = _ratio(self.prefill_tokens, self.prefill_s)
        self.decode_tokens_per_s = _ratio(self.decode_tokens, math.fsum(latencies))
        if latencies:
            median_ms, self.latency_p95_ms = (1e3 * float(s) for s in np.percentile(latencies, (50, 95)))
            self.latency_median_ms = median_ms
            self.achieved_gb_per_s = _ratio(self.bytes_read_per_token, median_ms * 1e6)
        return self

    def as_dict(self) -> dict[str, Any]:
        """Returns every field, ready for JSON."""
        result: dict[str, Any] = _json_ready(asdict(self))
        return result

    def speed(self) -> str:
        """Returns the number of tokens, their speed and the time to the first, for people."""
        first = self.time_to_first_token_s
        n = len(self.decode_latencies_s) + (first is not None)
        text = _count_text(n, "token")
        if self.decode_tokens_per_s is not None:
            text += f" at {self.decode_tokens_per_s:.1f} tokens/s"
        return text if first is None else f"{text}, the first after {first:.2f} s"

    def rows(self) -> list[tuple[str, str]]:
        """Returns (topic, text) rows for people: model, text, images, drafts, memory, end, energy, notes."""
        about, settings, images, drafts = self.model, self.settings, self.images, self.drafts
        prompt = f"prompt of {_count_text(self.prefill_tokens, 'token')}"
        if self.prefill_tokens_per_s:
            prompt += f" at {self.prefill_tokens_per_s:.0f} tokens/s"
        rows = [
            (
                "model",
                f"{about['name']}, {about['n_parameters'] / 1e6:,.1f} M parameters as {settings['weights']}, "
                f"context of {settings['ctx']:,} tokens",
            ),
            ("text", f"{self.speed()}; {prompt}"),
        ]
        if images:
            rows.append(("images", f"{images.n}, {images.tokens} tokens, {images.seconds:.3f} s"))
        if drafts and drafts.passes and drafts.source != "none":
            accepted = f"{drafts.accepted} of {drafts.proposed} tokens accepted"
            per_pass = f"{self.decode_tokens / drafts.passes:.2f} tokens per pass"
            rows.append(("drafts", f"{drafts.source}: {accepted}, {per_pass}"))
        cache = size_text(settings["kv"], self.cache_bytes or 0, self.f16_cache_bytes or 0)
        weights, peak = (format_bytes(n or 0) for n in (self.weights_bytes, self.peak_rss_bytes))
        state = f", state {format_bytes(self.state_bytes)}" if self.state_bytes else ""
        return [
            *rows,
            ("memory", f"cache {cache}{state}; weights {weights}, peak {peak}"),
            ("stopped", self.finish_message or "not yet"),
            *(self.energy.rows() if self.energy else ()),
            *(("note", note) for note in self.notes),
        ]

    def to_text(self) -> str:
        """Returns the report for people, a line per row, without a final newline."""
        return "\n".join(f"{topic:<12}{text}" for topic, text in self.rows())


def add_measurements(report: RunReport, state: State, decoder: Decoder, plan: SessionPlan) -> RunReport:
    """Completes the report with the present bytes and those of the plan; returns it."""
    caches = state.caches
    report.cache_bytes = sum(cache.nbytes for cache in attending(caches))
    report.f16_cache_bytes = plan.f16_bytes
    report.state_bytes = state.nbytes - report.cache_bytes or None
    report.weights_bytes = decoder.ops.weights_bytes
    read = decoder.weights.token_bytes + decoder.ops.lora_bytes
    report.bytes_read_per_token = read + sum(cache.bytes_read() for cache in caches)
    n_decoded = len(report.decode_latencies_s)
    if report.drafts and report.drafts.accepted and n_decoded:
        report.bytes_read_per_token = round(report.bytes_read_per_token * report.drafts.passes / n_decoded)
    report.peak_rss_bytes = peak_rss_bytes()
    report.notes = list(plan.notes)
    if state.n_dropped:
        report.notes.append(f"overflow: {state.n_dropped} tokens between the first and the latest were dropped")
    report.notes += attending(caches)[0].notes()
    return report.derived()


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


def _count_text(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _json_ready(value: Any) -> Any:
    """Converts a value to JSON's types: NumPy's scalars to Python's, NaN and infinity to None, others to text."""
    if isinstance(value, Mapping):
        return {str(key): _json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_ready(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
