"""The page to chat on: its parts, joined to one file that loads nothing else."""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources

STYLES = ("style.css",)
SCRIPTS = ("store.js", "markdown.js", "server.js", "images.js", "view.js", "main.js")


@functools.cache
def page() -> str:
    """The whole page, as HTML."""
    return _part("index.html").replace("/* STYLES */", _joined(STYLES)).replace("/* SCRIPTS */", _joined(SCRIPTS))


@functools.cache
def page_headers() -> dict[str, str]:
    """The page's own script and style run, by their hashes, and nothing else does."""
    policy = (
        f"default-src 'none'; script-src {_hashed(SCRIPTS)}; style-src {_hashed(STYLES)}; img-src data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}


def _joined(names: tuple[str, ...]) -> str:
    return "\n".join(map(_part, names))


def _hashed(names: tuple[str, ...]) -> str:
    digest = hashlib.sha256(f"\n{_joined(names)}\n".encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _part(name: str) -> str:
    return resources.files("edgekv.server").joinpath("page_parts").joinpath(name).read_text(encoding="utf-8")
