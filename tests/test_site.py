"""The documentation site: what is generated, its commands and examples, its build without a warning, offline."""

import functools
import http.server
import os
import pathlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import schemes
import schemes_picture
import site_links
from browsing import HINT, launched
from shown_commands import shown, unknown

import edgekv

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The whole site. Needs the extra docs."""
    pytest.importorskip("mkdocs", reason="needs mkdocs: pip install 'edgekv[docs]'")
    pytest.importorskip("mkdocstrings", reason="needs mkdocstrings: pip install 'edgekv[docs]'")
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(target)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_generated_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "site_pages.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_scheme_has_its_row_and_every_measured_one_its_point() -> None:
    assert set(edgekv.CACHES) <= set(schemes.WHEN)
    drawn = schemes_picture.points()
    assert {"planes", "onebit", "bitplane", "kivi2", "h1b"} <= set(drawn)
    shown_names = (DOCS / "pictures" / "schemes.svg").read_text()
    for name in drawn:
        assert name in shown_names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_each_option_is_one_of_the_command_that_it_stands_with(page: pathlib.Path) -> None:
    assert [words for words in shown(page.read_text()) if unknown(words)] == []


def test_every_public_name_is_in_the_reference() -> None:
    told = set(re.findall(r"^::: edgekv\.(\w+)$", (DOCS / "reference" / "library.md").read_text(), re.MULTILINE))
    assert told == set(edgekv.__all__) - {"__version__"}


@pytest.mark.parametrize("n", [0, 1])
def test_library_examples_run(n: int, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", (DOCS / "cookbook" / "library.md").read_text(), re.DOTALL)
    assert len(examples) == 2
    exec(examples[n], {})
    assert len(capsys.readouterr().out) > 10


def test_links_of_included_files_and_out_of_the_site() -> None:
    text = "See [docs](docs/gate.md#limits), [card](models/demo/README.md) and [it](https://e.example)."
    moved = site_links.LINK.sub(lambda link: site_links.moved(link, "", "docs/reference"), text)
    assert "[docs](../gate.md#limits)" in moved
    inside = site_links.LINK.sub(lambda link: site_links.within(link, "docs/reference"), moved)
    assert "[docs](../gate.md#limits)" in inside
    assert "card (`models/demo/README.md`)" in inside
    assert "[it](https://e.example)" in inside


def test_docstrings_become_lists() -> None:
    pytest.importorskip("griffe", reason="needs griffe: pip install 'edgekv[docs]'")
    from site_fields import listed

    text = "How.\n\nkv: the scheme:\n    long.\nctx, n: tokens ``x``.\nRaises an error: bad."
    assert (
        listed(text)
        == "How.\n\n\n- `kv`: the scheme:\n    long.\n- `ctx, n`: tokens `x`.\n\nRaises an error: bad."
    )


def test_pages_name_nothing_to_fetch(built: pathlib.Path) -> None:
    """Scripts, styles, fonts and pictures are the site's own."""
    for page in built.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text()):
            assert not re.search(r'(?:src|href)="(?:https?:)?//', tag), f"{page.name}: {tag}"
    for sheet in built.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", sheet.read_text()), sheet.name


@pytest.fixture(scope="module")
def address(built: pathlib.Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=built)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_in_a_browser(address: str) -> None:
    """Pictures and the search work, and no request leaves the site."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with sync_api.sync_playwright() as playwright:
        browser = launched(playwright)
        if browser is None:
            pytest.skip(HINT)
        page = browser.new_page()
        asked: list[str] = []
        errors: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        for name, n_pictures in (("index", 1), ("how", 2), ("reference/library", 0)):
            page.goto(f"{address}/{name}.html")
            widths = page.locator("article img").evaluate_all("images => images.map(image => image.naturalWidth)")
            assert len(widths) == n_pictures
            assert all(widths)
        page.wait_for_load_state("networkidle")  # the search has its index
        page.locator("[data-md-component=search-query]").click()
        page.keyboard.type("needle", delay=20)
        sync_api.expect(page.locator(".md-search-result__item").first).to_contain_text(
            "needle", ignore_case=True, timeout=30_000
        )
        browser.close()
    assert errors == []
    assert all(url.startswith((address, "data:", "blob:")) for url in asked)
