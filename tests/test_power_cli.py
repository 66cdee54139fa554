"""`edgekv power` and `edgekv run --power` as a user meets them, on made-up sensors."""

import csv
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import power_trees as trees
import pytest

from edgekv.cli import main
from edgekv.cli.power import diagnosis, samples_csv
from edgekv.power import METERS, survey
from edgekv.power.energy import Trace, read_log


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METERS, "rpi-pmic", trees.Steady)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sensor at all, whatever this machine has."""
    trees.hide_sensors(monkeypatch)


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
        ("run --prompt x --power sundial", "accepted: auto, rpi-pmic"),
        ("run --prompt x --power-csv /no/log.csv", "/no/log.csv"),
        ("run --prompt x --power-estimate -3", "--power-estimate"),
        ("run --prompt x --power-estimate 3 --power-idle -1", "idle time"),
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
    assert "energy      command" in err
    assert "above idle" not in err  # there are no tokens to divide by
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0].keys() == {"time_unix_s", "watts", "total_w"}
    assert {float(row["watts"]) for row in rows} == {4.0}
    assert before - 1 < float(rows[0]["time_unix_s"]) < time.time() + 1
    times, _, n_bad = read_log(path)
    assert (len(times), n_bad) == (len(rows), 0)


def test_record_on_a_pi_from_the_outside(tmp_path: pathlib.Path) -> None:
    """A process of its own, the fake vcgencmd on its PATH, and Ctrl-C for the program that it meters."""
    trees.fake_vcgencmd(tmp_path / "bin", trees.pmic_script())
    environment = os.environ | {"PATH": trees.path_with(tmp_path / "bin")}
    path = tmp_path / "log.csv"
    command = [sys.executable, "-m", "edgekv", "power", "--meter", "rpi-pmic", "record", "--csv", str(path), "--"]
    program = "trap 'exit 9' INT; echo ready; while :; do sleep 0.05; done"
    process = subprocess.Popen(
        [*command, "sh", "-c", program],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout.readline() == b"ready\n"
    time.sleep(1.5)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 9, stderr.decode()
    assert b"the sum of 5 rails" in stderr
    assert b"at the wall = 1.1451 x sum + 0.5879 W" in stderr
    _, watts, _ = read_log(path)
    assert watts == pytest.approx(trees.PMIC_W, abs=1e-3)


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


def test_doctor_on_boards(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    tree = trees.AGX_ORIN | trees.model("NVIDIA Jetson AGX Orin Developer Kit") | trees.battery("Charging")
    root = trees.write_tree(tmp_path, tree)
    rows = dict(diagnosis(survey(root), root))
    assert rows["board"].startswith("NVIDIA Jetson AGX Orin Developer Kit: 12 x Cortex-A78AE")
    assert "total = VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0" in rows["ina3221"]
    assert "VDDQ_VDD2_1V8AO 1.5 W" in rows["ina3221"]
    assert rows["rapl"] == "-- no RAPL of Intel and AMD processors"
    assert rows["battery"].startswith("!! battery is here but can't be read (BAT0 is Charging)")
    assert rows["verdict"] == "--power uses ina3221"


def test_doctor_says_how_to_get_permission(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", trees.path_with(tmp_path / "bin"))
    trees.fake_vcgencmd(tmp_path / "bin", "echo 'VCHI initialization failed'; exit 255")
    text = "\n".join(line for _, line in diagnosis(survey(tmp_path), tmp_path))
    assert "usermod -aG video" in text
    assert "99-edgekv-power.rules /etc/udev/rules.d/" in text


# edgekv run --power


def run(*arguments: str) -> int:
    return main(["run", "--prompt", "It was a dark night", "--max-new-tokens", "40", *arguments])


@pytest.mark.usefixtures("steady")
def test_run_reports_energy_per_token(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert run("--power", "--power-idle", "0.3", "--json", str(path)) == 0
    err = capsys.readouterr().err
    assert "power       rpi-pmic: total; a made-up board" in err
    assert "idle        4 W" in err
    assert "energy      decode" in err
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


@pytest.mark.usefixtures("bare")
def test_run_without_a_sensor_with_an_estimate_and_with_a_meter_s_log(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, begun = tmp_path / "log.csv", time.time() - 60
    log.write_text("time,watts\n" + "".join(f"{begun + 0.01 * i:.3f},3.5\n" for i in range(60_000)))

    def decode(*options: str) -> tuple[str, dict[str, float]]:
        assert run(*options, "--power-idle", "0.1", "--json", str(tmp_path / "report.json")) == 0
        facts = json.loads((tmp_path / "report.json").read_text())["energy"]
        return capsys.readouterr().err, facts["phases"]["decode"]

    err, found = decode("--power")
    assert "energy      n/a: no power sensor" in err
    assert "power doctor" in err
    assert found["joules"] is found["mj_per_token"] is None
    err, found = decode("--power-estimate", "6.5")
    assert "power       estimate; a stated 6.5 W, not measured" in err
    assert err.count("ESTIMATE") == 2
    assert "energy  " not in err
    err, found = decode("--power-csv", str(log))
    assert found["joules"] == pytest.approx(3.5 * found["seconds"])
    assert "what the external meter measures (log.csv)" in err
