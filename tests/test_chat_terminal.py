"""`edgekv chat` on a real terminal: keys go in through a pty, what people see comes out."""

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator

import golden_cases
import pexpect
import pytest
from helpers import embedding_spans, raises
from PIL import Image

from edgekv import Chat, SamplingParams, Session
from edgekv.cli.chat import Terminal, Wrapped, history_file
from edgekv.errors import EdgeKVError

PASTE = "\x1b[200~{}\x1b[201~"  # what terminals send around what is pasted
READY = r"\x1b\[\?2004h"  # the editor takes pastes from now on
SHORT = ["--max-new-tokens", "6", "--greedy", "--ctx", "512"]
USE = r"\((\d+) tokens? at [\d.]+ tokens/s, the first after [\d.]+ s; context (\d+) of 512\)"

Start = Callable[..., pexpect.spawn]


@pytest.fixture
def start(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a chat and waits until it asks."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")
    running: list[pexpect.spawn] = []

    def chat(*arguments: str) -> pexpect.spawn:
        command = ["-m", "edgekv", "chat", *SHORT, *arguments]
        child = pexpect.spawn(sys.executable, command, encoding="utf-8", timeout=30, dimensions=(40, 100))
        running.append(child)
        child.expect(READY)
        return child

    yield chat
    for child in running:
        child.close(force=True)


def ask(child: pexpect.spawn, keys: str, answer: str) -> re.Match[str]:
    """Types, and waits for the answer and the next question."""
    child.send(keys)
    child.expect(answer)
    found: re.Match[str] = child.match
    child.expect(READY)
    return found


def end(child: pexpect.spawn) -> None:
    child.sendeof()
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0


def messages(path: pathlib.Path) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in Session.restore(path, "demo").memo["messages"]]


def test_a_conversation(start: Start, tmp_path: pathlib.Path) -> None:
    """Banner, a paste of several lines as one message, quotes, settings, use per turn, Ctrl-D."""
    kept = tmp_path / "talk.kv"
    child = start("--session", str(kept))
    assert "context 512 tokens" in child.before
    child.send(PASTE.format("first line\rsecond line"))
    child.expect("second line")
    ask(child, "\r", USE)
    child.send('"""a\r')
    ask(child, 'b"""\r', USE)
    ask(child, "/set temperature 0.5\r", "temperature 0.5, top_k 40")
    ask(child, "/set logit-bias 5=-100\r", "logit_bias 5=-100")
    ask(child, "/set max-new-tokens 3\r", "max_new_tokens 3")
    ask(child, "/system Be brief.\r", "system: Be brief.")
    ask(child, "third\r", r"\([1-3] tokens? at")  # a random answer may end before
    ask(child, "/nonsense\r", "/nonsense is unknown")
    end(child)
    said = messages(kept)
    assert said[0] == ("system", "Be brief.")
    assert [text for role, text in said if role == "user"] == ["first line\nsecond line", "a\nb", "third"]


def test_keys_and_signs(start: Start, tmp_path: pathlib.Path) -> None:
    """TAB completes commands and files; words are whole at the edge; what was taken back or cleared is said."""
    kept = tmp_path / "talk.kv"
    child = start("--session", str(kept), "--ctx", "64")
    child.setwinsize(40, 24)
    ask(child, "/set max-new-tokens 30\r", "max_new_tokens 30")
    child.send("Tell me of it\r")
    child.expect(r"\(stopped: 30 tokens")
    screen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", child.before)
    shown = re.sub(r"[^\n]*\r(?!\n)", "", screen.replace("\r\r", "\r")).rpartition("Tell me of it")[2].strip()
    child.expect(READY)
    child.send("/sa\t")
    child.expect("/save")
    ask(child, f" {kept}\r", "tokens")
    assert max(map(len, shown.splitlines())) <= 24
    assert len(shown.splitlines()) > 2
    assert shown.split() == messages(kept)[1][1].split()
    child.send(f"/load {tmp_path}/ta\t")
    child.expect("lk.kv")
    ask(child, "\r", "2 messages")
    ask(child, "So?\r", "the context was full: the 2 oldest messages left it")
    ask(child, "word " * 70 + "\r", "shorten it")
    ask(child, "/undo\r", r"\(taken back: So\?\)")
    ask(child, "/clear\r", r"\(cleared\)")
    ask(child, "/undo\r", "no question")
    child.send("/quit\r")
    child.expect(pexpect.EOF)


WORDS = "A line of *words*, 日本語 too:\n  - one\n```\nint main() { return 0; }  // as it is\n```\n"
WORDS += "http://a-long-name.example/x y"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_words_are_whole_at_the_edge(size: int) -> None:
    """However the text is cut: other white space stays, code too; a word longer than the line is not held back."""
    wrapped = Wrapped(lambda: 14)
    pieces = [wrapped.push(WORDS[i : i + size]) for i in range(0, len(WORDS), size)]
    assert len("".join(pieces)) >= len(WORDS) - 14
    shown = WORDS.replace(" of ", " of\n").replace("日本", "日本\n").replace("/x ", "/x\n")
    assert "".join([*pieces, wrapped.push("", last=True)]) == shown


def test_what_was_typed_comes_back_as_it_was(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    """Errors have the words of the command; a path is no command, and a second slash lets any text be one."""
    chat = Chat(Session.load("demo", ctx=64))
    terminal = Terminal(chat, argparse.Namespace(max_new_tokens=4, stop=[]), SamplingParams())
    terminal.run(["/system use temperature=0.7 and `ctx`", "/history", "/set temperature -1"])
    said = capsys.readouterr().err.splitlines()
    assert said[-3:-1] == ["system: use temperature=0.7 and `ctx`"] * 2
    assert said[-1].startswith("error: /set temperature -1: accepted: a number")
    file = tmp_path / "talk.kv"
    words = ["--top-k x", "temp", "-temperature hot"]
    terminal.run(["/etc/fstab is", "//help", "/hepl", *(f"/set {each}" for each in words), "/image a.png"])
    terminal.run(["/set top_k 3", "/set max_new_tokens 9", "/set top_k default", "/set max-new-tokens default"])
    terminal.run([f"/save {file}", f"/save {file}", "/system none", "/system"])
    said = capsys.readouterr().err.splitlines()
    assert [m["content"] for m in chat.messages if m["role"] == "user"] == ["/etc/fstab is", "/help"]
    errors = [line for line in said if line.startswith("error: ")]
    ends = ["did you mean /help?", " /set top_k x: accepted: a number", "did you mean temperature?"]
    ends += [" /set temperature hot: accepted: a number", "take a model that does, such as scenes"]
    assert all(error.endswith(end) for error, end in zip(errors, ends, strict=True))
    shown = [re.findall(r"(?:top_k|tokens) (\d+)", line) for line in said if line.startswith("temperature ")]
    assert shown[-4:] == [["3", "4"], ["3", "9"], ["40", "9"], ["40", "4"]]
    assert [line.endswith(" in place of the session that was there") for line in said[-4:-2]] == [False, True]
    assert said[-2:] == ["there is no system message"] * 2
    terminal = Terminal(chat, argparse.Namespace(max_new_tokens=None, stop=[]), SamplingParams())
    # Of 32, half of the context.
    for line, n in (("top_k 3", 32), ("max_new_tokens 9", 9), ("top_k 4", 9), ("max_new_tokens default", 32)):
        terminal.run([f"/set {line}"])
        assert terminal.max_new_tokens == n


def test_lines_are_remembered_for_this_user_alone(start: Start) -> None:
    first = start()
    ask(first, "remember me\r", USE)
    end(first)
    assert history_file().stat().st_mode & 0o777 == 0o600
    second = start()
    ask(second, "\x1b[A\r", USE)  # the key upwards brings it back
    ask(second, "/history\r", "user: remember me")
    second.send("half a line")
    second.expect("half a line")
    second.sendcontrol("c")  # abandons it, and nothing else
    second.expect(READY)
    end(second)


def test_images_stay_through_later_turns(tmp_path: pathlib.Path) -> None:
    """A later turn reads what a new conversation would, image and all."""
    Image.new("RGB", (128, 128), "blue").save(tmp_path / "blue.png")
    session, file = Session.load("scenes", ctx=1024), tmp_path / "blue.png"
    chat = Chat(session)
    terminal = Terminal(chat, argparse.Namespace(max_new_tokens=6, stop=[]), SamplingParams(0.0))
    terminal.run([f"/image {file}.none", f"/image {file}", "Describe the picture.", "Again."])
    assert len(embedding_spans(session)) == 1
    fresh = Chat(session.fork())
    fresh.messages.extend(json.loads(json.dumps(chat.messages[:2])))
    list(fresh.ask("Again.", max_new_tokens=6, sampling=SamplingParams(0.0)))
    assert fresh.messages == chat.messages
    assert fresh.session.tokens == session.tokens


def test_how_a_model_wants_to_be_sampled(tmp_path: pathlib.Path) -> None:
    from edgekv.engine.model import Model

    folder = golden_cases.write_checkpoint("llama31", tmp_path / "model")
    assert Model.open(folder).sampling.temperature == 0.7
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}))
    params = Model.open(folder).sampling
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 20, 0.95, 0.05)
    file.write_text('{"do_sample": false, "temperature": 0.6}')
    assert Model.open(folder / "model.safetensors").sampling.temperature == 0
    for text in ('{"temperature": "hot"}', '{"top_p": 2}', "[", '{"temperature": -1}', '{"top_k": -1}'):
        file.write_text(text)
        with raises(EdgeKVError, match=r"generation_config\.json"):
            _ = Model.open(folder).sampling
    assert Model.open("demo").sampling.repetition_penalty == 1.1
