"""Kernels are compiled, or loaded, before a text's clock starts, and the time is reported apart."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any
from unittest import mock

import psutil
import pytest
from slot_cases import at_once

from edgekv import Session
from edgekv.engine import cpu as ahead
from edgekv.engine.loading import WARM_UP_TASK
from edgekv.kernels import kernel_cache, weight_codes
from edgekv.kernels.cpu import compile as compiling
from edgekv.kernels.cpu import loops
from edgekv.kvcache import CacheSpec

AFTER_LOADING = """
from edgekv import Session
from edgekv.kernels import kernel_cache
from edgekv.kernels.cpu import loops
kernel_cache.is_warm = lambda what: False
session = Session.load("demo", kv="onebit", ctx=1024, draft="ngram")
met = []
address = loops.loop_address
loops.loop_address = lambda function, *options: met.append(str(function)) or address(function, *options)
for n in (3, 600):
    session.reset()
    list(session.generate([1 + i % 50 for i in range(n)], max_new_tokens=80, temperature=1.0))
print(met)
"""


def test_a_text_needs_no_kernel_that_loading_has_not_met() -> None:
    """Neither compiled nor loaded from the disk: short prompts and long ones, drafts, blocks that are packed."""
    run = subprocess.run([sys.executable, "-c", AFTER_LOADING], capture_output=True, text=True)
    assert (run.stdout.strip(), run.returncode) == ("[]", 0), run.stderr


def test_loading_says_what_it_does(model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "is_warm", lambda what: False)
    seen = []
    session = Session.load(model, progress=lambda *told: seen.append(told))
    steps = [(done, total) for task, done, total in seen if task == WARM_UP_TASK]
    assert steps == [(i, len(steps) - 1) for i in range(len(steps))]
    assert len(steps) > 5
    report = session.report()
    report.compile_s = 12.34
    assert report.as_dict()["compile_s"] == 12.34


def test_what_was_compiled_is_remembered_until_the_sources_change(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache, "folder", lambda: tmp_path)
    assert not kernel_cache.is_warm("a scheme")
    kernel_cache.mark_warm("a scheme")
    assert kernel_cache.is_warm("a scheme")
    assert not kernel_cache.is_warm("another")
    kernel_cache.remove_outdated(str(tmp_path), "other sources")
    assert not kernel_cache.is_warm("a scheme")
    monkeypatch.setattr(kernel_cache, "_digest", set)
    files = {pathlib.Path(module.__file__) for module in (loops, weight_codes)}
    assert files <= kernel_cache.sources.__wrapped__()


def test_a_second_process_ends_with_the_first(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "folder", lambda: tmp_path)
    monkeypatch.setattr(ahead, "all_cores", lambda: 2)
    this = psutil.Process()
    n = len(this.children())

    def interrupted() -> None:
        with ahead.CpuBackend.precompiling(CacheSpec.parse("dense")):
            assert len(this.children()) == n + 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(this.children()) == n
    assert not list(tmp_path.glob(f"{kernel_cache.WARM}*"))


def test_a_loop_is_compiled_once_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function without a file, since another's would be loaded."""
    begun, names, compile_loop = [], dict[str, Any](), compiling.compile_loop
    monkeypatch.setattr(compiling, "compile_loop", lambda *given: begun.append(given) or compile_loop(*given))
    exec("def nothing(number): return", names)
    loop = loops.Loop(names["nothing"])

    def call() -> int:
        loop.call(1)
        return loop.address

    assert len(set(at_once([call] * 4))) == 1
    assert len(begun) == 1


def nothing(number: int) -> None:
    return


def test_what_an_older_process_compiles_is_not_taken_by_a_newer_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still run when the folder has become that of other sources. A damaged file is compiled again."""
    compile_loop = mock.Mock(side_effect=compiling.compile_loop)
    monkeypatch.setattr(kernel_cache, "folder", lambda: tmp_path)
    monkeypatch.setattr(kernel_cache, "remove_outdated", lambda folder, sources: None)
    monkeypatch.setattr(compiling, "compile_loop", compile_loop)

    def n_compiled(sources: str) -> int:
        monkeypatch.setattr(kernel_cache, "sources", lambda: sources)
        loops.Loop(nothing).call(1)
        return compile_loop.call_count

    assert [n_compiled(sources) for sources in ("old", "new", "old", "new")] == [1, 2, 2, 2]
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:-50])
    assert [n_compiled("new"), n_compiled("new")] == [3, 3]
