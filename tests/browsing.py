"""Finds a Chromium for the tests of the page: the system's, or the one that playwright downloaded."""

import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable")
HINT = "needs a Chromium: python -m playwright install --with-deps chromium, or apt install chromium"


def browsers(playwright: Any) -> Iterator[str]:
    """Paths of executables, the system's first."""
    yield from filter(None, map(shutil.which, BROWSERS))
    if pathlib.Path(playwright.chromium.executable_path).exists():
        yield playwright.chromium.executable_path


def launched(playwright: Any) -> Any | None:
    """A headless browser, or None where there is none. A shell is what playwright runs headless by itself."""
    path = next(browsers(playwright), None)
    if path is None:
        try:
            return playwright.chromium.launch(args=["--no-sandbox"])
        except Exception as error:  # its own kinds, without a common name
            print(error, file=sys.stderr)
            return None
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
