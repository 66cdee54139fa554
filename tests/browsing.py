"""Finds a Chromium for the tests of the page: the system's, or the one that playwright downloaded."""

import shutil
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable")
HINT = "needs a Chromium: python -m playwright install --with-deps chromium, or apt install chromium"


def launched(playwright: Any) -> Any | None:
    """A headless browser, or None where there is none."""
    from playwright.sync_api import Error

    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
    except Error:
        if path is not None:
            raise
        return None
