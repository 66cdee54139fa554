"""`edgekv power` and `edgekv run --power` as a user meets them, on made-up sensors."""

import csv
import json
import pathlib
import time

import numpy as np
import power_trees as trees
import pytest
from helpers import Cli

from edgekv.cli import main
from edgekv.cli.power import advice, samples_csv
from edgekv.errors import PowerError
from edgekv.power import METERS
from edgekv.power.energy import Trace, read_log
from edgekv.power.meters import MeterAbsent, PowerModes


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


@pytest.mark.usefixtures("steady")
def test_live(cli: Cli) -> None:
    assert "rpi-pmic  4.00 W" in cli("power", "--seconds", "1").out


@pytest.mark.usefixtures("bare")
def test_without_a_sensor_it_says_n_a_and_never_zero(cli: Cli) -> None:
    assert "verdict     nothing can be measured here" in cli("power", "doctor", status=1).out
    assert "n/a: no power sensor" in cli("power", "--seconds", "0.1").out


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("power --meter sundial", "accepted: auto, rpi-pmic"),
        ("power --meter rapl", "not here"),
        ("power record --csv x.csv -- true", "leave --csv out to run the command"),
        ("power record", "no command"),
        ("power advise", "no power sensor"),
        ("power advise /no/such/model", "there is none"),
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
def test_bad_input(arguments: str, message: str, cli: Cli) -> None:
    assert message in cli(*arguments.split(), status=2).err


@pytest.mark.usefixtures("steady")
def test_record_keeps_samples_and_the_status(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.csv"
    before = time.time()
    command = ["sh", "-c", "echo said; sleep 0.3; exit 7"]
    assert main(["power", "record", "--csv", str(path), "--idle", "0.1", "--", *command]) == 7
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


def governors(root: pathlib.Path) -> list[str]:
    return [file.read_text().strip() for file in sorted(root.rglob("scaling_governor"))]


@pytest.fixture
def modes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A machine with two groups of cores, whose governors differ; and no nvpmodel."""
    root = trees.write_tree(tmp_path / "root", trees.cpufreq(policy0="powersave", policy4="performance"))
    found = PowerModes.find(root)
    monkeypatch.setattr(PowerModes, "find", lambda: found)
    monkeypatch.setattr("edgekv.cli.power.SETTLE_S", 0.0)
    monkeypatch.setattr("edgekv.cli.power.all_cores", lambda: 2)
    return root


@pytest.mark.usefixtures("steady")
def test_advise_measures_each_number_of_threads(modes: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At a steady power joules per token and tokens per second belong together; modes are named and left alone."""
    command = ["power", "advise", "demo", "--seconds"]
    assert 0 in (main([*command, seconds]) for seconds in ("0.5", "2", "8"))  # a busy machine samples seldom
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["setting", "J", "per", "token", "from", "to", "tokens/s"]
    for row, n in zip(rows[:2], "12", strict=True):
        *name, joules, least, most, speed = row.split()
        assert name == ["--threads", n]
        assert float(least) <= float(joules) <= float(most)
        assert float(joules) * float(speed) == pytest.approx(4.0, rel=0.02)
    assert rows[2].startswith("advice      --threads ")
    assert "fastest" in rows[2]
    assert rows[3] == "measured    by rpi-pmic: a made-up board"
    assert rows[-1] == "modes       governor: powersave, performance; now powersave; --modes tries them"
    assert governors(modes) == ["powersave", "performance"]


@pytest.mark.usefixtures("steady")
def test_advise_tries_and_restores_modes(modes: pathlib.Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """Also after Ctrl-C; a mode that can't be chosen is said before any work, a short stretch after it."""
    command, tried = ["power", "advise", "--modes", "--seconds", "0.4"], []

    def stretch(*_: object) -> tuple[float, float]:
        tried.append(governors(modes))
        if len(tried) == 15:
            raise KeyboardInterrupt
        return 1.0, 1.0

    with monkeypatch.context() as patch:
        patch.setattr("edgekv.cli.power.timed_decode", stretch)
        assert "--threads 2 in mode performance" in cli(*command).out
        assert tried == [["powersave"] * 2] * 2 + [["performance"] * 2] * 2 + [["powersave"] * 2] * 2 + tried[6:]
        assert len(tried) == 12
        assert governors(modes) == ["powersave", "performance"]
        cli(*command, status=130)
        assert governors(modes) == ["powersave", "performance"]
        for file in modes.rglob("scaling_governor"):
            file.unlink()
            file.mkdir()
        assert "can't be written (is a directory): modes are chosen as root" in cli(*command, status=2).err
        assert len(tried) == 15
    monkeypatch.setattr(PowerModes, "find", lambda: None)
    assert "neither nvpmodel nor a governor" in cli(*command, status=2).err
    assert "measure longer: --seconds 0.002" in cli("power", "advise", "--seconds", "0.001", status=2).err


def test_the_modes_of_a_jetson(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = trees.write_tree(tmp_path / "root", trees.NVPMODEL | trees.cpufreq(policy0="powersave"))
    log = tmp_path / "log"
    program = f'echo "$@" >> {log}; [ "$2" != 2 ] || exit 1; echo "NV Power Mode: MODE_15W"; echo 2'
    trees.fake_vcgencmd(tmp_path / "bin", program, "nvpmodel")
    assert PowerModes.find(root).kind == "governor"  # the program is not on the PATH
    monkeypatch.setenv("PATH", trees.path_with(tmp_path / "bin"))
    found = PowerModes.find(root)
    assert (found.kind, found.names, found.now) == ("nvpmodel", ("MAXN", "MODE_15W"), ("MODE_15W",))
    found.apply(["MAXN"])
    assert log.read_text().splitlines() == ["-q", "-m 0"]
    with pytest.raises(PowerError, match=r"nvpmodel -m 2 fails .*: modes are chosen as root"):
        found.apply(found.now)
    assert PowerModes.find(tmp_path) is None


def test_advice_compares_with_the_fastest() -> None:
    fast, slow = [(2.0, 10.0), (2.2, 10.5), (2.1, 10.0)], [(1.0, 8.0), (1.05, 8.0), (1.1, 7.5)]
    said = "a: 50% fewer joules per token than b, the fastest; 20% fewer tokens/s"
    assert advice({"a": slow, "b": fast}) == said
    assert advice({"a": slow, "b": [(0.9, 10.0)] * 3}) == "b: the fewest joules per token, and the fastest"
    close = [(1.0, 10.0), (1.2, 10.0), (1.3, 10.0)]
    assert advice({"a": slow, "b": close}) == "b: the fastest, and no other is surely below it in joules per token"


RUN = ("run", "--prompt", "It was a dark night", "--max-new-tokens", "40")


@pytest.mark.usefixtures("steady")
def test_run_reports_energy_per_token(tmp_path: pathlib.Path, cli: Cli) -> None:
    path = tmp_path / "report.json"
    assert "\nenergy      " in cli(*RUN, "--power", "auto", "--power-idle", "0.3", "--json", path).err
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
def test_a_meter_that_is_here_is_used_unless_it_is_off(cli: Cli) -> None:
    """Without rest before the run, in one line."""
    err = cli(*RUN).err
    assert err.count("\nenergy      ") == 1
    assert err.count("measured by rpi-pmic: a made-up board") == 1
    assert "above idle" not in err
    assert "energy" not in cli(*RUN, "--power", "off").err


@pytest.mark.usefixtures("bare")
def test_run_without_a_sensor_and_with_a_meter_s_log(tmp_path: pathlib.Path, cli: Cli) -> None:
    log, begun = tmp_path / "log.csv", time.time() - 60
    log.write_text("time,watts\n" + "".join(f"{begun + 0.01 * i:.3f},3.5\n" for i in range(60_000)))

    def decode(*options: str) -> tuple[str, dict[str, float]]:
        said = cli(*RUN, *options, "--power-idle", "0.1", "--json", tmp_path / "report.json")
        facts = json.loads((tmp_path / "report.json").read_text())["energy"]
        return said.err, facts and facts["phases"]["decode"]

    assert decode()[1]["joules"] is None
    err, found = decode("--power", "auto")
    assert "energy      prefill and decode n/a: no power sensor" in err
    assert "power doctor" in err
    assert found["joules"] is found["mj_per_token"] is None
    err, found = decode("--power-csv", str(log))
    assert found["joules"] == pytest.approx(3.5 * found["seconds"])
