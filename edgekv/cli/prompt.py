"""Texts from files and standard input."""

from __future__ import annotations

import sys

from edgekv.errors import EdgeKVError
from edgekv.files import read_regular, user_path


def read_text(source: str, option: str) -> str:
    """UTF-8 text of a file, or of standard input for ``-``; an EdgeKVError names the option."""
    try:
        data = sys.stdin.buffer.read() if source == "-" else read_regular(user_path(source))
        return data.decode("utf-8")
    except OSError as error:
        reason = f"{option} {source!r} can't be read: {error.strerror}; give a readable text file"
    except UnicodeDecodeError as error:
        reason = f"{option} {source!r} is not UTF-8 (byte {error.start}); convert it to UTF-8"
    raise EdgeKVError(reason)
