"""The Raspberry Pi 5's rails through a made-up vcgencmd."""

import pathlib
import re

import power_trees as trees
import pytest

from edgekv.errors import PowerError
from edgekv.power.base import MeterAbsent, MeterRefused
from edgekv.power.rpi import RpiPmic, parse_rails

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def pi(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder first on the PATH."""
    monkeypatch.setenv("PATH", trees.path_with(tmp_path / "bin"))
    return tmp_path / "bin"


def test_pi_5_pairs_rails_by_name(pi: pathlib.Path) -> None:
    trees.fake_vcgencmd(pi, trees.pmic_script())
    meter = RpiPmic.probe()
    assert len(meter.rails) == 12
    assert {"EXT5V", "BATT"}.isdisjoint(meter.rails)
    reading = meter.read()
    assert reading.power_w["VDD_CORE"] == pytest.approx(10.87674 * 0.8974594)
    assert trees.total_w(meter) == pytest.approx(trees.PMIC_W, abs=1e-4)
    assert meter.correction is not None
    assert meter.correction.joules(10.0, 1.0) == pytest.approx(1.1451 * 10 + 0.5879)


def test_pi_5_with_early_firmware_and_other_indices(pi: pathlib.Path) -> None:
    text = trees.PMIC.replace("0V8_SW", "0V8_SYS")
    text = re.sub(r"\((\d+)\)", lambda match: f"({99 - int(match[1])})", text)
    trees.fake_vcgencmd(pi, trees.pmic_script(text))
    meter = RpiPmic.probe()
    assert "0V8_SYS" in meter.rails
    assert trees.total_w(meter) == pytest.approx(trees.PMIC_W, abs=1e-4)


def test_pi_5_malformed_lines_and_missing_rails() -> None:
    lines = trees.PMIC.splitlines()
    broken = [
        "garbage",
        "",
        "VDD_X_A current(1)=",
        "VDD_Y_V volt(2)=nanV",
        "VDD_Z_A volt(3)=1.0V",
        lines[7],
        lines[19],
    ]
    assert list(parse_rails("\n".join(broken))) == ["VDD_CORE"]
    assert "VDD_CORE" not in parse_rails("\n".join(lines[:7] + lines[8:]))


def test_pi_5_a_rail_that_goes_missing_loses_the_sample(pi: pathlib.Path) -> None:
    trees.fake_vcgencmd(pi, trees.pmic_script())
    meter = RpiPmic.probe()
    trees.fake_vcgencmd(pi, trees.pmic_script(re.sub(r".*HDMI_V.*\n", "", trees.PMIC)))
    with pytest.raises(ValueError, match="left out HDMI"):
        meter.read()


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ("""echo 'error=1 error_msg="Command not registered"'""", MeterAbsent, "only the Pi 5"),
        ("echo 'VCHI initialization failed' >&2; exit 255", MeterRefused, "usermod -aG video"),
        ('echo "Can\'t open device file: /dev/vcio"; exit 255', MeterRefused, "usermod -aG video"),
        ("exit 3", MeterRefused, "exit status 3"),
        ("echo nothing useful", MeterRefused, "no line of pmic_read_adc"),
    ],
)
def test_vcgencmd_that_fails(script: str, kind: type[PowerError], message: str, pi: pathlib.Path) -> None:
    trees.fake_vcgencmd(pi, script)
    with pytest.raises(kind, match=message):
        RpiPmic.probe()


def test_vcgencmd_that_hangs(pi: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees.fake_vcgencmd(pi, trees.pmic_script())
    meter = RpiPmic.probe()
    trees.fake_vcgencmd(pi, "exec sleep 60")
    monkeypatch.setattr("edgekv.power.rpi.TIMEOUT_S", 0.1)
    with pytest.raises(TimeoutError, match="did not answer"):
        meter.read()
