"""Pictures of measurements, by matplotlib: quality against bytes, time by part, power over time."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Sequence
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


def plot_quality(results: Sequence[Quality], ctx: int, path: str) -> None:
    """Draw KL against the cache's bytes per token, both logarithmic; the forms of one scheme are joined."""
    axes = _axes(8, 6)
    found = sorted((CacheSpec.parse(r.kv).short, r.cache_bytes / ctx, max(r.kl, LEAST_KL)) for r in results)
    for _, family in itertools.groupby(found, key=lambda row: row[0].partition(":")[0]):
        labels, xs, ys = zip(*sorted(family, key=lambda row: row[1]), strict=True)
        (line,) = axes.plot(xs, ys, "o-", linewidth=1, markersize=5)
        for label, x, y in zip(labels, xs, ys, strict=True):
            axes.annotate(label, (x, y), (6, 6), textcoords="offset points", fontsize=8, color=line.get_color())
    axes.set(xscale="log", yscale="log", xlabel="bytes of cache per token", ylabel="KL from dense, nats per token")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.margins(0.15)
    _save(axes, path)


def plot_times(timings: Sequence[Timing], n_layers: int, path: str) -> None:
    """Draw milliseconds per token by part, a bar per scheme and depth, with its GB/s."""
    axes = _axes(9, 1.2 + 0.45 * len(timings))
    rows = range(len(timings))
    matmul, attention = [t.matmul_ms for t in timings], [n_layers * t.attention_ms_layer for t in timings]
    rest = [max(0.0, t.token_ms - m - a) for t, m, a in zip(timings, matmul, attention, strict=True)]
    left = [0.0] * len(timings)
    for name, widths in (("matmul", matmul), ("attention", attention), ("the rest", rest)):
        axes.barh(rows, widths, left=left, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, end, timing in zip(rows, left, timings, strict=True):
        axes.text(end, row, f" {timing.gb_per_s:.1f} GB/s", va="center", fontsize=8)
    axes.set_yticks(rows, [f"{CacheSpec.parse(t.kv).short} at {t.depth}" for t in timings])
    axes.invert_yaxis()
    axes.set(xlabel="ms per token; attention's GB/s behind", xlim=(0, 1.2 * max(left)))
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    _save(axes, path)


def plot_power(trace: Trace, path: str) -> None:
    """Draw watts over seconds: the total and, where it has several, each rail."""
    axes = _axes(9, 4.5)
    seconds = trace.times_s - trace.times_s[0] if len(trace.times_s) else trace.times_s
    axes.plot(seconds, trace.watts(), color="black", linewidth=1.5, label="total")
    for rail in trace.rails if len(trace.rails) > 1 else ():
        axes.plot(seconds, trace.watts((rail,)), linewidth=0.8, label=rail)
    axes.set(xlabel="seconds", ylabel="watts", ylim=(0, None))
    axes.grid(visible=True, alpha=0.25)
    axes.legend(fontsize=8)
    _save(axes, path)


def _axes(width: float, height: float) -> Any:
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height))[1]


def _save(axes: Any, path: str) -> None:
    from matplotlib import pyplot

    try:
        data = io.BytesIO()
        axes.figure.savefig(data, format=os.path.splitext(path)[1][1:], dpi=150, bbox_inches="tight")
        atomic_write(path, data.getvalue())
    finally:
        pyplot.close(axes.figure)
