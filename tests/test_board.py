"""`edgekv board`: all is measured, kept at once and continued; files are checked; documents are current."""

import json
import pathlib
import subprocess
import sys
import time

import msgspec
import power_trees as trees
import pytest

from edgekv.cli import main
from edgekv.errors import ConfigError, PowerError
from edgekv.power import METERS, conditions
from edgekv.power import board as measuring
from edgekv.power.board import (
    FULL,
    NO_TIME,
    QUICK,
    Bandwidth,
    Board,
    Decode,
    Idle,
    Measured,
    Plan,
    Prompt,
    Run,
    Shape,
    Span,
    Step,
    add_log,
    open_meter,
)
from edgekv.power.board_page import page

ROOT = pathlib.Path(__file__).resolve().parent.parent


FASTER = msgspec.structs.replace(QUICK, depths=(0, 70), seconds=0.01, idle_s=0.02)


def new_board(plan: Plan = FASTER) -> Board:
    return Board.new(plan, "a test", "none")


def made_up() -> Board:
    """A finished board, each of its measurements half a second after the one before and as long."""
    board, started = new_board(), time.time() - 60
    board.idle = Idle(started, 0.4, None, 0.0)
    span = Span(started, 0.4, 0.5, 51.5, 2400.0, (), 0.02)
    decoded = [
        Decode("tiny", kv, depth, 8, 12.5, 12.0, 14.0, 8.0, 3.0, 1000, 5000, 10000, span)
        for depth in FASTER.depths
        for kv in FASTER.schemes
    ]
    rows: list[Measured] = [
        *(Bandwidth(1, 9.5, span), Bandwidth(2, 12.25, span)),
        *(*decoded, Prompt("tiny", "dense", 64, 2, 640.0, 0.11, 10000, span)),
    ]
    spans = [msgspec.structs.replace(span, started=started + 0.5 * (i + 1)) for i in range(len(rows))]
    board.measured = [msgspec.structs.replace(row, span=own) for row, own in zip(rows, spans, strict=True)]
    board.shapes = [Shape("tiny", 5000, 2, 2, 2, 0.5)]
    board.finished = True
    return board


def go(board: Board, path: pathlib.Path, seconds: float = 600.0) -> list[str]:
    """One run; returns what it told."""
    lines: list[str] = []
    Run(board, path, open_meter()[0], seconds, lines.append, lambda task, done, total: None).go()
    return lines


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Board, pathlib.Path]:
    """A finished board, and its file."""
    folder = tmp_path_factory.mktemp("board")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        board = new_board()
        go(board, folder / "board.json")
        # The weights were drawn for this board, and are not needed any more.
        assert list((folder / "cache/edgekv/stores").iterdir()) == []
    return board, folder / "board.json"


@pytest.fixture
def copy(whole: tuple[Board, pathlib.Path]) -> Board:
    return Board.load(whole[1])


def test_everything_of_the_plan_is_measured_and_on_the_page(whole: tuple[Board, pathlib.Path]) -> None:
    board, path = whole
    assert board.finished
    assert board.left_out == []
    assert {m.step for m in board.measured} == set(board.plan.steps(board.machine.cores))
    kinds = [type(m) for m in board.measured]
    assert (kinds.count(Decode), kinds.count(Prompt)) == (4, 1)
    text = page(board)
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
            assert f"| {m.tokens_per_s:.1f} | {m.first_token_s:.2f} s |" in text
        elif isinstance(m, Bandwidth):
            assert f"| {m.threads} | {m.gb_per_s:.1f} |" in text
        else:
            assert f" {1e3 / m.token_ms:.2f} |" in text
    assert "a smoke test" in text.lower()
    assert "a test" in text
    assert "Left out" not in text
    assert Board.load(path) == board
    assert go(Board.load(path), path) == []  # nothing is measured again


def test_an_interrupted_run_goes_on(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the third decoding: what was there stays as it was, and the rest comes."""
    command = ["board", "--quick", "--output", str(tmp_path), "--about", "on a table"]
    measure, calls = Run.measure, []

    def interrupted(run: Run, step: Step) -> tuple[Measured, str]:
        if step.what == "decode":
            calls.append(step)
            if len(calls) == 3:
                raise KeyboardInterrupt
        return measure(run, step)

    monkeypatch.setattr("edgekv.cli.board.QUICK", FASTER)
    monkeypatch.setattr(Run, "measure", interrupted)
    assert main(command) == 130
    (file,) = tmp_path.glob("*.json")
    first = Board.load(file)
    assert not first.finished
    assert len([m for m in first.measured if isinstance(m, Decode)]) == 2
    assert file.with_suffix(".md").read_text() == page(first)
    assert main(command) == 0
    second = Board.load(file)
    assert second.measured[: len(first.measured)] == first.measured
    assert second.finished
    assert (calls[2], len(calls)) == (calls[3], 5)
    assert capsys.readouterr().out.split() == [str(file), str(file.with_suffix(".md"))]
    assert "on a table" in file.with_suffix(".md").read_text()


def test_without_time_the_rest_is_left_out_and_comes_later(copy: Board, tmp_path: pathlib.Path) -> None:
    lost = copy.measured.pop()
    go(copy, tmp_path / "b.json", seconds=0.0)
    assert [(left.what, left.why) for left in copy.left_out] == [(lost.step.text, NO_TIME)]
    assert not copy.finished
    assert f"- {NO_TIME}: {lost.step.text}" in page(copy)
    go(copy, tmp_path / "b.json")
    assert copy.measured[-1].step == lost.step
    assert copy.finished


def test_what_cannot_be_measured_is_left_out_with_its_reason(
    copy: Board, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy.measured.pop()
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "available_memory_bytes", lambda: 1000)
        go(copy, tmp_path / "b.json")
    (left,) = copy.left_out
    assert left.why.startswith("needs ")
    assert left.why.endswith("of memory, 1000 B is free")

    def full(run: Run, step: Step) -> None:
        raise ConfigError("the disk is full")

    monkeypatch.setattr(Run, "measure", full)
    copy.measured = [m for m in copy.measured if not isinstance(m, Decode)]
    go(copy, tmp_path / "b.json")
    assert [left.why for left in copy.left_out] == 4 * ["the disk is full"]


def test_a_meter_gives_energies(copy: Board, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METERS, "rpi-pmic", trees.Steady)
    copy.measured, copy.idle = [m for m in copy.measured if not isinstance(m, (Decode, Prompt))], None
    copy.plan = msgspec.structs.replace(copy.plan, seconds=0.5, idle_s=0.5)
    monkeypatch.setattr(measuring, "MOST_TOKENS", 2000)
    monkeypatch.setattr(measuring, "MOST_PROMPTS", 200)
    go(copy, tmp_path / "b.json")
    assert copy.idle.watts == pytest.approx(4.0)
    rows = [m for m in copy.measured if isinstance(m, (Decode, Prompt))]
    assert len(rows) == 5
    known = [m for m in rows if m.energy]  # on a busy machine the meter may not get its turn within half a second
    assert known
    for m in known:
        tokens = m.tokens * m.runs if isinstance(m, Prompt) else m.tokens
        assert m.energy.mj_per_token == pytest.approx(4e3 * m.span.seconds / tokens, rel=0.05)
        assert m.energy.net_mj_per_token == pytest.approx(0, abs=0.05 * m.energy.mj_per_token)
        assert f"{m.energy.mj_per_token:.4g}" in page(copy)


def test_a_log_gives_energies_afterwards(tmp_path: pathlib.Path) -> None:
    board = made_up()
    begun, ended = board.idle.started - 1, max(m.span.started + m.span.seconds for m in board.measured) + 1
    log = tmp_path / "log.csv"
    n = int((ended - begun) * 200)
    log.write_text("time,watts\n" + "".join(f"{begun + i / 200:.4f},2.5\n" for i in range(n)))
    add_log(board, log)
    assert board.meter.startswith("csv: ")
    rows = [m for m in board.measured if isinstance(m, (Decode, Prompt))]
    assert rows
    for m in rows:
        tokens = m.tokens * m.runs if isinstance(m, Prompt) else m.tokens
        assert m.energy.mj_per_token == pytest.approx(2500 * m.span.seconds / tokens, rel=1e-3)
    log.write_text("time,watts\n1000000000,2.5\n1000000001,2.5\n")
    with pytest.raises(PowerError, match="covers none"):
        add_log(board, log)


def test_bad_input_is_one_line(copy: Board, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another machine or plan is not continued."""

    def refusal(*options: str) -> str:
        assert main(["board", "--output", str(tmp_path), *options]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return str(error)

    assert "accepted are minutes above 0" in refusal("--minutes", "0")
    assert "no such shape" in refusal("--shape", "llama9")
    assert "accepted: auto" in refusal("--power", "sundial")
    assert list(tmp_path.iterdir()) == []
    for message in ("another plan", "another machine"):
        copy.save(tmp_path / f"{copy.slug}.json")
        assert message in refusal("--quick")
        copy.machine = msgspec.structs.replace(copy.machine, ram_bytes=1)


def test_a_page_warns_of_what_spoils_its_figures() -> None:
    board = made_up()
    assert "was shared" not in page(board)
    assert "| throttling | none |" in page(board)
    for i, m in enumerate(board.measured):
        span = msgspec.structs.replace(m.span, others=0.3, throttling=("under-voltage",) if i == 2 else ())
        board.measured[i] = msgspec.structs.replace(m, span=span)
    assert "was shared: other programs took 30% of the cores' time" in page(board)
    assert "| throttling | under-voltage |" in page(board)


def test_small_shapes_come_first_and_each_with_its_most_telling_rows() -> None:
    order = [step.text for step in FULL.steps(4)]
    assert order[:4] == ["memory, 1 thread", "memory, 2 threads", "memory, 3 threads", "memory, 4 threads"]
    order = order[4:]
    assert order[:2] == ["qwen3-0.6b, dense at 0", "qwen3-0.6b, dense, prompt of 512"]
    assert list(dict.fromkeys(key.partition(",")[0] for key in order)) == list(FULL.shapes)
    assert len(order) == 6 * (5 * 3 + 1)
    sizes = [FULL.weights_bytes(shape) for shape in FULL.shapes]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format is 2"),
        ({"machine": None}, "'machine' is missing"),
        ({"measured": [{"what": "sundial"}]}, "measured"),
        ({"measured": [{"what": "bandwidth", "threads": 0, "gb_per_s": 1, "span": {}}]}, "threads"),
        ({"finished": "yes"}, "finished is 'yes'"),
        ("[]", ""),
        ("{", ""),
    ],
)
def test_a_foreign_file_is_refused_in_a_line(
    change: dict[str, object] | str, message: str, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "board.json"
    made_up().save(path)
    assert Board.load(path).finished
    path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError) as raised:
        Board.load(path)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_cooling_and_clocks_are_read_where_the_system_names_them(tmp_path: pathlib.Path) -> None:
    base = "sys/devices/system/cpu/cpufreq/policy0"
    trees.write_tree(
        tmp_path,
        {
            "sys/class/hwmon/hwmon1/name": "pwmfan\n",
            "sys/class/hwmon/hwmon1/fan1_input": "2900\n",
            "sys/class/thermal/cooling_device0/type": "pwm-fan\n",
            "sys/class/thermal/cooling_device0/cur_state": "1\n",
            "sys/class/thermal/cooling_device0/max_state": "4\n",
            "sys/class/thermal/cooling_device1/type": "cpufreq-cpu0\n",
            f"{base}/affected_cpus": "0 1 2 3\n",
            f"{base}/scaling_governor": "ondemand\n",
            f"{base}/cpuinfo_min_freq": "1500000\n",
            f"{base}/cpuinfo_max_freq": "2400000\n",
        },
    )
    assert conditions.cooling(tmp_path) == ["pwmfan at 2900 rpm", "pwm-fan in state 1 of 4"]
    assert conditions.clock_ranges(tmp_path) == ["cores 0 1 2 3: ondemand, 1500 to 2400 MHz"]
    assert conditions.cooling(tmp_path / "nothing") == conditions.clock_ranges(tmp_path / "nothing") == []


def test_documents_are_current() -> None:
    """Every page and the table, of the JSON files in docs/boards."""
    done = subprocess.run(
        [sys.executable, "tools/docs/tables.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
