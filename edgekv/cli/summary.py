"""What a person wants to know of a run: four lines, and whatever warns."""

from __future__ import annotations

import re

from edgekv.errors import EdgeKVError
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.choice import AUTO
from edgekv.machine import format_bytes
from edgekv.quality.figures import recommended
from edgekv.quality.verdicts import Verdicts
from edgekv.session.report import RunReport
from edgekv.session.session import Session

WORTH_SAYING = 0.75  # of the cache's bytes
SENTENCE_END = re.compile(r"""[.!?…]["'”’)\]]*\s*$""")


def summary(session: Session, report: RunReport, ready_s: float) -> str:
    """Model, text, memory and end; then energy, where it was measured, and notes. ready_s: seconds of loading."""
    parameters = report.model["n_parameters"] / 1e6
    plan = session.plan
    rows = [
        (
            "model",
            f"{report.model['name']}, {parameters:,.1f} M parameters as {plan.weights}, kv {plan.kv.short}, "
            f"context {plan.ctx}; ready in {ready_s:.1f} s",
        ),
        ("text", _text(report)),
        *_images(report),
        ("memory", _memory(session, report)),
        ("stopped", report.finish_message or "not yet"),
        *(report.energy.rows() if report.energy else ()),
        *(("note", note) for note in report.notes),
    ]
    return "\n".join(f"{topic:<12}{text}" for topic, text in rows)


def speed(report: RunReport) -> str:
    """Tokens and their speed, and the time to the first."""
    n = len(report.decode_latencies_s) + (report.time_to_first_token_s is not None)
    tokens = f"{n} token{'s' * (n != 1)}"
    if report.decode_tokens_per_s is not None:
        tokens += f" at {report.decode_tokens_per_s:.1f} tokens/s"
    first = report.time_to_first_token_s
    return tokens if first is None else f"{tokens}, the first after {first:.2f} s"


def ends_sentence(text: str) -> bool:
    """Whether a sentence ends where the text does, as far as its marks say."""
    return SENTENCE_END.search(text) is not None


def smaller_scheme(session: Session) -> tuple[str, int] | None:
    """The smallest scheme that passed its gate for this model, else the demo model's, and the bytes it would take.

    None where that is not known, or not much less than the session's cache takes.
    """
    verdicts = Verdicts(session.model)
    remembered = {text: verdicts.verdict(CacheSpec.parse(text)) for text in reversed(AUTO)}
    passed = [text for text, verdict in remembered.items() if verdict and not verdict.failures]
    name = passed[0] if passed else recommended()
    if name is None:
        return None
    spec = CacheSpec.parse(name)
    try:
        size = spec.planned_bytes(session.config, session.plan.ctx)
    except EdgeKVError:  # a scheme that can't have the model's shape
        return None
    return (spec.short, size) if size < WORTH_SAYING * session.plan.cache_bytes else None


def _text(report: RunReport) -> str:
    rate = report.prefill_tokens_per_s
    read = f"prompt of {report.prefill_tokens} token{'s' * (report.prefill_tokens != 1)}"
    return f"{speed(report)}; {read}" + (f" at {rate:.0f} tokens/s" if rate else "")


def _images(report: RunReport) -> list[tuple[str, str]]:
    seen = report.images
    return [("images", f"{seen.n}, {seen.tokens} tokens, {seen.seconds:.3f} s")] if seen else []


def _memory(session: Session, report: RunReport) -> str:
    smaller = smaller_scheme(session)
    hint = f" ({smaller[0]} would take {format_bytes(smaller[1])})" if smaller else ""
    sizes = (report.cache_bytes or 0, report.weights_bytes or 0, report.peak_rss_bytes or 0)
    cache, weights, peak = map(format_bytes, sizes)
    state = f", state {format_bytes(report.state_bytes)}" if report.state_bytes else ""
    return f"cache {cache}{hint}{state}, weights {weights}, peak {peak}"
