"""The family of meters: which is found, what is said of the others, board profiles, the docs' table."""

import pathlib
import re
import sys

import power_trees as trees
import pytest

from edgekv.errors import PowerError
from edgekv.power import METERS, find_meter, survey
from edgekv.power.base import MeterAbsent, MeterRefused
from edgekv.power.battery import Battery
from edgekv.power.boards import boards, find_board
from edgekv.power.nvml import Nvml

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("numbers", "watts"),
    [
        ({"power_now": 7_500_000}, 7.5),
        ({"power_now": -7_500_000}, 7.5),
        ({"current_now": 500_000, "voltage_now": 12_000_000}, 6.0),
    ],
)
def test_a_discharging_battery(numbers: dict[str, int], watts: float, tmp_path: pathlib.Path) -> None:
    meter = Battery.probe(trees.write_tree(tmp_path, trees.battery(**numbers)))
    assert trees.total_w(meter) == pytest.approx(watts)


def test_a_battery_on_the_charger_measures_nothing(tmp_path: pathlib.Path) -> None:
    root = trees.write_tree(tmp_path, trees.battery(power_now=7_500_000))
    meter = Battery.probe(root)
    (root / "sys/class/power_supply/BAT0/status").write_text("Charging\n")
    with pytest.raises(ValueError, match="Charging"):
        meter.read()
    with pytest.raises(MeterRefused, match="unplug"):
        Battery.probe(root)


def test_a_mouse_is_no_battery(tmp_path: pathlib.Path) -> None:
    tree = trees.battery(power_now=1) | {"sys/class/power_supply/BAT0/scope": "Device\n"}
    with pytest.raises(MeterAbsent):
        Battery.probe(trees.write_tree(tmp_path, tree))


def test_names_and_texts() -> None:
    for name, kind in METERS.items():
        assert kind.name == name
        assert kind.summary
        assert kind.covers
        assert 0 < kind.max_hz <= 100
    assert METERS["rpi-pmic"].max_hz <= 10


def test_a_machine_without_sensors(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    findings = survey(tmp_path)
    assert [finding.name for finding in findings] == list(METERS)
    assert all(isinstance(finding.problem, MeterAbsent) for finding in findings)
    with pytest.raises(PowerError, match="accepted: auto, rpi-pmic"):
        find_meter("sundial")


def test_a_better_sensor_that_refuses_is_noted(tmp_path: pathlib.Path) -> None:
    root = trees.write_tree(tmp_path, trees.rapl(z0=("package-0", 5)) | trees.battery(power_now=7_500_000))
    (root / "sys/class/powercap/intel-rapl:0/energy_uj").write_text("")
    meter, notes = find_meter(root=root)
    assert meter.name == "battery"
    assert len(notes) == 1
    assert "rapl is here but can't be read" in notes[0]


def test_a_meter_that_does_not_see_the_work_is_not_used(tmp_path: pathlib.Path) -> None:
    root = trees.write_tree(tmp_path, trees.rapl(z0=("package-0", 5)))
    assert find_meter(root=root, device="cpu")[0].name == "rapl"
    with pytest.raises(PowerError, match="rapl is here but sees no work on the gpu"):
        find_meter(root=root, device="gpu")


def test_nvidia_without_the_package_names_the_extra(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    trees.write_tree(tmp_path, {"proc/driver/nvidia/version": "NVRM version\n"})
    with pytest.raises(MeterRefused, match=r"pip install 'edgekv\[nvml\]'"):
        Nvml.probe(tmp_path)


def test_profiles_name_known_meters_and_bound_what_they_say() -> None:
    weights = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 65 * 4096 + 32000 * 4096  # all that a token reads
    elements = 2 * 32 * 32 * 8192 * 128
    moved = [
        2 * weights + 2 * elements,
        weights * 17 // 32 + 32 * 32 * 8192 * (256 + 4 * 128) // 8,
        2 * elements,
        32 * 32 * 8192 * (256 + 4 * 128) // 8,
    ]
    assert {path.stem for path in (ROOT / "power" / "boards").iterdir()} == set(boards())
    for board in boards().values():
        assert set(board.meters) <= set(METERS)
        assert board.to_text()
        assert [bound["bytes"] for bound in board.lower_bounds] == moved
        for bound in board.lower_bounds:
            assert bound["peak_ms"] == pytest.approx(bound["bytes"] / board.peak_gb_s / 1e6, abs=0.05)
            measured = board.measured_gb_s and bound["bytes"] / board.measured_gb_s / 1e6
            assert bound["measured_ms"] == (measured and pytest.approx(measured, abs=0.05))


def test_other_machines_have_no_profile(tmp_path: pathlib.Path) -> None:
    assert find_board(tmp_path) is None
    assert find_board(trees.write_tree(tmp_path, trees.model("Radxa ROCK 5B"))) is None


def test_the_docs_table_is_the_registry() -> None:
    text = (ROOT / "docs" / "power.md").read_text()
    rows = re.search(r"<!-- meters -->\n(.*?)<!-- /meters -->", text, re.DOTALL)
    assert rows is not None
    expected = [
        f"| `{name}` | {kind.summary} | {kind.covers} | {kind.max_hz:g} |" for name, kind in METERS.items()
    ]
    assert rows[1].splitlines()[2:] == expected
