"""Every sensor over made-up trees, commands and libraries: rails, totals, faults, limits on the clocks."""

import json
import pathlib
import re
import sys

import power_trees as trees
import pytest

from edgekv.errors import PowerError
from edgekv.power import METERS, find_meter, meters, survey
from edgekv.power.meters import MeterAbsent, MeterRefused, Throttle, limits_between

PROFILES = pathlib.Path(__file__).resolve().parent.parent / "power" / "boards"


@pytest.fixture
def pi(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder first on the PATH."""
    monkeypatch.setenv("PATH", trees.path_with(tmp_path / "bin"))
    return tmp_path / "bin"


def test_pi_5_pairs_rails_by_name(pi: pathlib.Path) -> None:
    trees.fake_vcgencmd(pi, trees.pmic_script())
    meter = meters.RpiPmic.probe()
    assert meter.rails == ("3V7_WL_SW", "3V3_SYS", "1V1_SYS", "0V8_SW", "VDD_CORE")
    assert meter.read().power_w["VDD_CORE"] == pytest.approx(10.87674 * 0.8974594)
    assert trees.total_w(meter) == pytest.approx(trees.PMIC_W, abs=1e-4)
    other = re.sub(r"\((\d+)\)", lambda match: f"({99 - int(match[1])})", trees.PMIC.replace("0V8_SW", "0V8_SYS"))
    bad = ["garbage", "VDD_X_A current(1)=", "VDD_Y_V volt(2)=nanV", "VDD_Z_A volt(3)=1.0V"]
    trees.fake_vcgencmd(pi, trees.pmic_script("\n".join([*bad, other])))  # early firmware, other indices
    assert "0V8_SYS" in meters.RpiPmic.probe().rails
    assert trees.total_w(meters.RpiPmic.probe()) == pytest.approx(trees.PMIC_W, abs=1e-4)
    trees.fake_vcgencmd(pi, trees.pmic_script(re.sub(r".*3V3_SYS_V.*\n", "", trees.PMIC)))
    with pytest.raises(ValueError, match="left out 3V3_SYS"):
        meter.read()


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ("""echo 'error=1 error_msg="Command not registered"'""", MeterAbsent, "only the Pi 5"),
        ("echo 'VCHI initialization failed' >&2; exit 255", MeterRefused, "usermod -aG video"),
        ("echo nothing useful", MeterRefused, "no line of pmic_read_adc"),
    ],
)
def test_vcgencmd_that_fails(script: str, kind: type[PowerError], message: str, pi: pathlib.Path) -> None:
    trees.fake_vcgencmd(pi, script)
    with pytest.raises(kind, match=message):
        meters.RpiPmic.probe()


def test_vcgencmd_that_hangs(pi: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees.fake_vcgencmd(pi, trees.pmic_script())
    meter = meters.RpiPmic.probe()
    trees.fake_vcgencmd(pi, "exec sleep 60")
    monkeypatch.setattr(meters, "VCGENCMD_S", 0.1)
    with pytest.raises(TimeoutError, match="did not answer"):
        meter.read()


# Jetson: (its device tree's model, profile, sensor tree, meter, total rails, total watts)

NVIDIA, INPUT = "NVIDIA Jetson {} Developer Kit", ["VDD_IN"]
BOARDS = {
    "nano": (NVIDIA.format("Nano"), "jetson-nano", trees.NANO, "ina3221-iio", ["POM_5V_IN"], 2.003),
    "orin-nano": (NVIDIA.format("Orin Nano"), "jetson-orin-nano", trees.ORIN_NANO, "ina3221", INPUT, 6.048),
    "orin-nano-super": (
        NVIDIA.format("Orin Nano Engineering Reference") + " Super",
        *("jetson-orin-nano-super", trees.ORIN_NANO, "ina3221", INPUT, 6.048),
    ),
    "agx-orin": (
        NVIDIA.format("AGX Orin"),
        *("jetson-agx-orin", trees.AGX_ORIN, "ina3221", ["VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"], 4 + 2 + 4),
    ),
    "no input rail": (
        "an older carrier",
        *(None, trees.iio("1-0040", {0: ("GPU", 1000), 1: ("CPU", 2000)}), "ina3221-iio", ["GPU", "CPU"], 3),
    ),
    "thor": (NVIDIA.format("AGX Thor"), None, trees.ina238() | trees.ORIN_NANO, "ina238", ["VIN"], 41.5),
}


@pytest.mark.parametrize("name", BOARDS)
def test_every_jetson(name: str, tmp_path: pathlib.Path) -> None:
    model, profile, tree, meter_name, total, watts = BOARDS[name]
    root = trees.write_tree(tmp_path, tree | trees.model(model))
    meter, notes = find_meter(root=root)
    assert (meter.name, list(meter.total), notes) == (meter_name, total, [])
    assert trees.total_w(meter) == pytest.approx(watts)
    boards = [json.loads(path.read_text()) for path in PROFILES.iterdir()]
    assert [meter.name in board["meters"] for board in boards if re.search(board["model"], model)] == [
        True
    ] * bool(profile)


def eio(path: pathlib.Path) -> None:
    """Makes the file answer EIO, as on a failing bus: so does a process's memory at address 0."""
    path.unlink()
    path.symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match="Input/output error"):
        meters.read_number(path)


BASE = "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3"


def test_rails_that_fail(tmp_path: pathlib.Path) -> None:
    """A side rail costs itself only, one of the total the sample; then the sensor is refused."""
    root = trees.write_tree(tmp_path, trees.ORIN_NANO)
    meter = meters.Ina3221.probe(root)
    eio(root / BASE / "in3_input")
    assert set(meters.Ina3221.probe(root).read().power_w) == {"VDD_IN", "VDD_CPU_GPU_CV"}
    for garbage in ("", "abc", "12 34", "0x10", "999999999999"):
        (root / BASE / "curr1_input").write_text(garbage)
        with pytest.raises(ValueError, match=r"invalid literal|reads"):
            meter.read()
    (root / BASE / "curr1_input").write_text("1000\n")
    assert trees.total_w(meter) == pytest.approx(5.04)
    (root / BASE / "curr2_input").unlink()  # a channel without its current is no rail
    assert "VDD_CPU_GPU_CV" not in meters.Ina3221.probe(root).rails
    eio(root / BASE / "in1_input")
    with pytest.raises(MeterRefused, match="input/output error"):
        meters.Ina3221.probe(root)


def test_rapl_adds_packages_and_memory_and_not_what_contains_them(tmp_path: pathlib.Path) -> None:
    zones = {
        "z0": ("package-0", 262_143_328_000),  # about to wrap around
        "z0_0": ("core", 400_000),
        "z0_1": ("dram", 100_000),
        "z1": ("package-1", 2_000_000),
        "z2": ("psys", 9_000_000),
    }
    root = trees.write_tree(tmp_path, trees.rapl(**zones))
    trees.write_tree(tmp_path, {"sys/class/powercap/intel-rapl-mmio:0/name": "package-0\n"})
    meter = meters.Rapl.probe(root)
    assert meter.total == ("package-0", "package-0/dram", "package-1")
    assert set(meter.rails) == {*meter.total, "package-0/core", "psys"}
    for zone, (_, microjoules) in zones.items():
        path = root / f"sys/class/powercap/intel-rapl:{zone[1:].replace('_', ':')}/energy_uj"
        path.write_text(f"{(microjoules + 10_000_000) % 262_143_328_850}\n")
    joules = meter.read().energy_j
    assert sum(joules[rail] for rail in meter.total) == pytest.approx(30)


def test_a_counter_that_jumps_loses_samples_and_one_that_was_restarted_stays_unknown() -> None:
    now, raw = [0.0], [0.0]
    counter = meters.EnergyCounter(lambda: raw[0], range_j=1000.0, most_w=100.0, clock=lambda: now[0])
    for raw[0], joules in ((500.0, 0), (510.0, 10), (0.0, None), (999.0, None), (540.0, 40), (550.0, 50)):
        now[0] += 1.0
        if joules is None:
            with pytest.raises(ValueError, match="jumped"):
                counter()
        else:
            assert counter() == joules
    raw[0] = 900.0
    counter = meters.EnergyCounter(lambda: raw[0], range_j=1000.0, most_w=10.0, clock=lambda: now[0])
    counter()
    for second in range(1, 200):  # from the 51st on, 10 W could have wrapped around to here
        now[0], raw[0] = now[0] + 1.0, 400.0 + second
        with pytest.raises(ValueError, match="jumped"):
            counter()


def test_nvml_reads_power_of_every_gpu_and_its_costly_counter_at_edges() -> None:
    library = trees.FakeNvml(gpus=2)
    meter = meters.Nvml(library)
    assert meter.read_edge().energy_j == {"gpu0": 0.0, "gpu1": 0.0}
    assert not any(meter.read().energy_j for _ in range(3))
    library.joules = 5120.0
    reading = meter.read_edge()
    assert reading.power_w == {"gpu0": 120.0, "gpu1": 120.001}
    assert reading.energy_j == {"gpu0": 120.0, "gpu1": 120.0}
    alone = meters.Nvml(trees.FakeNvml(refuses=("instant", "usage")))
    assert all(alone.read().energy_j for _ in range(3))


def test_nvml_falls_back_or_is_refused_and_reports_clock_limits() -> None:
    for refuses, power, energy in (("instant",), 110.0, True), (("energy",), 120.0, False):
        reading = meters.Nvml(trees.FakeNvml(refuses=refuses)).read_edge()
        assert reading.power_w == {"gpu0": power}
        assert bool(reading.energy_j) == energy
    with pytest.raises(MeterRefused, match="neither energy nor power"):
        meters.Nvml(trees.FakeNvml(refuses=("instant", "usage", "energy")))
    with pytest.raises(MeterAbsent, match="no usable GPU"):
        meters.Nvml(trees.FakeNvml(refuses=("init",)))
    library = trees.FakeNvml(reasons=1)
    meter = meters.Nvml(library)
    library.refuses, library.reasons = ("instant", "energy"), 4 + 32
    with pytest.raises(OSError, match="Not Supported"):
        meter.read()
    assert meter.read_throttle().now == {"GPU power cap", "GPU temperature"}
    library.refuses = ("reasons",)
    assert meter.read_throttle() is None


def test_the_fake_nvml_has_the_real_one_s_names() -> None:
    pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py, the extra nvml")
    used = [name for name in vars(trees.FakeNvml) if name.lower().startswith("nvml")]
    assert used
    assert [name for name in used if not hasattr(pynvml, name)] == []


# Which is found, and what is said of the others


def test_a_machine_without_sensors(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = survey(tmp_path)
    assert [*found] == [*METERS]
    assert all(isinstance(problem, MeterAbsent) for problem in found.values())
    with pytest.raises(PowerError, match="accepted: auto, rpi-pmic"):
        find_meter("sundial")
    trees.write_tree(tmp_path, trees.model("Raspberry Pi 4 Model B Rev 1.4"))
    with pytest.raises(MeterAbsent, match="--power-csv"):
        find_meter(root=tmp_path)
    trees.write_tree(tmp_path, {"proc/driver/nvidia/version": "NVRM version\n"})
    with pytest.raises(MeterRefused, match=r"pip install 'edgekv\[nvml\]'"):
        meters.Nvml.probe(tmp_path)


def test_a_sensor_that_refuses_or_does_not_see_the_work_is_noted(tmp_path: pathlib.Path) -> None:
    root = trees.write_tree(tmp_path, trees.rapl(z0=("package-0", 5)))
    assert find_meter(root=root, device="cpu")[0].name == "rapl"
    with pytest.raises(PowerError, match="rapl is here but sees no work on the gpu"):
        find_meter(root=root, device="gpu")
    (root / "sys/class/powercap/intel-rapl:0/energy_uj").write_text("")
    with pytest.raises(MeterAbsent, match="rapl is here but can't be read"):
        find_meter(root=root)


def test_profiles_name_known_meters() -> None:
    for path in PROFILES.iterdir():
        board = json.loads(path.read_text())
        assert set(board["meters"]) <= set(METERS)
        for bound in board["lower_bounds"]:
            assert bound["peak_ms"] == pytest.approx(bound["bytes"] / board["peak_gb_s"] / 1e6, abs=0.05)


def cooling(**states: int) -> trees.Tree:
    tree = {}
    for i, (kind, state) in enumerate(states.items()):
        base = f"sys/class/thermal/cooling_device{i}"
        tree |= {f"{base}/type": kind.replace("_", "-") + "\n", f"{base}/cur_state": f"{state}\n"}
    return tree


INTEL = {f"sys/devices/system/cpu/cpu{i}/thermal_throttle/package_throttle_count": "3\n" for i in range(2)}


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({}, None),
        (cooling(pwm_fan=3, cpu_throttle_alert=0), Throttle()),
        (cooling(cpu_throttle_alert=2), Throttle(frozenset({"cooling by cpu-throttle-alert"}))),
        (INTEL, Throttle(ever={"processor temperature": 6})),
    ],
)
def test_clock_limits(
    tree: trees.Tree, expected: Throttle | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert meters.read_throttle(trees.write_tree(tmp_path, tree)) == expected


def test_what_happened_between_two_looks() -> None:
    calm = Throttle(ever={"throttled": 0, "under-voltage": 0, "processor temperature": 3})
    assert limits_between(None, calm) is limits_between(calm, None) is None
    assert limits_between(calm, calm) == ()
    hot = Throttle(frozenset({"cooling by cpu"}), {"throttled": 1, "processor temperature": 5, "under-voltage": 0})
    assert limits_between(calm, hot) == ("cooling by cpu", "processor temperature", "throttled")
    sticky = Throttle(ever={"under-voltage": 1})
    assert limits_between(sticky, sticky) == ("under-voltage (before the run; whether again is not known)",)
