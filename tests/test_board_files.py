"""Boards as files: what is written is read again, documents are current, and what others wrote is checked."""

import json
import pathlib
import subprocess
import sys
import time

import msgspec
import power_trees as trees
import pytest
from board_cases import made_up

from edgekv.board import measure
from edgekv.board.energy import with_log
from edgekv.board.page import page
from edgekv.board.plan import FULL, steps
from edgekv.board.record import Board, Decode, Prompt, json_schema, load, save
from edgekv.board.surroundings import Watch, surroundings
from edgekv.errors import ConfigError, PowerError

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def board() -> Board:
    return made_up()


def test_what_is_written_is_read_again(board: Board, tmp_path: pathlib.Path) -> None:
    save(board, tmp_path / "board.json")
    assert load(tmp_path / "board.json") == board


def test_a_page_warns_of_what_spoils_its_figures(board: Board) -> None:
    assert "was shared" not in page(board)
    assert "| throttling | none |" in page(board)
    for i, m in enumerate(board.measured):
        span = msgspec.structs.replace(m.span, others=0.3, throttling=("under-voltage",) if i == 2 else ())
        board.measured[i] = msgspec.structs.replace(m, span=span)
    assert "was shared: other programs took 30% of the cores' time" in page(board)
    assert "| throttling | under-voltage |" in page(board)


def test_small_shapes_come_first_and_each_with_its_most_telling_rows() -> None:
    order = [step.key for step in steps(FULL, 4)]
    assert order[:4] == [f"qwen3-0.6b, {n}" for n in ("4 threads", "3 threads", "2 threads", "1 thread")]
    assert order[4:7] == [
        "qwen3-0.6b, dense at 0",
        "qwen3-0.6b, dense, prompt of 512",
        "qwen3-0.6b, dense at 2048",
    ]
    shapes = list(dict.fromkeys(key.partition(",")[0] for key in order))
    assert shapes == list(FULL.shapes)
    assert len(order) == 4 + 6 * (5 * 3 + 1)
    sizes = [measure.weights_bytes(shape, FULL) for shape in FULL.shapes]
    assert sizes == sorted(sizes)


def test_a_log_gives_energies_afterwards(board: Board, tmp_path: pathlib.Path) -> None:
    assert board.idle is not None
    begun, ended = board.idle.started - 1, max(m.span.started + m.span.seconds for m in board.measured) + 1
    log = tmp_path / "log.csv"
    n = int((ended - begun) * 200)
    log.write_text("time,watts\n" + "".join(f"{begun + i / 200:.4f},2.5\n" for i in range(n)))
    with_log(board, log)
    assert board.meter.startswith("csv: ")
    rows = [m for m in board.measured if isinstance(m, (Decode, Prompt))]
    assert rows
    for m in rows:
        tokens = m.tokens * m.runs if isinstance(m, Prompt) else m.tokens
        assert m.energy is not None
        assert m.energy.mj_per_token == pytest.approx(2500 * m.span.seconds / tokens, rel=1e-3)
    log.write_text("time,watts\n1000000000,2.5\n1000000001,2.5\n")
    with pytest.raises(PowerError, match="covers none"):
        with_log(board, log)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format is 2"),
        ({"machine": None}, "'machine' is missing"),
        ({"measured": [{"what": "sundial"}]}, "measured"),
        ({"measured": [{"what": "bandwidth", "threads": 0, "gb_per_s": 1, "span": {}}]}, "threads"),
        ({"finished": "yes"}, "finished is 'yes'"),
    ],
)
def test_a_foreign_file_is_refused_in_a_line(
    change: dict[str, object], message: str, board: Board, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "board.json"
    save(board, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError) as raised:
        load(path)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_what_is_no_board_is_refused(text: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "board.json").write_text(text)
    with pytest.raises(ConfigError):
        load(tmp_path / "board.json")


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
    found = surroundings("on a desk", tmp_path)
    assert found.cooling == ("pwmfan at 2900 rpm", "pwm-fan in state 1 of 4")
    assert found.clocks == ("cores 0 1 2 3: ondemand, 1500 to 2400 MHz",)
    assert found.about == "on a desk"
    empty = surroundings("", tmp_path / "nothing")
    assert (empty.cooling, empty.clocks) == ((), ())


def test_only_other_programs_count_as_others() -> None:
    watch = Watch()
    busy = subprocess.Popen(
        [sys.executable, "-c", "while True: pass"]
    )  # a child, counted with us once it has ended
    try:
        time.sleep(0.5)
        while_running = watch.others()
    finally:
        busy.kill()
        busy.wait()
    assert 0 < while_running <= 1


def test_documents_are_current() -> None:
    """Every page, the table and the schema, of the JSON files in docs/boards."""
    done = subprocess.run(
        [sys.executable, "tools/boards_table.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_schema_describes_the_file(board: Board, tmp_path: pathlib.Path) -> None:
    save(board, tmp_path / "board.json")
    schema = json.loads((ROOT / "docs" / "boards" / "schema.json").read_text())
    assert schema == json.loads(json.dumps(json_schema()))
    fields = {field.name for field in msgspec.structs.fields(Decode) if field.required}
    assert set(schema["$defs"]["Decode"]["required"]) == {"what", *fields}
    assert set(json.loads((tmp_path / "board.json").read_text())) == set(schema["$defs"]["Board"]["properties"])
