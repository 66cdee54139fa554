"""The examples run as they stand."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import golden_cases
import numpy as np
import pexpect
import pytest
from helpers import n_cached
from serving import ROOT

from edgekv import Session
from edgekv.errors import ContextError

EXAMPLES = ROOT / "examples"


def run(*command: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def endless(tmp_path: pathlib.Path) -> pathlib.Path:
    """A model whose answers end only where they are stopped: no text has its end-of-text token."""
    folder = shutil.copytree(ROOT / "models" / "demo", tmp_path / "demo")
    sampling = {"do_sample": False, "repetition_penalty": 1.1, "eos_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(sampling))
    return folder


def test_notes_are_summarised_once(tmp_path: pathlib.Path) -> None:
    for i, text in enumerate(["Call the doctor about the horse.", "Buy bread and candles for the long winter."]):
        (tmp_path / f"note{i}.txt").write_text(text)
    first = run(EXAMPLES / "summarise_notes.py", tmp_path, "--words", 8).stdout
    assert len(first.splitlines()) == 2
    for i in range(2):
        summary = (tmp_path / f"note{i}.summary").read_text()
        assert summary.strip()
        assert summary.count("\n") == 1
        assert f"note{i}.txt: {summary}" in first
    assert run(EXAMPLES / "summarise_notes.py", tmp_path).stdout == ""


def test_a_cancelled_task_leaves_a_usable_session(endless: pathlib.Path) -> None:
    said = run(EXAMPLES / "async_stream.py", "--seconds", 0.5, "--model", endless).stdout
    cancelled = re.search(r"\(stopped after (\d+) tokens\)\s+\S", said)
    assert cancelled
    assert 0 < int(cancelled[1]) < 2000


def test_an_app_goes_on_where_it_was_left(endless: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """On the second start, on a terminal with Ctrl-C, after a damaged file, and without a model."""
    app, file = EXAMPLES / "app.py", tmp_path / "app.kv"
    assert len(app.read_text().splitlines()) <= 60
    command = [sys.executable, str(app), "--file", str(file), "--model", str(endless)]

    def start(*more: str, said: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], input=said, capture_output=True, text=True, timeout=300, cwd=ROOT)

    first = start(said="Who are you?\n" + "word " * 5000 + "\n\n")
    assert first.returncode == 0, first.stderr
    assert "shorten the message" in first.stderr
    assert len(first.stdout) > 10
    child = pexpect.spawn(command[0], command[1:], encoding="utf-8", timeout=60, cwd=str(ROOT), echo=False)
    child.expect("> ")
    child.sendline("Tell a long story.")
    child.expect(r"\w+ \w+ ")
    child.sendintr()
    child.expect("> ")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0
    memo = Session.restore(file, endless).memo["messages"]
    assert [message["role"] for message in memo] == ["system", *["user", "assistant"] * 2]
    assert memo[1]["content"] == "Who are you?"
    file.write_bytes(file.read_bytes()[:-9])
    again = start(said="")
    assert again.returncode == 0
    assert "a new conversation, since" in again.stderr
    missing = start("--model", str(tmp_path / "nothing"), said="")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("name", ["llama31", "gpt2"])
def test_embeddings_are_the_states_behind_the_final_norm(name: str, tmp_path: pathlib.Path) -> None:
    folder = golden_cases.write_checkpoint(name, tmp_path)
    session, tokens = Session.load(folder), golden_cases.tokens(name)[:20]
    session.logits(tokens[:5])
    vector = session.embed(tokens)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    assert (n_cached(session), session.tokens) == (5, tokens[:5])
    head = session.model.weights.matrix("head")
    logits = Session.load(folder, kv="dense").logits(tokens).mean(axis=0)
    scaled = head @ vector
    np.testing.assert_allclose(scaled / np.linalg.norm(scaled), logits / np.linalg.norm(logits), atol=1e-4)
    with pytest.raises(ContextError, match="accepted: 1 to"):
        session.embed([1] * 65)
