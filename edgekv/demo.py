"""Where the demo model lies: what `edgekv` uses when no --model is given."""

from __future__ import annotations

import pathlib
import sys

CHECKOUT = pathlib.Path(__file__).resolve().parent.parent / "models" / "demo"
INSTALLED = pathlib.Path(sys.prefix) / "share" / "edgekv" / "demo"


def demo_model() -> pathlib.Path | None:
    """The folder of the model that ships with edgekv: in the checkout, else where the wheel put it."""
    return next((folder for folder in (CHECKOUT, INSTALLED) if (folder / "config.json").is_file()), None)
