"""Where what can be made again is kept."""

import os
import pathlib


def cache_root() -> pathlib.Path:
    """edgekv's folder in $XDG_CACHE_HOME, or in ~/.cache."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "edgekv"
