"""`edgekv board`: all is measured, kept at once and continued; what does not fit is left out with its reason."""

import pathlib
import time

import msgspec
import power_trees as trees
import pytest
from board_cases import FASTER, keys, new_board

from edgekv.board import measure
from edgekv.board import run as board_run
from edgekv.board.energy import Metering
from edgekv.board.page import page
from edgekv.board.plan import FULL, steps
from edgekv.board.record import (
    Bandwidth,
    Board,
    Decode,
    Prompt,
    Span,
    ThreadsRow,
    load,
    save,
)
from edgekv.board.run import NO_TIME, Run
from edgekv.cli import main
from edgekv.errors import ConfigError
from edgekv.power import METERS


def go(board: Board, path: pathlib.Path, seconds: float = 600.0) -> list[str]:
    """One run; returns what it told."""
    lines: list[str] = []
    Run(board, path, Metering(), seconds, lines.append, lambda task, done, total: None).go()
    return lines


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Board, pathlib.Path]:
    """A finished board, and its file."""
    folder = tmp_path_factory.mktemp("board")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        board = new_board()
        go(board, folder / "board.json")
        assert (
            list((folder / "cache/edgekv/stores").iterdir()) == []
        )  # drawn for this board, and not needed any more
    return board, folder / "board.json"


@pytest.fixture
def copy(whole: tuple[Board, pathlib.Path]) -> Board:
    return load(whole[1])


def test_everything_of_the_plan_is_measured(whole: tuple[Board, pathlib.Path]) -> None:
    board, path = whole
    assert board.finished
    assert board.left_out == []
    assert board.attempts == {}
    cores = board.machine.cores
    assert {m.key for m in board.measured} == keys(board)
    kinds = [type(m) for m in board.measured]
    assert kinds.count(Decode) == 4
    assert kinds.count(Prompt) == 1
    assert kinds.count(ThreadsRow) >= 1
    assert kinds.count(Bandwidth) >= min(cores, 2)
    for m in board.measured:
        assert 0 < m.span.seconds <= m.span.took_s
        assert 0 <= m.span.others <= 1
        assert time.time() - 3600 < m.span.started < time.time()
        if isinstance(m, Decode):
            assert 0 < m.attention_ms < m.token_ms
            assert 0 < m.matmul_ms < m.token_ms
            assert m.token_ms_best <= m.token_ms <= m.token_ms_p95
            assert 0 < m.cache_bytes < m.peak_memory_bytes
            assert m.energy is None
        if isinstance(m, Prompt):
            assert m.first_token_s > m.tokens / m.tokens_per_s
    assert load(path) == board


def test_the_page_has_every_figure(whole: tuple[Board, pathlib.Path]) -> None:
    text = page(whole[0])
    for m in whole[0].measured:
        if isinstance(m, (Decode, ThreadsRow)):
            assert f" {1e3 / m.token_ms:.2f} |" in text
        elif isinstance(m, Prompt):
            assert f"| {m.tokens_per_s:.1f} | {m.first_token_s:.2f} s |" in text
        else:
            assert f"| {m.threads} | {m.gb_per_s:.1f} |" in text
    assert "a smoke test" in text.lower()
    assert "a test" in text
    assert "Left out" not in text


def test_a_finished_board_measures_nothing_again(copy: Board, tmp_path: pathlib.Path) -> None:
    before = list(copy.measured)
    assert go(copy, tmp_path / "b.json") == []
    assert copy.measured == before


def test_an_interrupted_run_goes_on(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the third decoding: what was there stays as it was, and the rest comes."""
    command = ["board", "--quick", "--output", str(tmp_path), "--about", "on a table"]
    decode, calls = measure.decode, []

    def interrupted(opened: object, kv: str, depth: int, *more: object) -> object:
        calls.append((kv, depth))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return decode(opened, kv, depth, *more)

    monkeypatch.setattr("edgekv.cli.board.QUICK", FASTER)
    monkeypatch.setattr(measure, "decode", interrupted)
    assert main(command) == 130
    (file,) = tmp_path.glob("*.json")
    first = load(file)
    assert not first.finished
    assert first.attempts == {}
    assert len([m for m in first.measured if isinstance(m, Decode)]) == 2
    assert file.with_suffix(".md").read_text() == page(first)
    assert main(command) == 0
    second = load(file)
    assert second.measured[: len(first.measured)] == first.measured
    assert second.finished
    assert calls[2] == calls[3]
    assert len(calls) == 5
    out = capsys.readouterr()
    assert out.out.split() == [str(file), str(file.with_suffix(".md"))]
    assert "on a table" in file.with_suffix(".md").read_text()


def test_what_killed_two_runs_is_left_out(copy: Board, tmp_path: pathlib.Path) -> None:
    lost = next(m for m in copy.measured if isinstance(m, Decode) and m.kv == "onebit")
    copy.measured.remove(lost)
    copy.attempts = {lost.key: 2}
    go(copy, tmp_path / "b.json")
    assert [(left.what, "2 runs ended" in left.why) for left in copy.left_out] == [(lost.key, True)]
    assert copy.finished
    assert lost.key in page(copy)


def test_a_killed_process_leaves_a_count(copy: Board, tmp_path: pathlib.Path) -> None:
    """The file names what was under way, as nothing can be written afterwards."""
    lost = copy.measured.pop()
    path, seen = tmp_path / "b.json", []

    def look(*arguments: object) -> None:
        seen.append(load(path).attempts)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "decode", look)
        with pytest.raises(KeyboardInterrupt):
            go(copy, path)
    assert seen == [{lost.key: 1}]
    assert load(path).attempts == {}


def test_without_time_the_rest_is_left_out_and_comes_later(copy: Board, tmp_path: pathlib.Path) -> None:
    lost = copy.measured.pop()
    go(copy, tmp_path / "b.json", seconds=0.0)
    assert [(left.what, left.why) for left in copy.left_out] == [(lost.key, NO_TIME)]
    assert not copy.finished
    assert f"- {NO_TIME}: {lost.key}" in page(copy)
    go(copy, tmp_path / "b.json")
    assert copy.find(lost.key) is not None
    assert copy.finished


def test_without_memory_the_bytes_are_named(
    copy: Board, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy.measured.pop()
    monkeypatch.setattr(board_run, "available_memory_bytes", lambda: 1000)
    go(copy, tmp_path / "b.json")
    (left,) = copy.left_out
    assert left.why.startswith("needs ")
    assert left.why.endswith("of memory, 1000 B is free")


def test_an_error_is_a_reason(copy: Board, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy.measured = [m for m in copy.measured if not isinstance(m, Decode)]

    def full(*arguments: object) -> None:
        raise ConfigError("the disk is full")

    monkeypatch.setattr(measure, "decode", full)
    go(copy, tmp_path / "b.json")
    assert {left.why for left in copy.left_out} == {"the disk is full"}
    assert len(copy.left_out) == 4
    assert copy.attempts == {}


def test_time_is_estimated_by_the_weights(copy: Board, tmp_path: pathlib.Path) -> None:
    plan = msgspec.structs.replace(FULL, shapes=("qwen3-0.6b", "llama3.1-8b"))
    span = Span(0.0, 3.0, 10.0, None, None, None, 0.0)
    row = next(m for m in copy.measured if isinstance(m, Decode))
    row = msgspec.structs.replace(row, shape="qwen3-0.6b", kv="dense", depth=2048, span=span)
    board = msgspec.structs.replace(copy, plan=plan, measured=[row], shapes=[])
    job = Run(board, tmp_path / "b.json", Metering(), 1.0, print, lambda *arguments: None)
    ratio = measure.weights_bytes("llama3.1-8b", plan) / measure.weights_bytes("qwen3-0.6b", plan)
    (step,) = [s for s in steps(plan, 4) if s.key == "llama3.1-8b, dense at 2048"]
    assert job._estimate(step) == pytest.approx(10 * ratio)


def test_a_meter_gives_energies(copy: Board, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METERS, "rpi-pmic", trees.Steady)
    copy.measured, copy.idle = [m for m in copy.measured if not isinstance(m, (Decode, Prompt))], None
    copy.plan = msgspec.structs.replace(copy.plan, seconds=0.5, idle_s=0.5)
    monkeypatch.setattr(measure, "MOST_TOKENS", 2000)
    monkeypatch.setattr(measure, "MOST_PROMPTS", 200)
    go(copy, tmp_path / "b.json")
    assert copy.idle is not None
    assert copy.idle.watts == pytest.approx(4.0)
    rows = [m for m in copy.measured if isinstance(m, (Decode, Prompt))]
    assert len(rows) == 5
    known = [m for m in rows if m.energy]  # on a busy machine the meter may not get its turn within half a second
    assert known
    for m in known:
        assert m.energy is not None
        tokens = m.tokens * m.runs if isinstance(m, Prompt) else m.tokens
        assert m.energy.mj_per_token == pytest.approx(4e3 * m.span.seconds / tokens, rel=0.05)
        assert m.energy.net_mj_per_token == pytest.approx(0, abs=0.05 * m.energy.mj_per_token)
        assert f"{m.energy.mj_per_token:.4g}" in page(copy)


def test_another_machine_or_plan_is_not_continued(
    copy: Board, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["board", "--quick", "--output", str(tmp_path)]
    save(copy, tmp_path / f"{copy.slug}.json")
    assert main(command) == 2
    assert "another plan" in capsys.readouterr().err
    copy.machine = msgspec.structs.replace(copy.machine, ram_bytes=1)
    save(copy, tmp_path / f"{copy.slug}.json")
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "another machine" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--minutes", "0"], "accepted are minutes above 0"),
        (["--shape", "llama9"], "no such shape"),
        (["--power", "sundial"], "accepted: auto"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], message: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["board", "--output", str(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
