"""What the tools that write tables into a document share."""

import pathlib
import sys
from collections.abc import Callable


def rewrite(page: pathlib.Path, updated: Callable[[str], str]) -> int:
    """Writes ``updated`` of the page's text in its place; with --check on the command line only compares.

    Returns the exit status: 1 when --check finds the page out of date.
    """
    text = page.read_text(encoding="utf-8")
    fresh = updated(text)
    if "--check" in sys.argv[1:]:
        if fresh != text:
            print(f"{page.name} is out of date; run python {sys.argv[0]}")
        return int(fresh != text)
    page.write_text(fresh, encoding="utf-8")
    return 0
