"""`edgekv board`: all is measured, kept at once and continued; files are checked; documents are current."""

import json
import pathlib
import time

import msgspec
import power_trees as trees
import pytest
from helpers import Cli, raises

from edgekv.errors import ConfigError
from edgekv.eval import board as measuring
from edgekv.eval.board import FULL, NO_TIME, QUICK, Bandwidth, Board, Decode, Period, Prompt, Run, page, task_of
from edgekv.power import METERS, find_meter
from edgekv.power.energy import PowerSampler, PowerSource

FASTER = msgspec.structs.replace(QUICK, depths=(0, 70), seconds=0.01, idle_s=0.02)


def new_board() -> Board:
    return Board.new(FASTER, "a test", "none")


def made_up() -> Board:
    """A finished board, each of its measurements half a second after the one before and as long."""
    board, started = new_board(), time.time() - 60
    board.idle = Period(started, 0.4)
    spans = (Period(started + 0.5 * i, 0.4, 51.5, 2400.0, ()) for i in range(1, 100))
    board.measured = [
        Bandwidth(1, 9.5, next(spans)),
        *(
            Decode("tiny", kv, depth, 8, 12.5, 14.0, 8.0, 3.0, 1000, 5000, 10000, next(spans))
            for depth in FASTER.depths
            for kv in FASTER.schemes
        ),
        Prompt("tiny", "dense", 64, 2, 640.0, 10000, next(spans)),
    ]
    return board


def go(board: Board, path: pathlib.Path, seconds: float = 600.0, source: PowerSource | None = None) -> list[str]:
    """Runs the plan once; returns what it told."""
    lines: list[str] = []
    source = source or PowerSource("no meter")
    Run(board, path, source, seconds, lines.append, lambda task, done, total: None).go()
    return lines


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Board, pathlib.Path]:
    """A finished board, and its file."""
    folder = tmp_path_factory.mktemp("board")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        board = new_board()
        assert len(go(board, folder / "board.json")) == len(board.measured)
        # The weights were drawn for this board, and are not needed any more.
        assert list((folder / "cache/edgekv/stores").iterdir()) == []
    return board, folder / "board.json"


@pytest.fixture
def copy(whole: tuple[Board, pathlib.Path]) -> Board:
    return Board.load(whole[1])


def test_everything_of_the_plan_is_measured_and_on_the_page(whole: tuple[Board, pathlib.Path]) -> None:
    board, path = whole
    assert board.left_out == []
    assert {task_of(row) for row in board.measured} == set(FASTER.tasks(board.machine["cores"]))
    assert (len(board.rows(Decode)), len(board.rows(Prompt))) == (4, 1)
    for row in board.measured:
        assert row.span.seconds > 0
        assert time.time() - 3600 < row.span.started < time.time()
        assert isinstance(row, Bandwidth) or row.energy is None
    for row in board.rows(Decode):
        assert 0 < min(row.attention_ms, row.matmul_ms) < row.token_ms <= row.token_ms_p95
        assert 0 < row.cache_bytes < row.peak_memory_bytes
        assert f"| tiny | {row.kv} | {row.depth} | {1e3 / row.token_ms:.2f} |" in page(board)
    assert Board.load(path) == board
    assert go(Board.load(path), path) == []  # nothing is measured again


def test_an_interrupted_run_goes_on(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """Ctrl-C in the third decoding: what was there stays, and the rest comes. Others' files are refused."""
    command = ["board", "--quick", "--output", str(tmp_path), "--about", "on a table"]
    decode, calls = Run.decode, []

    def interrupted(run: Run, *task: str) -> Decode:
        calls.append(task)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return decode(run, *task)

    monkeypatch.setattr("edgekv.cli.board.QUICK", FASTER)
    monkeypatch.setattr(Run, "decode", interrupted)
    cli(*command, status=130)
    (file,) = tmp_path.glob("*.json")
    first = Board.load(file)
    assert len(first.rows(Decode)) == 2
    assert file.with_suffix(".md").read_text() == page(first)
    assert cli(*command).out.split() == [str(file), str(file.with_suffix(".md"))]
    second = Board.load(file)
    assert second.measured[: len(first.measured)] == first.measured
    assert (calls[2], len(calls), len(second.rows(Decode))) == (calls[3], 5, 4)
    assert "on a table" in file.with_suffix(".md").read_text()
    for name, changed in (
        ("plan", msgspec.structs.replace(second, plan=FULL)),
        ("machine", msgspec.structs.replace(second, machine=second.machine | {"ram_bytes": 1})),
    ):
        changed.save(file)
        assert f"another {name}" in cli(*command, status=2).err


def test_what_cannot_be_measured_is_left_out_with_its_reason_and_comes_later(
    copy: Board, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lost = tmp_path / "b.json", copy.measured.pop()
    go(copy, path, seconds=0.0)
    assert [left.why for left in copy.left_out] == [NO_TIME]
    assert f"- {copy.left_out[0].what}: {NO_TIME}" in page(copy)
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "available_memory_bytes", lambda: 1000)
        go(copy, path)
    assert "1000 B is available" in copy.left_out[0].why
    go(copy, path)
    assert copy.left_out == []
    assert task_of(copy.measured[-1]) == task_of(lost)


def test_a_meter_gives_energies(copy: Board, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METERS, "rpi-pmic", trees.Steady)
    copy.measured, copy.idle = copy.rows(Bandwidth), None
    copy.plan = msgspec.structs.replace(copy.plan, seconds=0.5, idle_s=0.5, depths=(0,))
    monkeypatch.setattr(measuring, "MAX_TOKENS", 2000)
    go(copy, tmp_path / "b.json", source=PowerSampler(find_meter()[0]))
    assert copy.idle_w == pytest.approx(4.0)
    known = [row for row in copy.rows(Decode) if row.energy]
    assert known  # on a busy machine the meter may not get its turn within half a second
    for row in known:
        assert row.energy.mj_per_token == pytest.approx(4e3 * row.span.seconds / row.tokens, rel=0.05)
        assert row.energy.net_mj_per_token == pytest.approx(0, abs=0.05 * row.energy.mj_per_token)
        assert f"{row.energy.mj_per_token:.4g}" in page(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format is 2"),
        ({"machine": None}, "'machine' is missing"),
        ({"measured": [{"what": "sundial"}]}, "measured"),
        ("{", ""),
    ],
)
def test_a_foreign_file_is_refused(change: dict[str, object] | str, message: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "board.json"
    made_up().save(path)
    path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    with raises(ConfigError, message):
        Board.load(path)
