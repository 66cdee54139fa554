"""Jetson's monitors over made-up trees: the right rails, the right total, and what can be wrong with them."""

import pathlib

import power_trees as trees
import pytest

from edgekv.power import find_meter
from edgekv.power.base import MeterAbsent, MeterRefused
from edgekv.power.boards import boards, find_board
from edgekv.power.ina238 import Ina238
from edgekv.power.ina3221 import Ina3221, Ina3221Iio
from edgekv.power.sysfs import NumberFile

ROOT = pathlib.Path(__file__).resolve().parent.parent


# board: (its device tree's model, profile, sensor tree, meter, total rails, total watts)
BOARDS = {
    "nano": ("NVIDIA Jetson Nano Developer Kit", "jetson-nano", trees.NANO, "ina3221-iio", ["POM_5V_IN"], 2.003),
    "xavier": (
        "NVIDIA Jetson Xavier NX Developer Kit",
        "jetson-xavier-nx",
        trees.XAVIER_NX,
        "ina3221",
        ["VDD_IN"],
        5.0,
    ),
    "orin-nano": (
        "NVIDIA Jetson Orin Nano Developer Kit",
        "jetson-orin-nano",
        trees.ORIN_NANO,
        "ina3221",
        ["VDD_IN"],
        6.048,
    ),
    "orin-nano-super": (
        "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
        "jetson-orin-nano-super",
        trees.ORIN_NANO,
        "ina3221",
        ["VDD_IN"],
        6.048,
    ),
    "agx-orin": (
        "NVIDIA Jetson AGX Orin Developer Kit",
        "jetson-agx-orin",
        trees.AGX_ORIN,
        "ina3221",
        ["VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"],
        4 + 2 + 4,
    ),
    "thor": (
        "NVIDIA Jetson AGX Thor Developer Kit",
        None,
        trees.ina238() | trees.ORIN_NANO,
        "ina238",
        ["VIN"],
        41.5,
    ),
}


@pytest.mark.parametrize("name", BOARDS)
def test_every_board(name: str, tmp_path: pathlib.Path) -> None:
    model, profile, tree, meter_name, total, watts = BOARDS[name]
    root = trees.write_tree(tmp_path, tree | trees.model(model))
    meter, notes = find_meter(root=root)
    assert (meter.name, list(meter.total), notes) == (meter_name, total, [])
    assert trees.total_w(meter) == pytest.approx(watts)
    board = find_board(root)
    assert board == (profile and boards()[profile])
    assert board is None or meter.name in board.meters


@pytest.mark.parametrize("model", ["NVIDIA Jetson Nano 2GB Developer Kit", "Raspberry Pi 4 Model B Rev 1.4"])
def test_boards_without_a_sensor(model: str, tmp_path: pathlib.Path) -> None:
    root = trees.write_tree(tmp_path, trees.model(model))
    board = find_board(root)
    assert board is not None
    assert board.meters == []
    with pytest.raises(MeterAbsent, match="--power-csv"):
        find_meter(root=root)


def test_overlapping_rails_are_read_and_not_added(tmp_path: pathlib.Path) -> None:
    meter = Ina3221.probe(trees.write_tree(tmp_path, trees.AGX_ORIN))
    assert set(meter.rails) == {"VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0", "VDDQ_VDD2_1V8AO"}
    assert meter.read().power_w["VDDQ_VDD2_1V8AO"] == pytest.approx(1.5)
    assert trees.total_w(meter) == pytest.approx(10)


def test_without_an_input_rail_all_rails_count(tmp_path: pathlib.Path) -> None:
    tree = trees.iio("1-0040", {0: ("GPU", 1000), 1: ("CPU", 2000), 2: ("SOC", 3000)})
    assert trees.total_w(Ina3221Iio.probe(trees.write_tree(tmp_path, tree))) == pytest.approx(6)


def eio(path: pathlib.Path) -> None:
    """Makes the file answer EIO, as on a failing bus: so does a process's memory at address 0."""
    path.unlink()
    path.symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match="Input/output error"):
        NumberFile(path)()


BASE = "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3"


def test_a_side_rail_that_fails_costs_itself_only(tmp_path: pathlib.Path) -> None:
    root = trees.write_tree(tmp_path, trees.ORIN_NANO)
    eio(root / BASE / "in3_input")
    meter = Ina3221.probe(root)
    assert set(meter.read().power_w) == {"VDD_IN", "VDD_CPU_GPU_CV"}


def test_a_total_rail_that_fails_is_refused_or_loses_the_sample(tmp_path: pathlib.Path) -> None:
    root = trees.write_tree(tmp_path, trees.ORIN_NANO)
    meter = Ina3221.probe(root)
    (root / BASE / "in1_input").write_text("")
    with pytest.raises(ValueError, match="invalid literal"):
        meter.read()
    (root / BASE / "in1_input").write_text("5000\n")
    assert trees.total_w(meter) == pytest.approx(6)
    eio(root / BASE / "in1_input")
    with pytest.raises(MeterRefused, match="input/output error"):
        Ina3221.probe(root)


@pytest.mark.parametrize("garbage", ["", "abc", "12 34", "0x10", "1e3", "999999999999"])
def test_garbage_loses_the_sample(garbage: str, tmp_path: pathlib.Path) -> None:
    root = trees.write_tree(tmp_path, trees.ORIN_NANO)
    meter = Ina3221.probe(root)
    (root / BASE / "curr1_input").write_text(garbage)
    with pytest.raises(ValueError, match=r"invalid literal|reads"):
        meter.read()


def test_a_channel_without_its_current_is_no_rail(tmp_path: pathlib.Path) -> None:
    root = trees.write_tree(tmp_path, trees.ORIN_NANO)
    (root / BASE / "curr2_input").unlink()
    assert "VDD_CPU_GPU_CV" not in Ina3221.probe(root).rails


def test_thor_ignores_usb_contracts_and_names_several_monitors(tmp_path: pathlib.Path) -> None:
    assert trees.total_w(Ina238.probe(trees.write_tree(tmp_path, trees.ina238()))) == pytest.approx(41.5)
    trees.write_tree(tmp_path, trees.ina238(number=6, microwatts=1_000_000))
    meter = Ina238.probe(tmp_path)
    assert meter.rails == ("hwmon4", "hwmon6")
    assert trees.total_w(meter) == pytest.approx(42.5)
