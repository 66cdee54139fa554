"""Made-up sensors: /sys trees of every board, a fake vcgencmd, a fake NVML, and meters with known signals."""

import os
import pathlib
import stat
from collections.abc import Callable, Mapping

from edgekv.power.meters import PowerMeter, Reading

PMIC = """ 3V7_WL_SW_A current(0)=0.00000000A
   3V3_SYS_A current(1)=0.06245952A
   1V1_SYS_A current(5)=0.17566740A
    0V8_SW_A current(6)=0.32791250A
  VDD_CORE_A current(7)=10.87674000A
 3V7_WL_SW_V volt(8)=3.79999600V
   3V3_SYS_V volt(9)=3.30632200V
   1V1_SYS_V volt(13)=1.10439400V
    0V8_SW_V volt(14)=0.80256330V
  VDD_CORE_V volt(15)=0.89745940V
     EXT5V_V volt(24)=5.06788000V
"""
PMIC_W = 10.42512  # of the text above: the sum of five products, worked out apart from the code

Tree = dict[str, str]


def write_tree(root: pathlib.Path, files: Mapping[str, str]) -> pathlib.Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def hwmon(device: str, number: int, channels: Mapping[int, tuple[str, int, int]]) -> Tree:
    """Writes a monitor of kernel 5 and later: channel -> (label, mV, mA)."""
    base = f"sys/bus/i2c/drivers/ina3221/{device}/hwmon/hwmon{number}"
    tree = {f"{base}/name": "ina3221\n"}
    for channel, (label, millivolts, milliamperes) in channels.items():
        tree[f"{base}/in{channel}_label"] = f"{label}\n"
        tree[f"{base}/in{channel}_input"] = f"{millivolts}\n"
        tree[f"{base}/curr{channel}_input"] = f"{milliamperes}\n"
    return tree | {f"{base}/in7_label": "sum of shunt voltages\n", f"{base}/in7_input": "99999\n"}


def iio(device: str, rails: Mapping[int, tuple[str, int]]) -> Tree:
    """Writes a monitor of kernel 4.9: channel -> (rail, mW)."""
    base = f"sys/bus/i2c/drivers/ina3221x/{device}/iio:device0"
    names = {f"{base}/rail_name_{channel}": f"{rail}\n" for channel, (rail, _) in rails.items()}
    return names | {f"{base}/in_power{channel}_input": f"{watts}\n" for channel, (_, watts) in rails.items()}


def ina238(number: int = 4, microwatts: int = 41_500_000) -> Tree:
    """Writes Thor's: the input's monitor, and a USB-C port that reports its contract."""
    base = f"sys/class/hwmon/hwmon{number}"
    return {
        f"{base}/name": "ina238\n",
        f"{base}/power1_input": f"{microwatts}\n",
        "sys/class/hwmon/hwmon1/name": "ucsi_source_psy_USBC000:001\n",
        "sys/class/hwmon/hwmon1/power1_input": "100000000\n",
    }


def rapl(**zones: tuple[str, int]) -> Tree:
    """Writes zones such as z0_1 (sub-zone 1 of package zone 0) -> (name, microjoules)."""
    tree = {}
    for zone, (name, microjoules) in zones.items():
        base = f"sys/class/powercap/intel-rapl:{zone[1:].replace('_', ':')}"
        tree |= {
            f"{base}/name": f"{name}\n",
            f"{base}/energy_uj": f"{microjoules}\n",
            f"{base}/max_energy_range_uj": "262143328850\n",
        }
    return tree


def model(name: str) -> Tree:
    return {"proc/device-tree/model": f"{name}\0"}


ORIN_RAILS = {1: ("VDD_IN", 5040, 1200), 2: ("VDD_CPU_GPU_CV", 5040, 400), 3: ("VDD_SOC", 5040, 300)}
ORIN_NANO = hwmon("1-0040", 3, ORIN_RAILS)
AGX_ORIN = hwmon(
    "1-0040", 3, {1: ("VDD_GPU_SOC", 20000, 200), 2: ("VDD_CPU_CV", 20000, 100), 3: ("VIN_SYS_5V0", 5000, 800)}
) | hwmon("1-0041", 4, {1: ("NC", 0, 0), 2: ("VDDQ_VDD2_1V8AO", 5000, 300), 3: ("NC", 0, 0)})
NANO = iio("6-0040", {0: ("POM_5V_IN", 2003), 1: ("POM_5V_GPU", 0), 2: ("POM_5V_CPU", 320)})


def cpufreq(**groups: str) -> Tree:
    """Writes groups of cores such as policy0 -> its governor."""
    tree = {}
    for name, governor in groups.items():
        base = f"sys/devices/system/cpu/cpufreq/{name}"
        tree[f"{base}/scaling_governor"] = f"{governor}\n"
        tree[f"{base}/scaling_available_governors"] = "powersave userspace performance\n"
    return tree


NVPMODEL = {"etc/nvpmodel.conf": "# modes\n< POWER_MODEL ID=0 NAME=MAXN >\n< POWER_MODEL ID=2 NAME=MODE_15W >\n"}


def fake_vcgencmd(folder: pathlib.Path, script: str, name: str = "vcgencmd") -> pathlib.Path:
    """Writes an executable, vcgencmd or another; ``script`` is its shell code."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def pmic_script(text: str = PMIC, throttled: str = "0x0") -> str:
    return f"""case "$1" in
pmic_read_adc) cat <<'END'
{text}END
;;
get_throttled) echo throttled={throttled} ;;
*) echo 'error=1 error_msg="Command not registered"'; exit 255 ;;
esac"""


def path_with(folder: pathlib.Path) -> str:
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def total_w(meter: PowerMeter) -> float:
    reading = meter.read()
    return sum(reading.power_w[rail] for rail in meter.total)


class Signal(PowerMeter):
    """Watts as a function of time; ``read`` may do anything else first."""

    name = "signal"
    summary = covers = "a known signal"

    def __init__(self, watts: Callable[[], float], rails: tuple[str, ...] = ("total",)) -> None:
        self._watts = watts
        self.rails = self.total = rails

    @classmethod
    def open(cls, root: object) -> "Signal":
        raise NotImplementedError

    def read(self) -> Reading:
        return Reading(power_w={rail: self._watts() for rail in self.rails})


class NvmlError(Exception):
    pass


class FakeNvml:
    """The part of pynvml that the meter uses; ``refuses`` names calls that raise, as a Jetson's do."""

    NVMLError = NvmlError
    NVML_FI_DEV_POWER_INSTANT = 186
    nvmlClocksThrottleReasonSwPowerCap = 4
    nvmlClocksThrottleReasonHwSlowdown = 8
    nvmlClocksThrottleReasonSwThermalSlowdown = 32
    nvmlClocksThrottleReasonHwThermalSlowdown = 64
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 128

    def __init__(
        self, gpus: int = 1, refuses: tuple[str, ...] = (), joules: float = 5000.0, reasons: int = 1
    ) -> None:
        self.gpus, self.refuses, self.joules, self.reasons = gpus, refuses, joules, reasons

    def _check(self, call: str) -> None:
        if call in self.refuses:
            raise NvmlError("Not Supported")

    def nvmlInit(self) -> None:
        self._check("init")

    def nvmlDeviceGetCount(self) -> int:
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[object]:
        self._check("instant")
        value = type("Value", (), {"uiVal": 120_000 + handle})()
        return [type("Field", (), {"nvmlReturn": 0, "value": value})()]

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._check("usage")
        return 110_000 + handle

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        self._check("energy")
        return int(self.joules * 1000)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        self._check("reasons")
        return self.reasons


class Steady(Signal):
    """A board that draws 4 W all the time, in place of a Raspberry Pi's meter."""

    name = "rpi-pmic"
    covers = "a made-up board"
    max_hz = 100.0

    def __init__(self) -> None:
        super().__init__(lambda: 4.0)

    @classmethod
    def open(cls, root: object) -> "Steady":
        return cls()
