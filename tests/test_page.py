"""The page that `edgekv serve` gives at /, in a real headless Chromium."""

import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from serving import Server, serving

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"needs one of {', '.join(BROWSERS)}")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("page"), "--max-new-tokens", 40, "--power-estimate", 3) as running:
        yield running


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    page = browser.new_page()
    page.set_default_timeout(30_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    yield page
    page.close()
    assert errors == []


def test_talk_and_watch(page: Any, server: Server) -> None:
    page.goto(server.url)
    expect = sync_api.expect
    expect(page.locator("#model")).to_contain_text("demo · dense")
    page.locator("#text").fill("Tell me of the sea.")
    page.locator("#text").press("Enter")
    expect(page.locator(".user")).to_have_text("Tell me of the sea.")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".assistant")).not_to_be_empty()
    assert len(page.locator(".assistant").inner_text()) > 9
    expect(page.locator("#speed")).to_have_text(re.compile(r"^\d+\.\d$"))
    expect(page.locator("#cache")).to_have_text(re.compile(r"^\d+(\.\d)? [KM]iB$"))
    expect(page.locator("#watts")).to_have_text("3.00 (stated)")
    page.locator("#text").fill("And then?")
    page.locator("#send").click()
    expect(page.locator(".assistant")).to_have_count(2)
    expect(page.locator("#send")).to_be_visible()


def test_stop_keeps_what_was_said(page: Any, tmp_path: pathlib.Path) -> None:
    with serving(tmp_path, "--max-new-tokens", 900) as server:
        page.goto(server.url)
        page.locator("#text").fill("A long story, please.")
        page.locator("#send").click()
        sync_api.expect(page.locator(".assistant")).not_to_be_empty()
        page.locator("#stop").click()
        sync_api.expect(page.locator("#send")).to_be_visible()
        said = page.locator(".assistant").inner_text()
        page.wait_for_timeout(300)
        assert page.locator(".assistant").inner_text() == said
        assert page.locator(".error").count() == 0
        page.goto("about:blank")  # the page asks for figures as long as it is open, the server ends here


def test_a_text_with_markup_is_shown_as_text(page: Any, server: Server) -> None:
    page.goto(server.url)
    page.locator("#text").fill("<img src=x onerror=alert(1)><b>bold</b>")
    page.locator("#send").click()
    sync_api.expect(page.locator(".user")).to_have_text("<img src=x onerror=alert(1)><b>bold</b>")
    assert page.locator("main img, main b").count() == 0
    sync_api.expect(page.locator("#send")).to_be_visible()


def test_it_loads_nothing_from_elsewhere(page: Any, server: Server) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    page.wait_for_timeout(300)
    assert asked
    assert all(url.startswith((server.url, "data:")) for url in asked)


def test_with_a_key(browser: Any, tmp_path: pathlib.Path) -> None:
    with serving(tmp_path, "--api-key", "k3y", "--max-new-tokens", 5) as server:
        page = browser.new_page()
        page.goto(server.url)
        sync_api.expect(page.locator("#key")).to_be_visible()
        page.locator("#key").fill("k3y")
        sync_api.expect(page.locator("#model")).to_contain_text("demo")
        page.locator("#text").fill("Hello")
        page.locator("#send").click()
        sync_api.expect(page.locator(".assistant")).not_to_be_empty()
        page.close()
