"""Pictures of measurements, by matplotlib: KL against bytes, watts over time."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any

from edgekv.errors import EdgeKVError
from edgekv.files import atomic_write

Line = tuple[str, Any, Any]
"""A label, and its points' places along x and y: (n,) each."""


def require_matplotlib() -> None:
    """Raise EdgeKVError where it is missing: to be called before the work."""
    try:
        import matplotlib
    except ImportError:
        raise EdgeKVError("--plot needs matplotlib: pip install 'edgekv[plot]'") from None
    matplotlib.use("Agg")


def plot(path: str, lines: Sequence[Line], **axes_settings: Any) -> None:
    """Draw lines with a legend, in the format that the file's name ends with; axes_settings: of `Axes.set`."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    try:
        for label, x, y in lines:
            axes.plot(x, y, "o-" if len(x) < 10 else "-", linewidth=1, markersize=5, label=label)
        axes.set(**axes_settings)
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
        data = io.BytesIO()
        figure.savefig(data, format=os.path.splitext(path)[1][1:], dpi=150, bbox_inches="tight")
        atomic_write(path, data.getvalue())
    finally:
        pyplot.close(figure)
