"""The page that `edgekv serve` gives at /, in a real headless Chromium."""

import base64
import hashlib
import io
import json
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from serving import ROOT, Server, get, serving

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
expect = sync_api.expect
CTX = 320
BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable")
HINT = "needs a Chromium: python -m playwright install --with-deps chromium, or apt install chromium"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)  # else the one that playwright downloaded
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except sync_api.Error:
            pytest.skip(HINT)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--max-new-tokens", 24, "--ctx", CTX, "--kv", "q8"]
    with serving(tmp_path_factory.mktemp("page"), *options) as running:
        yield running


@pytest.fixture
def context(browser: Any) -> Iterator[Any]:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    context.set_default_timeout(30_000)
    yield context
    context.close()


@pytest.fixture
def page(context: Any, server: Server) -> Iterator[Any]:
    page = context.new_page()
    errors, asked = list[str](), list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    expect(page.locator("#model")).to_contain_text("demo")
    yield page
    assert errors == []
    assert [url for url in asked if not url.startswith((server.url, "data:", "blob:"))] == []


@pytest.fixture
def bare(context: Any, server: Server) -> Any:
    """A page whose console may have errors."""
    page = context.new_page()
    page.goto(server.url)
    return page


def ask(page: Any, text: str) -> None:
    """Sends a message and waits for the whole answer."""
    n = page.locator(".assistant").count()
    page.locator("#text").fill(text)
    page.locator("#text").press("Enter")
    expect(page.locator(".assistant .actions")).to_have_count(n + 1)
    expect(page.locator("#send")).to_be_visible()


def replaced(page: Any, text: str, **usage: float) -> None:
    """Has the server answer this text, as a model would have to be brought to say it."""
    chunks: list[Any] = [{"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    chunks.append({"choices": [], "usage": {"completion_tokens": 5, "total_tokens": 8, **usage}})
    lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=lines, content_type="text/event-stream"))


def changed(page: Any, server: Server, **props: Any) -> None:
    """Has the server say that it can do more."""
    answer = get(server, "/props") | props
    page.route("**/props", lambda route: route.fulfill(json=answer))
    page.reload()


def set_fields(page: Any, **fields: object) -> None:
    page.locator("#settings").click()
    for name, value in fields.items():
        page.locator(f"[name={name}]").fill(str(value))
    page.get_by_role("button", name="Done").click()


def test_the_model_is_introduced(page: Any, server: Server) -> None:
    """What it is and can't do, with two prompts that suit it: the shipped model's own, or general ones."""
    welcome = page.locator(".welcome")
    expect(welcome).to_contain_text("can't answer")
    expect(welcome).to_contain_text(f"{CTX} tokens")
    expect(welcome).to_contain_text("can't look at pictures")
    prompt = get(server, "/props")["examples"][1]
    page.get_by_role("button", name=prompt).click()
    expect(page.locator(".user .body")).to_have_text(prompt)
    expect(page.locator(".assistant .actions")).to_have_count(1)
    changed(page, server, note="", examples=[], modalities={"vision": True})
    page.locator("#new").click()
    expect(welcome).to_contain_text("looks at pictures")
    expect(welcome.get_by_role("button")).to_have_count(2)
    page.route("**/props", lambda route: None)
    page.reload()
    page.locator("#new").click()
    expect(welcome).to_contain_text("Waiting for the server")
    page.route("**/*.js", lambda route: None)
    page.reload(wait_until="commit")
    expect(welcome).to_contain_text("Waiting for the server")


def test_figures_are_the_conversations_own(page: Any) -> None:
    expect(page.locator("#memory")).to_be_hidden()
    set_fields(page, temperature=0)  # the answer is not over before its 24 tokens
    ask(page, "Tell me of the sea. " + "word " * 100)
    figures = {"#speed": r"^\d+\.\d tokens/s$", "#written": "^24 tokens$", "#used": rf"^[1-9]\d* of {CTX} tokens$"}
    figures["#memory"] = r"^\d+(\.\d)? [KM]iB instead of \d+(\.\d)? [KM]iB in 16 bits$"
    for place, text in figures.items():
        expect(page.locator(place)).to_have_text(re.compile(text))
    memory = page.locator("#memory").inner_text()
    page.locator("#new").click()
    expect(page.locator("#used")).to_have_text(f"0 of {CTX} tokens")
    expect(page.locator("#memory")).to_be_hidden()
    replaced(page, "Short.", energy_joules=1.5)
    for _ in range(2):
        ask(page, "Again")
    expect(page.locator("#energy")).to_have_text("3.00 J (0.30 J a token)")
    page.get_by_role("button", name="Tell me of the sea").first.click()
    expect(page.locator("#memory")).to_have_text(memory)


def test_conversations_are_kept_renamed_and_deleted(page: Any) -> None:
    ask(page, "The first talk")
    answer = page.locator(".assistant .body").inner_text()
    page.locator("#new").click()
    expect(page.locator(".user")).to_have_count(0)
    ask(page, "The second talk")
    page.reload()
    expect(page.locator("#list li")).to_have_count(2)
    expect(page.locator(".user .body")).to_have_text("The second talk")
    page.get_by_role("button", name="The first talk", exact=True).click()
    expect(page.locator(".user .body")).to_have_text("The first talk")
    assert page.locator(".assistant .body").inner_text() == answer
    expect(page.locator("#list [aria-current=true]")).to_have_text("The first talk")
    page.once("dialog", lambda dialog: dialog.accept("Of ships"))
    page.get_by_role("button", name="Rename The first talk").click()
    expect(page.locator("#list [aria-current=true]")).to_have_text("Of ships")
    for given, n in ((False, 2), (True, 1)):
        page.once("dialog", lambda dialog: dialog.accept() if given else dialog.dismiss())  # noqa: B023
        page.get_by_role("button", name="Delete Of ships").click()
        expect(page.locator("#list li")).to_have_count(n)
    page.reload()
    expect(page.locator("#list .title")).to_have_text("The second talk")


PAGE = ROOT / "edgekv" / "server" / "page"
LIBRARIES = ("marked", "highlight", "katex")
LONG_LINES = [  # which take an expression that goes back over them hours, or nest too deep
    *("a|b\n" + "-" * 200_000 + "x", "a|b\n" + "- |:" * 50_000 + "x", "~" * 200_000 + "`", "_a" * 4_000),
    *("```" + " " * 200_000 + "`", "`" * 200_000 + "x", "- " * 100_000 + "x", "---" + " " * 200_000 + "x"),
    *("#" * 200_000, " " * 200_000 + "|", "|" * 200_000 + "\n|-|", "*" * 200_000, "**a" * 70_000, "> " * 4_000),
    *("[a](http://" * 20_000, "[" * 200_000, "a\n" * 10_000, "> a\n" * 10_000, "- a\n" * 10_000, "a\n\n" * 10_000),
    *("`a\n" * 10_000, "$a \n" * 5_000, "\\[a\n" * 5_000, "$$a\n" * 5_000, "\\(\n" * 5_000, "<b\n" * 10_000),
]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_markdown_of_long_lines_ends() -> None:
    files = [*(next(PAGE.glob(f"vendor/{name}-*.js")) for name in LIBRARIES), PAGE / "markdown.js"]
    code = f"""
    const fs = require("fs"), vm = require("vm");
    const context = vm.createContext({{texts: JSON.parse(fs.readFileSync(0))}});
    vm.runInContext("var self = globalThis", context);
    for (const file of {json.dumps([str(file) for file in files])})
        vm.runInContext(fs.readFileSync(file, "utf8"), context);
    vm.runInContext("for (const text of texts) if (!toHtml(lex(text))) throw text", context);
    """
    subprocess.run(["node", "-e", code], input=json.dumps(LONG_LINES), text=True, timeout=120, check=True)


def test_libraries_are_those_that_are_listed() -> None:
    """The page loads all of them, and each is the file whose digest and licence are in the list."""
    rows = (PAGE / "vendor" / "README.md").read_text(encoding="utf-8").splitlines()
    listed = {}
    for row in rows[4:-3]:
        name, _, version, _, licence, digest = (cell.strip(" `") for cell in row.strip("|").split("|"))
        assert version in name
        assert (PAGE / "vendor" / re.findall(r"\((.+)\)", licence)[0]).is_file()
        listed[name] = digest
    here = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in PAGE.glob("vendor/*.*s")}
    assert listed == here
    index = (PAGE / "index.html").read_text(encoding="utf-8")
    assert set(re.findall(r'"vendor/(.+?)"', index)) == set(here)


HOSTILE = (
    "<img src=x onerror=alert(1)><script>window.hurt = 1</script> [a](javascript:alert(1)) <b>bold</b>\n"
    "**<svg onload=alert(1)>** `<iframe src=//evil>`\n\n```html\n<script>window.hurt = 1</script>\n```\n"
    '[x](https://e.example/"onmouseover="alert(1)) <style>*{display:none}</style>\n\n'
    "![p](https://e.example/p.png) ![q][r] $\\href{javascript:alert(1)}{x} \\includegraphics{https://e.example/p.png}$\n\n"
    "[r]: https://e.example/q.png\n"
)


def test_markup_is_only_text(page: Any) -> None:
    replaced(page, HOSTILE)
    ask(page, HOSTILE)
    for _ in range(2):
        for where in (".assistant .body", ".user .body"):
            expect(page.locator(where)).to_contain_text("<img src=x onerror=alert(1)>")
        talk = page.locator("#talk")
        assert talk.locator("img, script, svg, iframe, style, b, [onerror], [onload], [onmouseover]").count() == 0
        assert talk.locator("a").evaluate_all("links => [...new Set(links.map(a => a.protocol))]") == ["https:"]
        assert page.evaluate("() => window.hurt") is None
        expect(page.locator(".assistant .body")).to_contain_text("[a](javascript:alert(1))")
        page.reload()


def test_nothing_passes_the_sanitizer_that_is_not_named(bare: Any) -> None:
    """Even HTML that a library would let through."""
    html = HOSTILE + "<math><mtext href=javascript:alert(1) style=x>t</mtext><annotation-xml><svg onload=alert(1)>"
    passes = """html => {
        const box = document.createElement("div");
        parser.parser = () => html;
        box.append(markdown("any text"));
        return [...box.querySelectorAll("*")].map(e => [e.localName, ...e.getAttributeNames()].join(" "));
    }"""
    assert set(bare.evaluate(passes, html)) <= {"math", "mtext", "br", "p"}


def test_markdown(page: Any) -> None:
    """Code is coloured and can be copied, math is MathML, tables and lists are such; prices are no math."""
    text = "# A\n\n- [x] b\n\n| c | d |\n|---|--:|\n| $e^2$ | f |\n\n$$\ng\n+ h\n$$\n\n"
    text += "```python\ndef i(): pass\n```\n$5, $6: H<sub>2</sub>O"
    replaced(page, text)
    ask(page, "Show all you can")
    body = page.locator(".assistant .body")
    expect(body.locator("h2")).to_have_text("A")
    expect(body.locator("li")).to_have_text("☑ b")
    expect(body.locator("td math msup")).to_have_text("e2")
    expect(body.locator("math[display=block]")).to_have_text("g+h")
    expect(body.locator("pre .hljs-keyword").first).to_have_text("def")
    expect(body.locator("p").last).to_have_text("$5, $6: H2O")
    body.get_by_role("button", name="Copy this code").click()
    assert page.evaluate("() => navigator.clipboard.readText()") == "def i(): pass"


def test_a_growing_answer_looks_like_a_complete_one(page: Any) -> None:
    text = "a\n\n1. b\n\n2. c\n   ```js\n   let d\n   ```\n\ne | f\n--|--\n1 | 2\n\n$$g$$\n\n> h\n\nlast **i**\n"
    grows = """text => {
        const [grown, whole] = [document.createElement("div"), document.createElement("div")];
        const grow = growingMarkdown(grown);
        for (let n = 1; n <= text.length; n++) grow(text.slice(0, n));
        whole.append(markdown(text));
        return [grown.innerHTML, whole.innerHTML];
    }"""
    grown, whole = page.evaluate(grows, text * 3)
    assert grown == whole


def test_no_script_runs_but_the_pages_own(bare: Any) -> None:
    """The policy holds even where an element got in."""
    bare.evaluate("""() => { const made = document.createElement("script");
        made.text = "window.hurt = 1"; document.body.append(made);
        document.body.insertAdjacentHTML('beforeend', '<img src=x onerror="window.hurt = 1">'); }""")
    bare.wait_for_timeout(100)
    assert bare.evaluate("() => window.hurt") is None


def test_edit_and_regenerate(page: Any) -> None:
    ask(page, "The first question")
    ask(page, "The second question")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".assistant .actions")).to_have_count(2)
    expect(page.locator(".user")).to_have_count(2)
    expect(page.locator("#send")).to_be_visible()
    page.locator(".user >> nth=0").get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Edit the message").fill("A better question")
    page.keyboard.press("Enter")
    expect(page.locator(".user .body")).to_have_text("A better question")
    expect(page.locator(".assistant .actions")).to_have_count(1)
    expect(page.locator("#send")).to_be_visible()


def test_stop_keeps_what_was_said(page: Any) -> None:
    set_fields(page, max_tokens=250)
    page.evaluate("""() => {
        const whole = answer;
        answer = async function* (body, signal) {  // is not complete before it is stopped
            for await (const chunk of whole(body, signal)) {
                yield chunk;
                const waits = chunk.choices[0]?.delta.content && !signal.aborted;
                if (waits) await new Promise(done => signal.addEventListener("abort", done));
            }
        };
    }""")
    page.locator("#text").fill("A long story, please.")
    page.locator("#send").click()
    expect(page.locator(".assistant .body")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_visible()
    text = page.locator(".assistant .body").inner_text()
    assert page.locator(".error").count() == 0
    expect(page.locator(".assistant .hint")).to_have_text("stopped")
    page.reload()
    expect(page.locator(".assistant .hint")).to_have_text("stopped")
    expect(page.locator(".assistant .body")).to_have_text(re.compile(re.escape(text.split()[0])))


SETTINGS = {"temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 7, "repetition_penalty": 1.2}
SETTINGS |= {"frequency_penalty": 0.1, "presence_penalty": -0.1, "max_tokens": 5}


def test_settings_belong_to_a_conversation(page: Any, server: Server) -> None:
    """They are sent as OpenAI's fields, and kept; another conversation has the model's, shown in empty fields."""
    changed(page, server, loras=["mine"])
    set_fields(page, system="Speak as a sailor.", **SETTINGS)
    page.locator("#settings").click()
    assert page.locator("[name=temperature]").get_attribute("placeholder") == "1"
    page.locator("[name=model]").select_option("mine")
    page.get_by_role("button", name="Done").click()
    for _ in range(2):
        with page.expect_request("**/v1/chat/completions") as asked:
            ask(page, "Hello")
        body = asked.value.post_data_json
        assert {name: body[name] for name in SETTINGS} == SETTINGS
        assert body["model"] == "mine"
        assert body["messages"][0] == {"role": "system", "content": "Speak as a sailor."}
        expect(page.locator("#status")).to_contain_text("The answer was cut off at its limit")
        page.reload()
        expect(page.locator("#model")).to_have_text("mine")
    page.locator("#new").click()
    expect(page.locator("#model")).to_have_text("demo")
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "Hello")
    assert not {*SETTINGS} & {*asked.value.post_data_json}
    set_fields(page, top_k=9)
    page.locator("#settings").click()
    page.get_by_role("button", name="Use for new conversations").click()
    page.locator("#new").click()
    page.locator("#settings").click()
    assert page.locator("[name=top_k]").input_value() == "9"
    page.get_by_role("button", name="Clear").click()
    assert page.locator("[name=top_k]").input_value() == ""


def test_answers_of_a_schema(bare: Any) -> None:
    """What is no JSON is refused in the dialog; what the server can't follow leads back to the settings."""
    field = bare.locator("[name=response_format]")
    set_fields(bare, response_format='{"type": ')
    assert bare.locator("#options").evaluate("dialog => dialog.open")
    assert "no JSON object" in field.evaluate("field => field.validationMessage")
    field.fill('{"type": "shape"}')
    bare.get_by_role("button", name="Done").click()
    bare.locator("#text").fill("Hello")
    bare.locator("#send").click()
    expect(bare.locator(".error")).to_contain_text("The JSON schema of this conversation can't be used")
    bare.locator(".error").get_by_role("button", name="Settings").click()
    schema = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]}
    field.fill(json.dumps(schema | {"additionalProperties": False}))
    bare.get_by_role("button", name="Done").click()
    bare.get_by_role("button", name="Try again").click()
    expect(bare.locator(".assistant .body")).to_contain_text(re.compile(r'\{\s*"n"'))


def test_conversations_are_searched_exported_and_imported(page: Any, context: Any, tmp_path: pathlib.Path) -> None:
    replaced(page, "An answer of whales")
    set_fields(page, seed=7)
    ask(page, "The first talk")
    page.locator("#new").click()
    replaced(page, "An answer of ships")
    ask(page, "The second talk")
    for words, n in {"whales answer": 1, "TALK": 2, "harpoon": 0, "": 2}.items():
        page.locator("#search").fill(words)
        expect(page.locator("#list li")).to_have_count(n)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    saved = tmp_path / "saved.json"
    download.value.save_as(saved)
    data = json.loads(saved.read_text())
    for i in range(2):
        page.once("dialog", lambda dialog: dialog.accept())
        page.locator("#list li").first.get_by_role("button", name="Delete").click()
        expect(page.locator("#list li")).to_have_count(1 - i)
    hostile = [{"role": "user", "content": "x", "images": ["https://e.example/p.png"]}]
    empty, (first, second) = [{"role": "system", "content": ""}], data["conversations"]
    changes = {"messages": hostile}, {"messages": empty}, {"used": "much"}, {"id": 3}
    lists = [None], *([first, second | change] for change in changes)
    for bad in ("{", "[]", {"conversations": []}, *({**data, "conversations": each} for each in lists)):
        path = tmp_path / "bad.json"
        path.write_text(bad if isinstance(bad, str) else json.dumps(bad))
        page.locator("#status").evaluate("status => { status.textContent = '' }")
        page.locator("#import-file").set_input_files(path)
        expect(page.locator("#status")).to_contain_text("bad.json can't be imported")
        expect(page.locator("#list li")).to_have_count(0)
    page.locator("#import-file").set_input_files(saved)
    expect(page.locator("#list li")).to_have_count(2)
    page.get_by_role("button", name="The first talk", exact=True).click()
    expect(page.locator(".assistant .body")).to_have_text("An answer of whales")
    page.reload()
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="The first talk", exact=True).click()
        page.get_by_role("button", name="Try again").click()
    assert asked.value.post_data_json["seed"] == 7


def test_a_full_context_is_no_dead_end(page: Any) -> None:
    set_fields(page, max_tokens=20)
    for i in range(3):
        ask(page, f"{i} " + "word " * 70)
        if page.locator("#full").is_visible():
            break
    expect(page.locator("#full")).to_be_visible()
    n = page.locator(".user").count()
    page.locator("#slide").click()
    expect(page.locator(".error")).to_have_count(0)
    expect(page.locator(".dropped")).not_to_have_count(0)
    ask(page, "Still there?")
    expect(page.locator(".user")).to_have_count(n + 1)
    expect(page.locator(".error")).to_have_count(0)


def test_errors_are_shown_and_can_be_mended(bare: Any) -> None:
    """A message longer than the context; a server that goes away."""
    expect(bare.locator("#model")).to_contain_text("demo")
    bare.locator("#text").fill("word " * 1000)
    bare.locator("#send").click()
    expect(bare.locator(".error")).to_contain_text(f"context is {CTX}")
    expect(bare.locator("#fullness")).to_contain_text("alone is longer")
    expect(bare.locator("#slide")).to_be_hidden()
    bare.locator("#fresh").click()
    expect(bare.locator("#full")).to_be_hidden()
    full = {"error": {"code": "queue_full", "message": "32 wait"}}
    stream: Any = {"body": 'data: {"choices": []}\n\n', "content_type": "text/event-stream"}
    answers: dict[str, Any] = {
        "does not answer": lambda route: route.abort(),
        "busy": lambda route: route.fulfill(status=429, json=full),
        "short of memory": lambda route: route.fulfill(status=503, json={"error": {"code": "overloaded"}}),
        "answered 502": lambda route: route.fulfill(status=502, body="<html>"),
        "broke off": lambda route: route.fulfill(**stream),
    }
    bare.locator("#text").fill("Hello?")
    bare.route("**/v1/chat/completions", answers["busy"])
    bare.locator("#send").click()
    expect(bare.locator(".error")).to_contain_text("busy")
    for text, answer in answers.items():
        bare.unroute("**/v1/chat/completions")
        bare.route("**/v1/chat/completions", answer)
        bare.get_by_role("button", name="Try again").click()
        expect(bare.locator(".error")).to_contain_text(text)
    bare.unroute("**/v1/chat/completions")
    bare.reload()
    bare.get_by_role("button", name="Try again").click()
    expect(bare.locator(".assistant .actions")).to_have_count(1)
    expect(bare.locator(".error")).to_have_count(0)
    asked_again = re.compile("/(health|props)$")
    bare.route(asked_again, lambda route: route.abort())
    expect(bare.locator("#status")).to_contain_text("The server does not answer")
    bare.route("**/v1/chat/completions", answers["does not answer"])
    bare.get_by_role("button", name="Try again").click()
    expect(bare.locator(".error")).to_contain_text("does not answer")
    for _ in range(2):  # said once, also after the first of these is handled
        bare.wait_for_event("requestfailed", lambda request: asked_again.search(request.url))
    expect(bare.locator("#status")).to_be_empty()
    bare.unroute(asked_again)
    expect(bare.locator(".error")).to_have_count(0)


def test_images(page: Any, server: Server, tmp_path: pathlib.Path) -> None:
    """A large one is made smaller; one is removed again."""
    expect(page.locator("#attach")).to_be_hidden()
    replaced(page, "Noise, and a red bar")
    changed(page, server, modalities={"vision": True})
    expect(page.locator("#attach")).to_be_visible()
    with page.expect_file_chooser():  # an example about a picture waits for one
        page.locator(".welcome button").first.click()
    assert page.locator("#text").input_value() == get(server, "/props")["examples"][0]
    noise = np.random.default_rng(0).integers(0, 255, (128, 128, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    page.locator("#file").set_input_files(tmp_path / "a.png")
    expect(page.locator("#attached img")).to_have_count(1)
    Image.new("RGB", (1500, 300), "red").save(tmp_path / "b.png")
    for _ in range(2):
        page.locator("#file").set_input_files(tmp_path / "b.png")
    page.get_by_role("button", name="Remove image 3").click()
    expect(page.locator("#attached img")).to_have_count(2)
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "Describe the second picture.")
    parts = asked.value.post_data_json["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
    png, jpeg = (base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in parts[:2])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png)).convert("RGB")), noise)
    assert Image.open(io.BytesIO(jpeg)).size == (1024, 205)
    changed(page, server, modalities={"vision": False})
    expect(page.locator(".user .images img")).to_have_count(2)
    expect(page.locator(".user")).to_contain_text("not sent: this model can't look at pictures")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Try again").click()
    assert asked.value.post_data_json["messages"][0]["content"] == "Describe the second picture."


def test_with_a_key(browser: Any, server: Server) -> None:
    """Asked for once an answer is 401."""
    page = browser.new_page()

    def guarded(route: Any) -> None:
        is_page = route.request.resource_type in ("document", "script", "stylesheet")
        if is_page or route.request.headers.get("authorization") == "Bearer k3y":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "give this server's key"}})

    page.route("**/*", guarded)
    page.goto(server.url)
    expect(page.locator("#key")).to_be_focused()
    expect(page.locator("#status")).to_contain_text("wants its key")
    page.locator("#key").fill("k3y")
    expect(page.locator("#model")).to_contain_text("demo")
    ask(page, "Hello")
    page.close()


def test_for_screen_readers(page: Any) -> None:
    """Everything has a name, and the log says when it is complete."""
    ask(page, "Hello")
    unnamed = """() => [...document.querySelectorAll("button, input, textarea, select")]
        .filter(e => e.checkVisibility() && !(e.ariaLabel || e.textContent.trim() || e.labels?.length || e.title))
        .map(e => e.outerHTML)"""
    assert page.evaluate(unnamed) == []
    expect(page.get_by_role("log", name="Conversation")).to_have_attribute("aria-busy", "false")


def test_on_a_phone(browser: Any, server: Server) -> None:
    """Nothing is wider than 360 pixels, in light and dark; the list is behind a button."""
    page = browser.new_page(viewport={"width": 360, "height": 640}, color_scheme="dark")
    page.goto(server.url)
    text = f"| a | b |\n|---|---|\n| {'c ' * 40} | {'d' * 90} |\n\n```\n{'e' * 200}\n```\n\n$${'f+' * 90}g$$"
    replaced(page, text)
    ask(page, "w" * 200)
    expect(page.locator("#list")).to_be_hidden()
    page.locator("#menu").click()
    expect(page.locator("#list")).to_be_visible()
    page.locator("#new").click()
    expect(page.locator("#list")).to_be_hidden()
    page.locator("#menu").click()
    page.get_by_role("button", name=re.compile("^w+$")).click()
    wide = "() => [document.documentElement, talk, options].map(e => e.scrollWidth - e.clientWidth)"
    page.locator("#settings").click()
    assert page.evaluate(wide) == [0, 0, 0]
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) != "rgb(255, 255, 255)"
    page.close()
