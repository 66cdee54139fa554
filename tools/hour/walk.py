"""Walks a newcomer's first hour with the installed commands, in a home of its own, and says where it stumbles.

    python tools/hour/walk.py                        the edgekv beside this Python
    python tools/hour/walk.py --install              a clone of HEAD, a new environment, README's `pip install`
    python tools/hour/walk.py --pictures FOLDER      pictures of the page, to look at

A text, mistakes, a chat, a model from a hub on the loopback, a server with OpenAI's client and a restart with a
prompt that it knows, a program, a scheme of another package; with --pictures, which needs Chromium, the page too.
Ends with status 1 at the first stumble.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pexpect

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # the hub on the loopback, a writer of GGUF files, the page's helpers
PROMPT = "It was a dark night when the old man"
READY = r"\x1b\[\?2004h"  # the editor takes what is typed from now on
CALL = {"type": "function", "function": {"name": "clock"}}
ZONE = {"type": "object", "properties": {"zone": {"type": "string", "enum": ["UTC", "CET"]}}, "required": ["zone"]}
MARKDOWN = """\
## A list

- one, and `code`
- two

```python
print("hello")  # a comment
```

| a | b |
|---|---|
| 1 | 2 |

$$e^{i\\pi} + 1 = 0$$
"""


class Stumble(Exception):
    """What a newcomer would not get past."""


class Walk:
    """The newcomer: where the commands are, a home of their own, and what was measured on the way."""

    def __init__(self, home: pathlib.Path, python: pathlib.Path, pictures: pathlib.Path | None) -> None:
        self.home, self.python, self.pictures = home, python, pictures
        self.checkout = ROOT
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
        kept = {name: os.environ[name] for name in ("XDG_CACHE_HOME",) if name in os.environ}
        self.environment = (
            environment
            | kept
            | {
                "HOME": str(home),
                "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
                "HF_HUB_OFFLINE": "1",
                "PROMPT_TOOLKIT_NO_CPR": "1",
                "TERM": "xterm",
                "OPENAI_API_KEY": "none",
            }
        )

    def edgekv(self, *words: str, given: str = "", status: int = 0, **more: str) -> tuple[str, str]:
        """Runs a command; returns what it printed on standard output and on standard error."""
        return self.run(self.python.parent / "edgekv", *words, given=given, status=status, **more)

    def run(self, *command: str | pathlib.Path, given: str = "", status: int = 0, **more: str) -> tuple[str, str]:
        words = list(map(str, command))
        done = subprocess.run(
            words, input=given, capture_output=True, text=True, timeout=600, cwd=self.home,
            env=self.environment | more,
        )  # fmt: skip
        if done.returncode != status or "Traceback" in done.stderr:
            printed = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            raise Stumble(f"{' '.join(words)}\nends with {done.returncode}, not {status}:\n{printed}")
        return done.stdout, done.stderr

    def refused(self, said: str, *words: str, **more: str) -> None:
        """Requires that a command is refused in one line, which matches ``said``."""
        out, err = self.edgekv(*words, status=2, **more)
        must("silence on standard output", out, r"\A\Z")
        if err.count("\n") != 1:
            raise Stumble(f"edgekv {' '.join(words)} is refused in more than one line:\n{err}")
        must(f"refusal of `edgekv {' '.join(words)}`", err, said)

    @contextlib.contextmanager
    def chat(self, *words: str) -> Iterator[pexpect.spawn]:
        """A chat on a terminal that waits for the first message; it must end by itself."""
        child = pexpect.spawn(
            str(self.python.parent / "edgekv"), ["chat", *words], encoding="utf-8", timeout=120,
            dimensions=(40, 60), env=self.environment, cwd=str(self.home),
        )  # fmt: skip
        with contextlib.closing(child):
            self.hear(child, READY)
            yield child
            self.hear(child, pexpect.EOF)

    def hear(self, child: pexpect.spawn, text: str) -> str:
        """Returns what a chat prints until it matches ``text``, without colours and movements of the cursor."""
        try:
            child.expect(text)
        except (pexpect.TIMEOUT, pexpect.EOF):
            raise Stumble(f"the chat does not print {text!r}, but\n{child.before}") from None
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", child.before)

    @contextlib.contextmanager
    def server(self, *words: str) -> Iterator[str]:
        """A server on a free port, ended by Ctrl-C as a user would; yields its address."""
        command = [str(self.python.parent / "edgekv"), "serve", *words, "--port", "0"]
        log = self.home / "serve.log"
        with log.open("w") as file:
            process = subprocess.Popen(command, stderr=file, env=self.environment, cwd=self.home)
        try:
            while not (found := re.search(r"http://[\w.]+:\d+", log.read_text())):
                if process.poll() is not None:
                    raise Stumble(f"`edgekv serve` ended:\n{log.read_text()}")
                time.sleep(0.1)
            yield found[0]
        finally:
            process.send_signal(2)
            status = process.wait(60)
        if status not in (0, 130, -2) or "Traceback" in log.read_text():
            raise Stumble(f"`edgekv serve` ended with {status}:\n{log.read_text()}")


def must(what: str, text: str, pattern: str) -> str:
    """Requires that a text has a pattern."""
    if not re.search(pattern, text, re.MULTILINE):
        raise Stumble(f"no {what} ({pattern}) in:\n{text[-3000:]}")
    return text


# The steps, in their order


def install(walk: Walk) -> None:
    """A clone, a new environment, and README's installation."""
    walk.checkout = walk.home / "edgekv"
    walk.run("git", "clone", "-q", ROOT, walk.checkout)
    walk.run(sys.executable, "-m", "venv", walk.home / "venv")
    walk.python = walk.home / "venv" / "bin" / "python"
    walk.environment["PATH"] = f"{walk.python.parent}{os.pathsep}{walk.environment['PATH']}"
    walk.run(walk.python, "-m", "pip", "install", "-q", f"{walk.checkout}[chat,serve,grammar,gguf]")


def first_text(walk: Walk) -> None:
    """A text, once with the option and once as one types it; through a pipe; `demo`, `schemes`, `budget`."""
    text, report = walk.edgekv("run", "--prompt", PROMPT, "--seed", "1")
    must("text", text, "[a-z]{3,}")
    must("what the cache saved", report, r"\bf16\b")
    if len(report.splitlines()) > 7:
        raise Stumble(f"the report has more than seven lines:\n{report}")
    short = ("--max-new-tokens", "8", "--greedy")
    typed, _ = walk.edgekv("run", "demo", PROMPT, *short)
    piped, _ = walk.edgekv("run", *short, given=PROMPT)
    if typed != piped or typed != typed.lstrip(" "):
        raise Stumble(f"a prompt from a pipe gives another text, or a stray blank: {typed!r}, {piped!r}")
    walk.edgekv("demo")
    must("one recommendation", walk.edgekv("schemes")[0], "q4")
    walk.edgekv("budget", "--shape", "qwen3-0.6b", "--memory", "4G")
    _, said = walk.edgekv("budget", "--shape", "llama3.1-8b", "--memory", "4G", status=1)[::-1]
    must("context that would fit", said, r"does not fit")


def gate(walk: Walk) -> None:
    """A verdict on one's own text, which a run knows afterwards."""
    prose = str(walk.checkout / "models" / "demo" / "prose.txt")
    judged = ("--model", "demo", "--text", prose, "--kv", "q4", "--ctx", "512", "--needles", "2")
    must("verdict", walk.edgekv("eval", "--gate", *judged)[0], "^recommended: --kv q4 ")
    if "never gated" in walk.edgekv("run", "demo", PROMPT, "--kv", "q4", "--max-new-tokens", "2")[1]:
        raise Stumble("a run does not know the verdict of the gate")


def mistakes(walk: Walk) -> None:
    """What one types wrong is refused in a line that helps."""
    walk.refused("chat", "chta")
    walk.refused("--prompt", "run", "--promt", "a")
    walk.refused("q4", "run", "--kv", "q44", "--prompt", "a")
    walk.refused("demo", "run", "--model", "dmeo", "--prompt", "a")
    walk.refused("8G", "budget", "--model", "demo", "--memory", "8")
    begin = time.perf_counter()
    walk.refused(
        "", "run", "--model", "some/model", "--prompt", "a", HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9"
    )
    print(f"    offline is said after {time.perf_counter() - begin:.1f} s")
    must(
        "names of others",
        "".join(walk.edgekv("run", "demo", PROMPT, "--kv", "q8_0", "--max-new-tokens", "2")),
        "q8",
    )


def talk(walk: Walk) -> None:
    """A chat: answers, commands, a full context, Ctrl-C, a saved conversation."""
    kept = str(walk.home / "talk.kv")
    with walk.chat("demo", "--ctx", "256", "--max-new-tokens", "48", "--session", kept, "--seed", "3") as child:
        for question in ("Who is there?", "And who was with him at the inn that night?", "What did he carry?"):
            child.send(question + "\r")
            answer = walk.hear(child, r"\(\d+ tokens? at ")
            walk.hear(child, READY)
        longest = max(map(len, answer.splitlines()))
        if longest > 60:
            raise Stumble(f"a line of {longest} columns on a terminal of 60:\n{answer}")
        for _ in range(4):
            child.send("Tell me more of the ship and of the men who sailed in her.\r")
            walk.hear(child, r"\(\d+ tokens? at ")
            walk.hear(child, READY)
        for command, said in (("/undo", "."), ("/help", "/quit"), ("/history", "user: "), ("/stats", "context")):
            child.send(command + "\r")
            must(command, walk.hear(child, said) + child.after, said)
            walk.hear(child, READY)
        child.send("/cle\t")
        walk.hear(child, "ar")
        child.send("\r")
        walk.hear(child, "cleared")
        walk.hear(child, READY)
        child.send("Once more.\r")
        walk.hear(child, READY)
        child.send("/quit\r")
    with walk.chat("demo", "--session", kept) as child:
        child.send("/history\r")
        walk.hear(child, "user: Once more")
        walk.hear(child, READY)
        child.sendeof()
    answer, _ = walk.edgekv("chat", "demo", "--temperature", "0", "--max-new-tokens", "6", given="Who is there?\n")
    must("answer in a pipe", answer, "[A-Za-z]{3,}")


def hub(walk: Walk) -> None:
    """A model of a hub: pulled, run by its name, listed, removed; a GGUF file by its quantization."""
    from gguf_writer import write_gguf
    from test_hub import Repository, serving

    files = walk.home / "files"
    shutil.copytree(walk.checkout / "models" / "demo", files / "demo")
    (files / "gguf").mkdir()
    for kind in ("Q4_0", "Q8_0"):
        write_gguf(files / "demo", files / "gguf" / f"tale-{kind}.gguf", kind)
    with serving(some__tale=Repository(files / "demo"), some__GGUF=Repository(files / "gguf")) as other:
        there = {"HF_ENDPOINT": other.endpoint, "HF_HUB_OFFLINE": "0"}
        walk.edgekv("pull", "some/tale", **there)
        must("next step", walk.edgekv("pull", "some/GGUF:q4_0", **there)[1], "edgekv chat")
    short = ("--max-new-tokens", "8", "--greedy")
    for name in ("some/tale", "some/GGUF:Q4_0"):
        must(f"text of {name}", walk.edgekv("run", name, PROMPT, *short)[0], "[a-z]{2,}")
    must("models with bytes", walk.edgekv("list")[0], r"some/tale.*\d [KM]iB")
    json.loads(walk.edgekv("list", "--json")[0])
    walk.refused("some/tale", "rm", "some/tail")
    must("bytes that are free again", "".join(walk.edgekv("rm", "some/tale")), r"\d [KM]iB")
    if "some/tale" in walk.edgekv("list")[0]:
        raise Stumble("`edgekv rm` left the model in `edgekv list`")


def serve(walk: Walk) -> None:
    """OpenAI's client with a stream and a tool, the page, and a restart with a prompt that is known."""
    import openai

    story = (walk.checkout / "models" / "demo" / "prose.txt").read_text()[:24_000]
    words: dict[str, Any] = {"model": "demo", "max_tokens": 8, "temperature": 0}
    with walk.server("demo", "--ctx", "8192") as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        chunks = client.chat.completions.create(
            messages=[{"role": "user", "content": "Who is there?"}], stream=True, **words
        )
        must("streamed answer", "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), "[a-z]")
        tools: Any = [{"type": "function", "function": {"name": "clock", "parameters": ZONE}}]
        called = client.chat.completions.create(
            messages=[{"role": "user", "content": "What time is it?"}], tools=tools, tool_choice=CALL, model="demo"
        )
        (call,) = called.choices[0].message.tool_calls
        must("tool call", call.function.arguments, r'"zone": ?"(UTC|CET)"')
        begin = time.perf_counter()
        first = client.completions.create(prompt=story, **words)
        cold_s = time.perf_counter() - begin
        if walk.pictures:
            page(walk, url)
    with walk.server("demo", "--ctx", "8192") as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        begin = time.perf_counter()
        again = client.completions.create(prompt=story, **words)
        known_s = time.perf_counter() - begin
    if again.choices[0].text != first.choices[0].text:
        raise Stumble(f"a restart changes the text: {first.choices[0].text!r}, {again.choices[0].text!r}")
    n_tokens, n_known = again.usage.prompt_tokens, again.usage.prompt_tokens_details.cached_tokens
    if n_known < n_tokens - 256:
        raise Stumble(f"of a known prompt of {n_tokens} tokens a restarted server knows {n_known}")
    print(f"    {n_tokens} tokens: {cold_s:.2f} s, after a restart {known_s:.2f} s")


def page(walk: Walk, url: str) -> None:
    """The page in Chromium: empty, streaming, code, settings, an error, on a phone and in the dark."""
    from playwright.sync_api import sync_playwright
    from test_page import BROWSERS, ask, expect, replaced

    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    flags = ["--no-sandbox", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=flags)
        for name, options in (
            ("light", {"viewport": {"width": 1100, "height": 800}}),
            ("phone", {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark"}),
        ):
            tab = browser.new_context(**options).new_page()
            errors: list[str] = []
            away: list[str] = []
            tab.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
            tab.on("request", lambda request, away=away: away.append(request.url))
            tab.goto(url)
            expect(tab.locator("#model")).to_contain_text("demo")

            def look(state: str, name: str = name, tab: Any = tab) -> None:
                tab.screenshot(path=str(walk.pictures / f"{name}-{state}.png"))

            look("empty")
            tab.locator("#text").fill("Tell me of the sea.")
            tab.locator("#text").press("Enter")
            tab.locator(".assistant .body").first.wait_for()
            tab.wait_for_timeout(300)
            look("streaming")
            expect(tab.locator("#send")).to_be_visible(timeout=60_000)
            look("answer")
            replaced(tab, MARKDOWN)
            ask(tab, "A list, code, a table and a formula, please.")
            for part in ("pre code", "table", "math", "li"):
                expect(tab.locator(f".assistant .body {part}").first).to_be_visible()
            look("code")
            tab.unroute("**/v1/chat/completions")
            tab.route("**/v1/chat/completions", lambda route: route.abort())
            tab.locator("#text").fill("And now?")
            tab.locator("#text").press("Enter")
            tab.wait_for_timeout(800)
            look("failure")
            tab.unroute("**/v1/chat/completions")
            tab.locator("#settings").click()
            look("settings")
            strangers = [each for each in away if not each.startswith((url, "data:", "blob:"))]
            if errors or strangers:
                raise Stumble(f"the page has errors {errors} or asks others {strangers}")
        browser.close()


def app(walk: Walk) -> None:
    """A program of at most 60 lines, from the examples."""
    program = walk.checkout / "examples" / "app.py"
    if (n := len(program.read_text().splitlines())) > 60:
        raise Stumble(f"{program.name} has {n} lines")
    for _ in range(2):  # the second goes on with the conversation
        must("answer", walk.run(walk.python, program, given="Who is there?\n")[0], "[A-Za-z]{3,}")


def plug_in(walk: Walk) -> None:
    """A scheme of another package, installed beside edgekv."""
    target = walk.home / "plugins"
    package = shutil.copytree(walk.checkout / "examples" / "scheme_package", walk.home / "package")
    walk.run(walk.python, "-m", "pip", "install", "-q", "--no-deps", "--target", target, package)
    path = {"PYTHONPATH": str(target)}
    must("scheme of another package", walk.edgekv("schemes", **path)[0], r"\bbf16\b")
    must("text", walk.edgekv("run", "demo", PROMPT, "--kv", "bf16", "--max-new-tokens", "4", **path)[0], "[a-z]")


STEPS = (first_text, gate, mistakes, talk, hub, serve, app, plug_in)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--install", action="store_true", help="begin with a clone and a new environment")
    parser.add_argument("--pictures", type=pathlib.Path, metavar="FOLDER", help="look at the page, with pictures")
    parser.add_argument("--only", metavar="STEP", help=", ".join(step.__name__ for step in STEPS))
    arguments = parser.parse_args(words)
    if arguments.pictures:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        walk = Walk(pathlib.Path(home), pathlib.Path(sys.executable), arguments.pictures)
        steps = [step for step in STEPS if arguments.only in (None, step.__name__)]
        for step in [install, *steps] if arguments.install else steps:
            begin = time.perf_counter()
            try:
                step(walk)
            except Stumble as stumble:
                print(f"stumbled in {step.__name__}: {stumble}", file=sys.stderr)
                return 1
            print(f"ok: {step.__name__}, {time.perf_counter() - begin:.1f} s", flush=True)
    print("a newcomer arrives")
    return 0


if __name__ == "__main__":
    sys.exit(main())
