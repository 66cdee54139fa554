"""RAPL and NVML: energy counters that wrap around, restart, refuse, and cost too much to read."""

import os
import pathlib

import power_trees as trees
import pytest

from edgekv.power.base import EnergyCounter, MeterAbsent, MeterRefused
from edgekv.power.boards import power_file
from edgekv.power.nvml import Nvml
from edgekv.power.rapl import Rapl

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_rapl_adds_packages_and_memory_and_not_what_contains_them(tmp_path: pathlib.Path) -> None:
    zones = {
        "z0": ("package-0", 1_000_000),
        "z0_0": ("core", 400_000),
        "z0_1": ("dram", 100_000),
        "z1": ("package-1", 2_000_000),
        "z2": ("psys", 9_000_000),
    }
    root = trees.write_tree(tmp_path, trees.rapl(**zones))
    trees.write_tree(tmp_path, {"sys/class/powercap/intel-rapl-mmio:0/name": "package-0\n"})
    now = [0.0]
    meter = Rapl.probe(root, clock=lambda: now[0])
    assert meter.total == ("package-0", "package-0/dram", "package-1")
    assert set(meter.rails) == {*meter.total, "package-0/core", "psys"}
    now[0] = 1.0
    for zone, (_, microjoules) in zones.items():
        path = root / f"sys/class/powercap/intel-rapl:{zone[1:].replace('_', ':')}/energy_uj"
        path.write_text(f"{microjoules + 10_000_000}\n")
    joules = meter.read().energy_j
    assert sum(joules[rail] for rail in meter.total) == pytest.approx(30)


def test_rapl_wraps_around(tmp_path: pathlib.Path) -> None:
    root = trees.write_tree(tmp_path, trees.rapl(z0=("package-0", 262_143_328_000)))
    now = [0.0]
    meter = Rapl.probe(root, clock=lambda: now[0])
    now[0] = 1.0
    (root / "sys/class/powercap/intel-rapl:0/energy_uj").write_text("99999150\n")
    assert meter.read().energy_j["package-0"] == pytest.approx(100.0)


def test_an_unreadable_counter_names_the_rule(tmp_path: pathlib.Path) -> None:
    root = trees.write_tree(tmp_path, trees.rapl(z0=("package-0", 5)))
    path = root / "sys/class/powercap/intel-rapl:0/energy_uj"
    if os.geteuid() == 0:  # root reads everything: let the kernel refuse something it refuses to root too
        path.unlink()
        path.symlink_to("/proc/self/mem")
    else:
        path.chmod(0)
    with pytest.raises(MeterRefused, match="udev rule"):
        Rapl.probe(root)
    rule = power_file("99-edgekv-power.rules")
    assert rule is not None
    assert 'KERNEL=="intel-rapl:*"' in rule.read_text()


def test_a_counter_that_jumps_loses_samples_and_not_joules() -> None:
    now = [0.0]
    counter = EnergyCounter(range_j=1000.0, most_w=100.0, clock=lambda: now[0])

    def advance(raw: float) -> float:
        now[0] += 1.0
        return counter.advance(raw)

    assert advance(500.0) == 0
    assert advance(510.0) == 10
    with pytest.raises(ValueError, match="jumped"):
        advance(0.0)
    with pytest.raises(ValueError, match="jumped"):
        advance(999.0)
    assert advance(540.0) == 40
    assert advance(550.0) == 50


def test_a_counter_that_was_restarted_stays_unknown() -> None:
    now = [0.0]
    counter = EnergyCounter(range_j=1000.0, most_w=10.0, clock=lambda: now[0])
    counter.advance(900.0)
    for second in range(1, 200):  # from the 51st on, 10 W could have wrapped around to here
        now[0] = float(second)
        with pytest.raises(ValueError, match="jumped"):
            counter.advance(400.0 + second)


def test_nvml_reads_energy_and_power_of_every_gpu() -> None:
    library = trees.FakeNvml(gpus=2)
    now = [0.0]
    meter = Nvml(library, clock=lambda: now[0])
    assert meter.read().energy_j == {"gpu0": 0.0, "gpu1": 0.0}
    now[0], library.joules = 1.0, 5120.0
    reading = meter.read_edge()
    assert reading.power_w == {"gpu0": 120.0, "gpu1": 120.001}
    assert reading.energy_j == {"gpu0": 120.0, "gpu1": 120.0}


def test_nvml_reads_its_costly_counter_at_edges_and_now_and_then() -> None:
    now = [0.0]
    meter = Nvml(trees.FakeNvml(), clock=lambda: now[0])
    with_energy = []
    for now[0] in range(12):
        with_energy.append(bool(meter.read().energy_j))
    assert with_energy == [True] + [False] * 4 + [True] + [False] * 4 + [True, False]
    assert meter.read_edge().energy_j
    alone = Nvml(trees.FakeNvml(refuses=("instant", "usage")))
    assert all(alone.read().energy_j for _ in range(3))


@pytest.mark.parametrize(
    ("refuses", "power", "energy"),
    [(("instant",), 110.0, True), (("energy",), 120.0, False), (("instant", "usage"), None, True)],
)
def test_nvml_falls_back(refuses: tuple[str, ...], power: float | None, energy: bool) -> None:
    reading = Nvml(trees.FakeNvml(refuses=refuses)).read()
    assert reading.power_w == ({"gpu0": power} if power else {})
    assert bool(reading.energy_j) == energy


def test_nvml_that_initialises_and_then_refuses() -> None:
    with pytest.raises(MeterRefused, match="neither energy nor power"):
        Nvml(trees.FakeNvml(refuses=("instant", "usage", "energy")))
    with pytest.raises(MeterAbsent, match="no usable GPU"):
        Nvml(trees.FakeNvml(refuses=("init",)))


def test_nvml_that_refuses_in_mid_run() -> None:
    library = trees.FakeNvml()
    meter = Nvml(library)
    library.refuses = ("instant", "energy")
    with pytest.raises(OSError, match="Not Supported"):
        meter.read()


def test_nvml_reports_clock_limits() -> None:
    assert Nvml(trees.FakeNvml(reasons=1)).throttle().now == frozenset()
    assert Nvml(trees.FakeNvml(reasons=4 + 32)).throttle().now == {"GPU power cap", "GPU temperature"}
    assert Nvml(trees.FakeNvml(refuses=("reasons",))).throttle() is None


def test_the_fake_nvml_has_the_real_one_s_names() -> None:
    pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py, the extra nvml")
    used = [name for name in vars(trees.FakeNvml) if name.lower().startswith("nvml")]
    assert used
    assert [name for name in used if not hasattr(pynvml, name)] == []
