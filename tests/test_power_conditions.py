"""What limits the clocks, and the rest that surrounds a measurement."""

import json
import pathlib

import power_trees as trees
import pytest

from edgekv.power.base import Throttle
from edgekv.power.conditions import Conditions, throttle, throttle_text, throttled_between


def cooling(**states: int) -> trees.Tree:
    tree = {}
    for i, (kind, state) in enumerate(states.items()):
        base = f"sys/class/thermal/cooling_device{i}"
        tree |= {f"{base}/type": kind.replace("_", "-") + "\n", f"{base}/cur_state": f"{state}\n"}
    return tree


PI_VOLTAGE = {"sys/class/hwmon/hwmon0/name": "rpi_volt\n", "sys/class/hwmon/hwmon0/in0_lcrit_alarm": "1\n"}
INTEL = {f"sys/devices/system/cpu/cpu{i}/thermal_throttle/package_throttle_count": "3\n" for i in range(2)}


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({}, None),
        (cooling(pwm_fan=3), None),
        (cooling(pwm_fan=3, cpu_throttle_alert=0), Throttle()),
        (cooling(cpu_throttle_alert=2), Throttle(frozenset({"cooling by cpu-throttle-alert"}))),
        (PI_VOLTAGE, Throttle(frozenset({"under-voltage"}))),
        (INTEL, Throttle(ever={"processor temperature": 6})),
        (INTEL | PI_VOLTAGE, Throttle(frozenset({"under-voltage"}), {"processor temperature": 6})),
    ],
)
def test_clock_limits(
    tree: trees.Tree, expected: Throttle | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert throttle(trees.write_tree(tmp_path, tree)) == expected


def test_a_pi_s_flags(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", trees.path_with(tmp_path / "bin"))
    trees.fake_vcgencmd(tmp_path / "bin", trees.pmic_script(throttled="0x50004"))
    found = throttle(tmp_path)
    assert found is not None
    assert found.now == {"throttled"}
    assert found.ever == {"under-voltage": 1, "frequency capped": 0, "throttled": 1, "soft temperature limit": 0}
    trees.fake_vcgencmd(tmp_path / "bin", "exit 1")
    assert throttle(tmp_path) is None


def test_what_happened_between_two_looks() -> None:
    calm = Throttle(ever={"throttled": 0, "under-voltage": 0, "processor temperature": 3})
    assert throttled_between(None, calm) is throttled_between(calm, None) is None
    assert throttled_between(calm, calm) == ()
    hot = Throttle(frozenset({"cooling by cpu"}), {"throttled": 1, "processor temperature": 5, "under-voltage": 0})
    assert throttled_between(calm, hot) == ("cooling by cpu", "processor temperature", "throttled")
    sticky = Throttle(ever={"under-voltage": 1})
    assert throttled_between(sticky, sticky) == ("under-voltage (before the run; whether again is not known)",)
    assert throttle_text(None).startswith("throttling n/a")
    assert throttle_text(()) == "no throttling"
    assert throttle_text(("x", "y")) == "throttling: x, y"


def test_conditions_of_this_machine() -> None:
    now = Conditions.now()
    assert now.memory_used_bytes > 1e6
    assert "load" in now.to_text()
    assert json.dumps(now.as_dict())
