"""The version of this edgekv: that of the installed package, or of the checkout it is used from."""

import pathlib
import re
from importlib import metadata

PROJECT = pathlib.Path(__file__).resolve().parent.parent / "pyproject.toml"


def find_version(project: pathlib.Path = PROJECT) -> str:
    """From the package's metadata, else from a checkout's pyproject.toml; "unknown" where neither is there."""
    try:
        return metadata.version("edgekv")
    except metadata.PackageNotFoundError:
        text = project.read_text(encoding="utf-8") if project.is_file() else ""
        found = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
        return found[1] if found else "unknown"


__version__ = find_version()
