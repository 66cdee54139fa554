"""Profiles of known boards, from `power/boards/*.json`: bandwidth, sensors, and the least time of a token."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
import sys
from typing import Any

from edgekv.machine import machine_info
from edgekv.power.base import Root

CHECKOUT = pathlib.Path(__file__).resolve().parent.parent.parent / "power"
INSTALLED = pathlib.Path(sys.prefix) / "share" / "edgekv" / "power"


@dataclasses.dataclass(frozen=True)
class Board:
    """One profile; None is "no source found".

    model: pattern of the device tree's model. peak_gb_s: of the memory's data sheet; measured_gb_s: reported from
    real programs. idle_w: at the wall. meters: names in METERS. lower_bounds: what one token must read, and the
    milliseconds that this takes at both bandwidths.
    """

    name: str
    model: str
    ram_gib: list[int]
    cpu: str
    cores: int
    clock_mhz: int
    peak_gb_s: float
    peak_source: str
    measured_gb_s: float | None
    measured_source: str | None
    idle_w: float | None
    idle_source: str | None
    meters: list[str]
    note: str | None
    lower_bounds: list[dict[str, Any]]

    def to_text(self) -> str:
        """For people, in a line."""
        measured = f", {self.measured_gb_s:g} measured" if self.measured_gb_s else ""
        parts = [f"{self.cores} x {self.cpu} at {self.clock_mhz} MHz, {self.peak_gb_s:g} GB/s peak{measured}"]
        return "; ".join([*parts, self.note] if self.note else parts)


@functools.cache
def boards() -> dict[str, Board]:
    """Every profile by its file's name; empty where the files were not installed."""
    folder = power_file("boards")
    paths = sorted(folder.glob("*.json")) if folder else []
    return {path.stem: Board(**json.loads(path.read_text(encoding="utf-8"))) for path in paths}


def find_board(root: Root = "/") -> Board | None:
    """The profile of this machine, by the name that its device tree has; None for any other machine."""
    model = machine_info(root)["board"]
    return next((board for board in boards().values() if model and re.search(board.model, model)), None)


def power_file(name: str) -> pathlib.Path | None:
    """A file of `power/` by its name there: in the checkout, else where the wheel put it."""
    return next((folder / name for folder in (CHECKOUT, INSTALLED) if (folder / name).exists()), None)
