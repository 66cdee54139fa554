"""`edgekv power` and `edgekv run --power` as a user meets them, on made-up sensors."""

import csv
import json
import pathlib
import time

import numpy as np
import power_trees as trees
import pytest

from edgekv.cli import main
from edgekv.cli.power import samples_csv
from edgekv.power import METERS
from edgekv.power.energy import Trace, read_log
from edgekv.power.meters import MeterAbsent


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METERS, "rpi-pmic", trees.Steady)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sensor at all, whatever this machine has."""

    def probe(root: object = "/") -> None:
        raise MeterAbsent("not here")

    for kind in METERS.values():
        monkeypatch.setattr(kind, "probe", probe)


# edgekv power


@pytest.mark.usefixtures("steady")
def test_json_and_live(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", "--seconds", "0.3"]) == 0
    assert "rpi-pmic  4.00 W" in capsys.readouterr().out
    assert main(["power", "--json", "--seconds", "0.3"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["meter"]["meter"] == "rpi-pmic"
    assert facts["power"]["average_w"] == pytest.approx(4.0)
    assert facts["power"]["n_samples"] > 1
    assert facts["machine"]["cores"]


@pytest.mark.usefixtures("bare")
def test_without_a_sensor_it_says_n_a_and_never_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", "doctor"]) == 1
    assert "verdict     nothing can be measured here" in capsys.readouterr().out
    assert main(["power", "--seconds", "0.1"]) == 0
    assert "n/a: no power sensor" in capsys.readouterr().out
    assert main(["power", "--json", "--seconds", "0.1"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["power"], facts["meter"]["meter"]) == (None, None)
    assert "no power sensor" in facts["reason"]


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("power --meter sundial", "accepted: auto, rpi-pmic"),
        ("power --meter rapl", "not here"),
        ("power record --csv x.csv -- true", "no power sensor"),
        ("power record", "no command"),
        ("power record -- /no/such/program", "/no/such/program: can't be run"),
        ("power record --csv /no/such/folder/x.csv -- true", "/no/such/folder"),
        ("run --prompt x --power-csv /no/log.csv", "/no/log.csv"),
        ("run --prompt x --power auto --power-idle -1", "idle time"),
        ("run --prompt x --power rapl", "not here; `edgekv power doctor`"),
        ("serve --power sundial", "accepted: auto, rpi-pmic"),
        ("board --minutes 0", "accepted are minutes above 0"),
        ("board --shape llama9", "no such shape"),
        ("board --power sundial", "accepted: auto"),
    ],
)
def test_bad_input(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert message in error


# edgekv power record


@pytest.mark.usefixtures("steady")
def test_record_writes_the_samples_and_passes_the_status_on(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, picture = tmp_path / "log.csv", tmp_path / "watts.svg"
    before = time.time()
    command = ["sh", "-c", "echo said; sleep 0.3; exit 7"]
    files = ["--csv", str(path), "--plot", str(picture)]
    assert main(["power", "record", *files, "--idle", "0.1", "--", *command]) == 7
    assert "<svg" in picture.read_text()
    out, err = capfd.readouterr()
    assert out == "said\n"
    assert "energy      command 1" in err or "energy      command n/a" in err
    assert "above idle" not in err  # there are no tokens to divide by
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0].keys() == {"time_unix_s", "watts", "total_w"}
    assert {float(row["watts"]) for row in rows} == {4.0}
    assert before - 1 < float(rows[0]["time_unix_s"]) < time.time() + 1
    times, _, n_bad = read_log(path)
    assert (len(times), n_bad) == (len(rows), 0)


def test_a_counter_s_samples_as_watts() -> None:
    times = np.array([1.0, 1.5, 2.5])
    energy = np.array([[0.0, 0.0], [2.0, 1.0], [5.0, np.nan]])
    trace = Trace(times, np.full((3, 2), np.nan), energy, ("package-0", "dram"), ("package-0",))
    lines = samples_csv(trace, 1_790_000_000.0).splitlines()
    assert lines == [
        "time_unix_s,watts,package-0_w,dram_w",
        "1790000001.000000,4,4,2",
        "1790000001.500000,4,4,2",
        "1790000002.500000,3,3,",
    ]


# edgekv power doctor


# edgekv run --power


def run(*arguments: str) -> int:
    return main(["run", "--prompt", "It was a dark night", "--max-new-tokens", "40", *arguments])


@pytest.mark.usefixtures("steady")
def test_run_reports_energy_per_token(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert run("--power", "auto", "--power-idle", "0.3", "--json", str(path)) == 0
    assert "\nenergy      " in capsys.readouterr().err
    facts = json.loads(path.read_text())["energy"]
    decode = facts["phases"]["decode"]
    assert facts["phases"]["prefill"]["tokens"] == 6
    assert decode["tokens"] == 39
    assert facts["idle"]["watts"] == pytest.approx(4.0)
    if decode["joules"] is None:  # a machine too busy to take two samples in it
        assert "samples in" in decode["reason"]
    else:
        assert decode["mj_per_token"] == pytest.approx(4000 * decode["seconds"] / 39)
        assert decode["net_j"] == pytest.approx(0, abs=1e-9)


@pytest.mark.usefixtures("steady")
def test_a_meter_that_is_here_is_used_unless_it_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    """Without rest before the run, in one line."""
    assert run() == 0
    err = capsys.readouterr().err
    assert err.count("\nenergy      ") == 1
    assert err.count("measured by rpi-pmic: a made-up board") == 1
    assert "above idle" not in err
    assert run("--power", "off") == 0
    assert "energy" not in capsys.readouterr().err


@pytest.mark.usefixtures("bare")
def test_run_without_a_sensor_and_with_a_meter_s_log(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, begun = tmp_path / "log.csv", time.time() - 60
    log.write_text("time,watts\n" + "".join(f"{begun + 0.01 * i:.3f},3.5\n" for i in range(60_000)))

    def decode(*options: str) -> tuple[str, dict[str, float]]:
        assert run(*options, "--power-idle", "0.1", "--json", str(tmp_path / "report.json")) == 0
        facts = json.loads((tmp_path / "report.json").read_text())["energy"]
        return capsys.readouterr().err, facts and facts["phases"]["decode"]

    assert decode()[1] is None
    err, found = decode("--power", "auto")
    assert "energy      prefill and decode n/a: no power sensor" in err
    assert "power doctor" in err
    assert found["joules"] is found["mj_per_token"] is None
    err, found = decode("--power-csv", str(log))
    assert found["joules"] == pytest.approx(3.5 * found["seconds"])
