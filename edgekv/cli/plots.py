"""Pictures of measurements, by matplotlib: quality against bytes, time by part, power over time."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Sequence
from typing import Any

from edgekv.errors import EdgeKVError
from edgekv.files import atomic_write
from edgekv.kvcache import CacheSpec
from edgekv.power.trace import Trace
from edgekv.quality.bench import Timing
from edgekv.quality.evaluate import Quality

LEAST_KL = 1e-7  # what is less, or nothing, stands there: the axis is logarithmic
OFFSETS = (8, 16, 28, 44, 64)  # of a label from its point, in points of type, the nearest first
WAYS = ((1, 0), (0, 1), (0, -1), (-1, 0), (0.8, 0.8), (0.8, -0.8), (-0.8, 0.8), (-0.8, -0.8))


def require_matplotlib() -> None:
    """EdgeKVError where it is missing: to be called before the work."""
    try:
        import matplotlib
    except ImportError:
        raise EdgeKVError("--plot needs matplotlib: pip install 'edgekv[plot]'") from None
    matplotlib.use("Agg")


def plot_quality(results: Sequence[Quality], ctx: int, path: str) -> None:
    """KL against the cache's bytes per token, both logarithmic; the forms of one scheme are joined."""
    figure, axes = _figure(8, 6)
    points, labels, colours = [], [], []
    specs = [CacheSpec.parse(result.kv) for result in results]
    by_scheme = sorted(range(len(results)), key=lambda i: (specs[i].scheme.name, results[i].cache_bytes))
    for _, family in itertools.groupby(by_scheme, key=lambda i: specs[i].scheme.name):
        chosen = list(family)
        xs = [results[i].cache_bytes / ctx for i in chosen]
        ys = [max(results[i].kl, LEAST_KL) for i in chosen]
        (line,) = axes.plot(xs, ys, "o-", linewidth=1, markersize=5)
        points += list(zip(xs, ys, strict=True))
        labels += [specs[i].short for i in chosen]
        colours += [line.get_color()] * len(chosen)
    axes.set(xscale="log", yscale="log", xlabel="bytes of cache per token", ylabel="KL from dense, nats per token")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.margins(0.15)
    label_points(figure, axes, points, labels, colours)
    _save(figure, path)


def plot_times(timings: Sequence[Timing], path: str) -> None:
    """Milliseconds per token by part, a bar per scheme and depth, with its GB/s and times floor."""
    figure, axes = _figure(9, 1.2 + 0.45 * len(timings))
    names = [f"{CacheSpec.parse(t.kv).short} at {t.depth}" for t in timings]
    places, left = range(len(timings)), [0.0] * len(timings)
    for part in timings[0].parts:
        widths = [max(t.parts[part], 0.0) for t in timings]
        axes.barh(places, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, end, timing in zip(places, left, timings, strict=True):
        said = f" {timing.gb_per_s:.1f} GB/s, x {timing.times_floor:.2f} floor"
        axes.text(end, place, said, va="center", fontsize=8)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set(
        xlabel="ms per token; attention's GB/s and times the memory's floor behind", xlim=(0, 1.35 * max(left))
    )
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    _save(figure, path)


def plot_power(trace: Trace, path: str) -> None:
    """Watts over seconds: the total and, where it has several, each rail."""
    figure, axes = _figure(9, 4.5)
    seconds = trace.times_s - trace.times_s[0] if len(trace.times_s) else trace.times_s
    axes.plot(seconds, trace.watts(), color="black", linewidth=1.5, label="total")
    for rail in trace.rails if len(trace.rails) > 1 else ():
        axes.plot(seconds, trace.watts((rail,)), linewidth=0.8, label=rail)
    axes.set(xlabel="seconds", ylabel="watts")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.25)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    _save(figure, path)


def _figure(width: float, height: float) -> Any:
    require_matplotlib()
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height))


def label_points(
    figure: Any, axes: Any, points: Sequence[tuple[float, float]], labels: Sequence[str], colours: Sequence[str]
) -> None:
    """A label by each point where it covers neither a point nor another label, as near as there is room."""
    from matplotlib.transforms import Bbox

    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    pixels = [axes.transData.transform(point) for point in points]
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in pixels]
    for point, label, colour in zip(points, labels, colours, strict=True):
        text = axes.annotate(label, point, (0, 0), textcoords="offset points", fontsize=8, color=colour)
        best = None
        for distance, (dx, dy) in itertools.product(OFFSETS, WAYS):
            text.set(ha=_side(dx, "left", "right"), va=_side(dy, "bottom", "top"))
            text.set_position((dx * distance, dy * distance))
            box = text.get_window_extent(renderer)
            hits = sum(box.overlaps(other) for other in taken) + (not _within(axes.bbox, box))
            if best is None or hits < best[0]:
                best = hits, (dx * distance, dy * distance), text.get_ha(), text.get_va(), box
            if not hits:
                break
        assert best is not None
        text.set(ha=best[2], va=best[3])
        text.set_position(best[1])
        taken.append(best[4])


def _side(way: float, forward: str, backward: str) -> str:
    """Which side of a text stands at its point: the one that faces it."""
    return "center" if way == 0 else forward if way > 0 else backward


def _within(outer: Any, box: Any) -> bool:
    return bool(outer.x0 <= box.x0 and box.x1 <= outer.x1 and outer.y0 <= box.y0 and box.y1 <= outer.y1)


def _save(figure: Any, path: str) -> None:
    from matplotlib import pyplot

    try:
        data = io.BytesIO()
        figure.savefig(data, format=os.path.splitext(path)[1][1:], dpi=150, bbox_inches="tight")
        atomic_write(path, data.getvalue())
    finally:
        pyplot.close(figure)
