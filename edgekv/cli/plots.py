"""Pictures of measurements, by matplotlib: quality against bytes, time by part, power over time."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from edgekv.errors import EdgeKVError
from edgekv.files import atomic_write
from edgekv.kvcache import CacheSpec

if TYPE_CHECKING:
    from edgekv.eval.bench import Timing
    from edgekv.eval.evaluate import Quality
    from edgekv.power.energy import Trace

LEAST_KL = 1e-7  # what is less, or nothing, stands there: the axis is logarithmic


def require_matplotlib() -> None:
    """Raise EdgeKVError where it is missing: to be called before the work."""
    try:
        import matplotlib
    except ImportError:
        raise EdgeKVError("--plot needs matplotlib: pip install 'edgekv[plot]'") from None
    matplotlib.use("Agg")


@contextlib.contextmanager
def _picture(path: str, width: float, height: float) -> Iterator[Any]:
    """Yield axes of so many inches, which are written in the format that the name ends with."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height))
    try:
        yield axes
        data = io.BytesIO()
        figure.savefig(data, format=os.path.splitext(path)[1][1:], dpi=150, bbox_inches="tight")
        atomic_write(path, data.getvalue())
    finally:
        pyplot.close(figure)


def plot_quality(results: Sequence[Quality], ctx: int, path: str) -> None:
    """Draw KL against the cache's bytes per token, both logarithmic; the forms of one scheme are joined."""
    found = sorted((CacheSpec.parse(r.kv).short, r.cache_bytes / ctx, max(r.kl, LEAST_KL)) for r in results)
    with _picture(path, 8, 6) as axes:
        for _, family in itertools.groupby(found, key=lambda row: row[0].partition(":")[0]):
            labels, xs, ys = zip(*sorted(family, key=lambda row: row[1]), strict=True)
            (line,) = axes.plot(xs, ys, "o-", linewidth=1, markersize=5)
            how: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": line.get_color()}
            for label, x, y in zip(labels, xs, ys, strict=True):
                axes.annotate(label, (x, y), (6, 6), **how)
        axes.set(xscale="log", yscale="log", xlabel="bytes of cache per token", ylabel="KL from dense, nats")
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.margins(0.15)


def plot_times(timings: Sequence[Timing], n_layers: int, path: str) -> None:
    """Draw milliseconds per token by part, a bar per scheme and depth."""
    parts = [(t.matmul_ms, n_layers * t.attention_ms_layer) for t in timings]
    rests = [max(0.0, t.token_ms - sum(part)) for t, part in zip(timings, parts, strict=True)]
    names = [f"{CacheSpec.parse(t.kv).short} at {t.depth}, {t.gb_per_s:.1f} GB/s" for t in timings]
    with _picture(path, 9, 1.2 + 0.45 * len(timings)) as axes:
        left = [0.0] * len(timings)
        for label, widths in zip(
            ("matmul", "attention", "the rest"), [*zip(*parts, strict=True), rests], strict=True
        ):
            axes.barh(names, widths, left=left, label=label)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set(xlabel="ms per token; GB/s of attention")
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def plot_power(trace: Trace, path: str) -> None:
    """Draw watts over seconds: the total and, where it has several, each rail."""
    seconds = trace.times_s - trace.times_s[0] if len(trace.times_s) else trace.times_s
    with _picture(path, 9, 4.5) as axes:
        axes.plot(seconds, trace.watts(), color="black", linewidth=1.5, label="total")
        if len(trace.rails) > 1:
            for rail in trace.rails:
                axes.plot(seconds, trace.watts((rail,)), linewidth=0.8, alpha=0.8, label=rail)
        axes.set(xlabel="seconds", ylabel="W", ylim=(0, None))
        axes.legend(fontsize=8)
