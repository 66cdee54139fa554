"""Tables of text that fit a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence

WIDTH = 100


def fitted(rows: Sequence[Sequence[str]], left: Collection[int] = (0,), wide: bool = False) -> list[str]:
    """Lines of aligned cells; the last column is cut so that a line has WIDTH characters, unless ``wide``.

    left: columns that begin where they do; the others end there.
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        line = "  ".join(cells).rstrip()
        lines.append(line if wide or len(line) <= WIDTH else line[: WIDTH - 3].rstrip() + "...")
    return lines
