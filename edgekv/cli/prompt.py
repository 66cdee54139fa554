"""Texts from files and standard input."""

from __future__ import annotations

import sys

from edgekv import files
from edgekv.errors import EdgeKVError
from edgekv.files import user_path


def read_text(source: str, option: str) -> str:
    """UTF-8 text of a file, or of standard input for ``-``; an EdgeKVError names the option."""
    try:
        return sys.stdin.buffer.read().decode() if source == "-" else files.read_text(user_path(source))
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 (byte {error.start})"
    except ValueError as error:
        reason = str(error)
    raise EdgeKVError(f"{option} {source!r} {reason}; give a readable UTF-8 text file")
