"""Power sensors of boards, processors and GPUs, listed in METERS; and the state of a machine.

A new sensor is a subclass of `PowerMeter` and a line in METERS. Paths, names and units are those of the kernel's
Documentation (hwmon/ina3221.rst, power/powercap), the Jetson Linux Developer Guide and nvml.h.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import psutil

from edgekv.errors import PowerError
from edgekv.machine import format_bytes

Root = str | os.PathLike[str]
Clock = Callable[[], float]
Reader = Callable[[], float]

CPU_COOLING = re.compile(r"cpufreq|throttle", re.IGNORECASE)  # cooling devices that slow a processor down
CHECKOUT = pathlib.Path(__file__).resolve().parent.parent.parent / "power"
INSTALLED = pathlib.Path(sys.prefix) / "share" / "edgekv" / "power"
MIN_RAIL_W, MAX_RAIL_W = -10.0, 10_000.0  # an idle shunt may read a little below 0; beyond these it is garbage
READ_ATTEMPTS = 3  # a sensor that answers EIO now and then is still a sensor


class MeterAbsent(PowerError):
    """Raised where this machine has no sensor of this kind."""


class MeterRefused(PowerError):
    """Raised where the sensor is here and can't be read; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """One reading of a meter: watts, or joules since some fixed moment, or both, of each rail that answered.

    Raises ValueError for watts that no rail can carry.
    """

    power_w: Mapping[str, float] = dataclasses.field(default_factory=dict)
    energy_j: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for rail, watts in self.power_w.items():
            if not MIN_RAIL_W <= watts <= MAX_RAIL_W:  # NaN too
                raise ValueError(f"{rail} reads {watts} W")


@dataclasses.dataclass(frozen=True)
class Throttle:
    """Limits on the clocks: those in force now, and how often each was met (since boot, or a sticky 0 or 1)."""

    now: frozenset[str] = frozenset()
    ever: Mapping[str, int] = dataclasses.field(default_factory=dict)


def join_limits(*found: Throttle | None) -> Throttle | None:
    """Joins the limits that several sensors report; None where none reports anything."""
    known = [throttle for throttle in found if throttle is not None]
    ever = {name: count for throttle in known for name, count in throttle.ever.items()}
    return Throttle(frozenset().union(*(throttle.now for throttle in known)), ever) if known else None


class PowerMeter(abc.ABC):
    """Base class of a kind of sensor, which `probe` finds and `read` reads.

    rails: all rails that it reads. total: rails whose sum is the total, none of them part of another. covers: what
    the total includes and leaves out. devices: those whose work shows in it ("cpu", "gpu"). max_hz: readings per
    second that make sense. tick_s: how old an energy counter's value can be. remedy: advice if it can't be read.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    covers: ClassVar[str]
    devices: ClassVar[frozenset[str]] = frozenset({"cpu", "gpu"})
    max_hz: ClassVar[float] = 100.0
    tick_s: ClassVar[float] = 0.0
    remedy: ClassVar[str] = "look at its files in /sys as root"

    rails: tuple[str, ...]
    total: tuple[str, ...]

    @classmethod
    @abc.abstractmethod
    def open(cls, root: pathlib.Path) -> PowerMeter:
        """Opens the machine's sensor. Raises MeterAbsent, or MeterRefused where it is there and can't be read."""

    @abc.abstractmethod
    def read(self) -> Reading:
        """Reads the rails, those of `total` at least. Raises OSError or ValueError: this sample is lost."""

    def read_edge(self) -> Reading:
        """Reads where a phase begins or ends, counters that are too expensive to be read each time included."""
        return self.read()

    def read_throttle(self) -> Throttle | None:
        """Returns the clock limits that this sensor itself reports; None: it reports none."""
        return None

    @classmethod
    def probe(cls, root: Root = "/") -> PowerMeter:
        """Opens the sensor and reads it once. root: the folder that holds `sys`.

        Raises MeterAbsent, or MeterRefused where it is there and READ_ATTEMPTS readings fail.
        """
        meter = cls.open(pathlib.Path(root))
        for _ in range(READ_ATTEMPTS):
            try:
                meter.read()
                return meter
            except (OSError, ValueError) as error:  # noqa: PERF203
                why = error_text(error)
        raise MeterRefused(f"{cls.name} is here but can't be read ({why}): {cls.remedy}")


class FileMeter(PowerMeter):
    """Base class of meters that read each rail by a function: watts, or joules where it ``counts``."""

    counts: ClassVar[bool] = False

    def __init__(self, readers: Mapping[str, Reader]) -> None:
        self._readers, self.rails = dict(readers), tuple(readers)
        self.total = self.total_of(self.rails)

    @classmethod
    @abc.abstractmethod
    def readers(cls, root: pathlib.Path) -> dict[str, Reader]:
        """Returns the function that reads each rail."""

    @classmethod
    def total_of(cls, rails: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the rails whose sum is the total."""
        return rails

    @classmethod
    def open(cls, root: pathlib.Path) -> FileMeter:
        readers = cls.readers(root)
        if not readers:
            raise MeterAbsent(f"no {cls.summary}")
        return cls(readers)

    def read(self) -> Reading:
        """Reads every rail. One outside `total` that fails is left out; one of `total` raises its error."""
        values = {rail: self._readers[rail]() for rail in self.total}
        for rail in self._readers.keys() - values.keys():
            with contextlib.suppress(OSError, ValueError):
                values[rail] = self._readers[rail]()
        return Reading(energy_j=values) if self.counts else Reading(power_w=values)


def error_text(error: Exception) -> str:
    """Returns an error's message in a few words, without the path that an OSError repeats."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__


def product_reader(factor: float, *paths: pathlib.Path) -> Reader:
    """Returns a function that reads the product of the files' numbers, times a factor."""
    return lambda: factor * math.prod(map(read_number, paths))


def read_number(path: pathlib.Path) -> int:
    """Reads a file that holds one whole number. Raises OSError, or ValueError for other content."""
    with open(path, "rb", buffering=0) as file:
        return int(file.read(64))


def read_sysfs(path: pathlib.Path) -> str | None:
    """Reads the text of a file without blanks around it; None where it can't be read."""
    try:
        return path.read_text(errors="replace").strip("\0\n ")
    except OSError:
        return None


class EnergyCounter:
    """Reads the joules since its first call from a counter that wraps around at ``range_j`` joules.

    read: what the counter shows. A step of more than ``most_w`` watts is garbage and raises ValueError: the next
    good value goes on from the last. After several in a row the counter was restarted, and all values are refused.
    """

    def __init__(
        self,
        read: Reader,
        range_j: float = math.inf,
        most_w: float = 5000.0,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._read, self._range_j, self._most_w, self._clock = read, range_j, most_w, clock
        self._last: tuple[float, float] | None = None  # time, raw joules
        self._joules = 0.0
        self._rejected = 0

    def __call__(self) -> float:
        raw_j, now = self._read(), self._clock()
        if self._last is None:
            self._last = now, raw_j
            return 0.0
        step = raw_j - self._last[1]
        if step < 0:
            step += self._range_j
        # A counter ticks about once a millisecond, so the last value may be older than its reading.
        if self._rejected > 10 or not 0 <= step <= self._most_w * (now - self._last[0] + 0.1):
            self._rejected += 1
            raise ValueError(f"the energy counter jumped from {self._last[1]} to {raw_j} J")
        self._last, self._rejected = (now, raw_j), 0
        self._joules += step
        return self._joules


# Raspberry Pi 5: `vcgencmd pmic_read_adc`

PMIC_LINE = re.compile(r"\s*(\w+)_([AV])\s+(?:current|volt)\(\d+\)=(\d+(?:\.\d*)?)\2\s*")
VCGENCMD_S = 2.0  # the longest that it may take
NO_PERMISSION = re.compile(r"VCHI|/dev/vc|permission|not permitted", re.IGNORECASE)
# Bits of `vcgencmd get_throttled`: limits in force. The same, 16 bits higher: have been in force since boot.
PI_LIMITS = {0: "under-voltage", 1: "frequency capped", 2: "throttled", 3: "soft temperature limit"}


class RpiPmic(PowerMeter):
    """The Raspberry Pi 5's power chip: watts of each rail that has a current and a voltage, paired by name.

    Indices vary with the firmware. EXT5V and BATT have a voltage only.
    """

    name = "rpi-pmic"
    summary = "Raspberry Pi 5 PMIC"
    covers = "the board's own rails; not what hangs on USB, the HAT connector or PCIe, nor the PMIC's own losses"
    max_hz = 10.0
    remedy = "sudo usermod -aG video $USER, then log in again"

    def __init__(self, vcgencmd: str) -> None:
        self._vcgencmd = vcgencmd
        self.rails = self.total = tuple(parse_pmic(run_vcgencmd(vcgencmd, "pmic_read_adc")))
        if not self.rails:
            raise ValueError("no line of pmic_read_adc is a rail's current with its voltage")

    @classmethod
    def open(cls, root: pathlib.Path) -> RpiPmic:
        vcgencmd = shutil.which("vcgencmd")
        if vcgencmd is None:
            raise MeterAbsent("no vcgencmd on the PATH: not a Raspberry Pi, or its tools are not installed")
        try:
            return cls(vcgencmd)
        except (OSError, ValueError) as error:
            if "not registered" in str(error):
                raise MeterAbsent(
                    "this Raspberry Pi's firmware can't measure its rails: only the Pi 5 does"
                ) from None
            remedy = cls.remedy if NO_PERMISSION.search(str(error)) else "try `vcgencmd pmic_read_adc` by hand"
            raise MeterRefused(f"rpi-pmic: vcgencmd fails ({error}): {remedy}") from None

    def read(self) -> Reading:
        watts = parse_pmic(run_vcgencmd(self._vcgencmd, "pmic_read_adc"))
        missing = [rail for rail in self.total if rail not in watts]
        if missing:
            raise ValueError(f"pmic_read_adc left out {missing[0]}")
        return Reading(power_w={rail: watts[rail] for rail in self.rails})


def run_vcgencmd(vcgencmd: str, command: str) -> str:
    """Runs a command of vcgencmd and returns what it prints. Raises OSError where it fails or takes too long."""
    try:
        done = subprocess.run(
            [vcgencmd, command], stdin=subprocess.DEVNULL, capture_output=True, timeout=VCGENCMD_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"vcgencmd {command} did not answer within {VCGENCMD_S} s") from None
    text = done.stdout.decode(errors="replace")
    if done.returncode or text.startswith("error="):
        said = " ".join((text + done.stderr.decode(errors="replace")).split())
        raise OSError(f"vcgencmd {command}: {said or f'exit status {done.returncode}'}")
    return text


def parse_pmic(text: str) -> dict[str, float]:
    """Returns the watts by rail, in the order of the voltages; skips lines of another form."""
    found: dict[str, dict[str, float]] = {"A": {}, "V": {}}
    for match in filter(None, map(PMIC_LINE.fullmatch, text.splitlines())):
        found[match[2]][match[1]] = float(match[3])
    return {rail: volts * found["A"][rail] for rail, volts in found["V"].items() if rail in found["A"]}


def vcgencmd_throttle() -> Throttle | None:
    """Reads `vcgencmd get_throttled`; None where there is no such command or it fails."""
    vcgencmd = shutil.which("vcgencmd")
    if vcgencmd is None:
        return None
    try:
        bits = int(run_vcgencmd(vcgencmd, "get_throttled").strip().removeprefix("throttled="), 16)
    except (OSError, ValueError):
        return None
    now = frozenset(text for bit, text in PI_LIMITS.items() if bits >> bit & 1)
    return Throttle(now, {text: bits >> (16 + bit) & 1 for bit, text in PI_LIMITS.items()})


# Jetson: INA3221 and INA238

INPUT_RAILS = ("VDD_IN", "POM_5V_IN", "VIN")  # the module's or the board's input: everything else is inside
FED_BY = {"VDDQ_VDD2_1V8AO": "VIN_SYS_5V0"}  # AGX Orin: a rail that another one feeds


class Ina3221(FileMeter):
    """Power monitors of Jetsons with kernel 5 and later (L4T 34 on): hwmon files in mV and mA.

    There is no power file, and in7 sums the shunts. pattern: the monitors' folders. driver: what their file `name`
    must hold, if anything. labels: files with a channel's name. files: a channel's numbers, whose product times
    ``factor`` is watts. unlabelled: the name of a channel without one.
    """

    name = "ina3221"
    summary = "Jetson INA3221 through hwmon"
    covers = "the Jetson module; the carrier board, USB and NVMe only where VDD_IN includes them"
    pattern: ClassVar[str] = "sys/bus/i2c/drivers/ina3221/*-*/hwmon/hwmon*"
    driver: ClassVar[str | None] = None
    channels: ClassVar[tuple[int, ...]] = (1, 2, 3)
    labels: ClassVar[tuple[str, ...]] = ("in{}_label",)
    files: ClassVar[tuple[str, ...]] = ("in{}_input", "curr{}_input")
    factor: ClassVar[float] = 1e-6
    unlabelled: ClassVar[str] = "NC"  # as a rail that is not connected

    @classmethod
    def readers(cls, root: pathlib.Path) -> dict[str, Reader]:
        found: dict[str, Reader] = {}
        for folder in sorted(root.glob(cls.pattern)):
            if cls.driver and read_sysfs(folder / "name") != cls.driver:
                continue
            for channel in cls.channels:
                named = (read_sysfs(folder / label.format(channel)) for label in cls.labels)
                rail = next(filter(None, named), cls.unlabelled)
                paths = [folder / file.format(channel) for file in cls.files]
                if rail != "NC" and all(path.exists() for path in paths):
                    found[rail if rail not in found else f"{rail}@{folder}"] = product_reader(cls.factor, *paths)
        return found

    @classmethod
    def total_of(cls, rails: tuple[str, ...]) -> tuple[str, ...]:
        inputs = tuple(rail for rail in rails if rail.partition("@")[0] in INPUT_RAILS)
        return inputs or tuple(rail for rail in rails if FED_BY.get(rail) not in rails)


class Ina3221Iio(Ina3221):
    """Power monitors of Jetsons with kernel 4.9 (L4T 32): industrial-I/O files in mW."""

    name = "ina3221-iio"
    summary = "Jetson INA3221 of L4T 32 (kernel 4.9)"
    pattern = "sys/bus/i2c/drivers/ina3221x/*-*/iio:device*"
    channels, labels, files, factor = (0, 1, 2), ("rail_name_{}",), ("in_power{}_input",), 1e-3


class Ina238(Ina3221):
    """The input's power monitor of a Jetson Thor; USB-C ports (`ucsi-source-psy-*`) report contracts instead."""

    name = driver = "ina238"
    summary = "Jetson Thor INA238"
    covers = "everything that the board's input feeds, the carrier board included"
    pattern = "sys/class/hwmon/hwmon*"
    channels, labels, files = (1,), ("power{}_label", "in{}_label"), ("power{}_input",)
    unlabelled = "VIN"


# Energy counters of processors and GPUs

RAPL_ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")  # AMD's too; intel-rapl-mmio shows the same packages again
# Clock limits by the end of their constant's name in nvml.h; idle and application clocks do not limit.
NVML_LIMITS = {
    "SwPowerCap": "GPU power cap",
    "HwSlowdown": "GPU hardware slowdown",
    "SwThermalSlowdown": "GPU temperature",
    "HwThermalSlowdown": "GPU hardware temperature",
    "HwPowerBrakeSlowdown": "GPU power brake",
}


class Rapl(FileMeter):
    """Energy counters of processor packages and memory; core and uncore are within a package, psys around it."""

    name = "rapl"
    summary = "RAPL of Intel and AMD processors"
    covers = "processor packages, and memory where it has a counter; not the board, disks, fans or a GPU"
    devices = frozenset({"cpu"})
    max_hz = 20.0
    tick_s = 0.001
    remedy = "energy_uj belongs to root; install the udev rule that `edgekv power doctor` names, or run as root"
    counts = True

    @classmethod
    def readers(cls, root: pathlib.Path) -> dict[str, Reader]:
        zones = [z for z in sorted(root.glob("sys/class/powercap/intel-rapl:*")) if RAPL_ZONE.fullmatch(z.name)]
        names = {zone.name: read_sysfs(zone / "name") or zone.name for zone in zones}
        found: dict[str, Reader] = {}
        for zone in zones:
            parent, limit = names.get(zone.name.rpartition(":")[0]), read_sysfs(zone / "max_energy_range_uj")
            range_j = int(limit) * 1e-6 if limit and limit.isdigit() else math.inf
            rail = f"{parent}/{names[zone.name]}" if parent else names[zone.name]
            found[rail] = EnergyCounter(product_reader(1e-6, zone / "energy_uj"), range_j)
        return found

    @classmethod
    def total_of(cls, rails: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(r for r in rails if re.fullmatch(r"package-[^/]*|([^/]*/)?dram", r)) or rails[:1]


class Nvml(PowerMeter):
    """NVIDIA GPUs, a rail each: watts, and joules from the counter (Volta and later); either alone is enough.

    Where there are watts, the counter is read at the edges of phases alone: it costs 3 to 5 ms of a core on an
    H200, watts 0.1 ms. On a Jetson NVML initialises and then refuses every power call.
    """

    name = "nvml"
    summary = "NVIDIA GPU through NVML"
    covers = "each GPU's whole board with its memory; not the processor, its memory or the machine around it"
    devices = frozenset({"gpu"})
    max_hz = 20.0
    tick_s = 0.1  # measured on an H200
    remedy = "see what `nvidia-smi` says"

    def __init__(self, library: Any) -> None:
        """Opens every GPU; library: the module `pynvml`. Raises MeterRefused: none reports energy or power."""
        self._library = library
        try:
            library.nvmlInit()
            count = library.nvmlDeviceGetCount()
            self._handles = {f"gpu{i}": library.nvmlDeviceGetHandleByIndex(i) for i in range(count)}
        except library.NVMLError as error:
            raise MeterAbsent(f"NVML finds no usable GPU ({error})") from None
        self.rails = self.total = tuple(self._handles)
        self._counters = {
            rail: EnergyCounter(functools.partial(self._raw_joules, handle))
            for rail, handle in self._handles.items()
        }
        self._watts = self._working(self._instant_watts) or self._working(self._average_watts)
        self._counts = self._working(self._raw_joules) is not None
        if not self._handles or not (self._watts or self._counts):
            raise MeterRefused(
                "nvml: the driver reports neither energy nor power for this GPU (as on every Jetson)"
            )

    @classmethod
    def open(cls, root: pathlib.Path) -> Nvml:
        try:
            import pynvml  # the module of nvidia-ml-py
        except ImportError:
            if (root / "proc/driver/nvidia/version").exists():
                raise MeterRefused(
                    "nvml: reading the GPU needs nvidia-ml-py: pip install 'edgekv[nvml]'"
                ) from None
            raise MeterAbsent("no NVIDIA driver") from None
        return cls(pynvml)

    def read(self) -> Reading:
        return self._read(with_energy=self._watts is None)

    def read_edge(self) -> Reading:
        return self._read(with_energy=True)

    def _read(self, with_energy: bool) -> Reading:
        power, energy = {}, {}
        try:
            for rail, handle in self._handles.items():
                if self._counts and with_energy:
                    energy[rail] = self._counters[rail]()
                if self._watts:
                    power[rail] = self._watts(handle)
        except self._library.NVMLError as error:
            raise OSError(f"NVML: {error}") from error
        return Reading(power, energy)

    def read_throttle(self) -> Throttle | None:
        library, bits = self._library, 0
        try:
            for handle in self._handles.values():
                bits |= library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            masks = {
                text: getattr(library, f"nvmlClocksThrottleReason{name}") for name, text in NVML_LIMITS.items()
            }
        except (library.NVMLError, AttributeError):
            return None
        return Throttle(now=frozenset(text for text, mask in masks.items() if bits & mask))

    def _working(self, read: Callable[[Any], float]) -> Callable[[Any], float] | None:
        """Returns ``read`` itself if every GPU answers it."""
        try:
            for handle in self._handles.values():
                read(handle)
        except (self._library.NVMLError, AttributeError, ValueError):
            return None
        return read

    def _instant_watts(self, handle: Any) -> float:
        """Reads the present power: the usual call averages over a second on recent GPUs."""
        (field,) = self._library.nvmlDeviceGetFieldValues(handle, [self._library.NVML_FI_DEV_POWER_INSTANT])
        if field.nvmlReturn:
            raise ValueError(f"NVML error {field.nvmlReturn}")
        return float(field.value.uiVal) * 1e-3

    def _average_watts(self, handle: Any) -> float:
        return float(self._library.nvmlDeviceGetPowerUsage(handle)) * 1e-3

    def _raw_joules(self, handle: Any) -> float:
        return float(self._library.nvmlDeviceGetTotalEnergyConsumption(handle)) * 1e-3


METERS: dict[str, type[PowerMeter]] = {  # in order of preference: sensors that see the whole board first
    kind.name: kind for kind in (RpiPmic, Ina238, Ina3221, Ina3221Iio, Rapl, Nvml)
}
NO_METER = "no power sensor that edgekv knows is here (an external meter's log: `edgekv run --power-csv`)"


def survey(root: Root = "/") -> dict[str, PowerMeter | PowerError]:
    """Tries every entry of METERS; returns the meter, or why there is none."""
    found: dict[str, PowerMeter | PowerError] = {}
    for name, kind in METERS.items():
        try:
            found[name] = kind.probe(root)
        except PowerError as problem:  # noqa: PERF203
            found[name] = problem
    return found


def require_meter_name(name: str) -> None:
    """Raises PowerError for a name that is neither "auto" nor in METERS."""
    if name not in ("auto", *METERS):
        raise PowerError("unknown", field="meter", value=name, accepted=("auto", *METERS))


def find_meter(name: str = "auto", root: Root = "/", device: str | None = None) -> tuple[PowerMeter, list[str]]:
    """Returns the named meter, or the best that sees the work of ``device`` ("cpu", "gpu"; None: any), and notes.

    The notes name better sensors that can't be used. Raises PowerError where no sensor is here or can be read.
    """
    require_meter_name(name)
    if name != "auto":
        return METERS[name].probe(root), []
    notes: list[str] = []
    for kind, found in survey(root).items():
        if isinstance(found, PowerMeter):
            if device in (None, *found.devices):
                return found, notes
            notes.append(f"{kind} is here but sees no work on the {device}")
        elif isinstance(found, MeterRefused):
            notes.append(str(found))
    raise MeterAbsent("; ".join(notes) or NO_METER)


NVPMODEL = re.compile(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>")
NVPMODEL_NOW = re.compile(r"NV Power Mode: (\S+)")
MODE_S = 30.0  # the longest that nvpmodel may take
AS_ROOT = "modes are chosen as root (sudo), and some Jetson modes only at boot"

# The state of a machine: limits on the clocks, temperature, cooling, modes


def _find(root: Root, pattern: str) -> list[pathlib.Path]:
    return sorted(pathlib.Path(root).glob(pattern))


def _cpu_cooling(root: Root) -> Throttle | None:
    """Reads the cooling devices by which the kernel slows processors down: every Jetson, many Arm boards."""
    devices = {
        kind: read_sysfs(device / "cur_state")
        for device in _find(root, "sys/class/thermal/cooling_device*")
        if (kind := read_sysfs(device / "type")) and CPU_COOLING.search(kind)
    }
    if not devices:
        return None
    return Throttle(frozenset(f"cooling by {kind}" for kind, state in devices.items() if state not in ("0", None)))


def _intel_counts(root: Root) -> Throttle | None:
    """Counts how often Intel processors were slowed down for their temperature."""
    path = "sys/devices/system/cpu/cpu*/thermal_throttle/package_throttle_count"
    counts = [int(text) for file in _find(root, path) if (text := read_sysfs(file)) and text.isdigit()]
    return Throttle(ever={"processor temperature": sum(counts)}) if counts else None


def read_throttle(root: Root = "/") -> Throttle | None:
    """Reads everything that the system reports about limited clocks; None where it reports nothing."""
    return join_limits(vcgencmd_throttle(), _cpu_cooling(root), _intel_counts(root))


def limits_between(before: Throttle | None, after: Throttle | None) -> tuple[str, ...] | None:
    """Lists what limited the clocks at either moment or between them; None: nothing here reports it.

    A sticky flag that was set before and is not in force can't tell whether it happened again.
    """
    if before is None or after is None:
        return None
    risen = {name for name, count in after.ever.items() if count > before.ever.get(name, 0)}
    certain = before.now | after.now | risen
    sticky = {n for n, count in before.ever.items() if count == after.ever.get(n) == 1 and n not in certain}
    return (*sorted(certain), *(f"{name} (before the run; whether again is not known)" for name in sorted(sticky)))


def throttle_text(limits: tuple[str, ...] | None) -> str:
    """Writes limits for a terminal."""
    if limits is None:
        return "throttling n/a (nothing here reports it)"
    return f"throttling: {', '.join(limits)}" if limits else "no throttling"


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The state of a machine at a moment; None: not known.

    temperature_c: of the hottest sensor. clock_mhz: mean of the cores. load_percent: of all cores.
    memory_used_bytes: of the whole machine, without caches that can be dropped.
    """

    temperature_c: float | None
    clock_mhz: float | None
    load_percent: float
    memory_used_bytes: int
    throttle: Throttle | None

    @classmethod
    def now(cls, root: Root = "/") -> Conditions:
        """Reads the state of this machine; the load is that since the last call, at first since the start."""
        groups = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
        degrees = [sensor.current for group in groups.values() for sensor in group if sensor.current]
        clock = psutil.cpu_freq()
        return cls(
            temperature_c=max(degrees, default=None),
            clock_mhz=clock.current if clock and clock.current else None,
            load_percent=psutil.cpu_percent(),
            memory_used_bytes=int(psutil.virtual_memory().used),
            throttle=read_throttle(root),
        )

    def to_text(self) -> str:
        """Writes it as a line for a terminal."""
        degrees = f"{self.temperature_c:.1f} C" if self.temperature_c is not None else "temperature n/a"
        clock = f"{self.clock_mhz:.0f} MHz" if self.clock_mhz is not None else "clock n/a"
        limits = throttle_text(None if self.throttle is None else tuple(sorted(self.throttle.now)))
        memory = format_bytes(self.memory_used_bytes)
        return f"{degrees}, {clock}, load {self.load_percent:.0f}%, memory {memory}, {limits}"


def clock_ranges(root: Root = "/") -> list[str]:
    """Lists governor and clock range of each group of cores that are clocked together."""
    lines = []
    for policy in _find(root, "sys/devices/system/cpu/cpufreq/policy*"):
        least, most = (read_sysfs(policy / f"cpuinfo_{end}_freq") for end in ("min", "max"))
        if least and most and least.isdigit() and most.isdigit():
            cores, governor = read_sysfs(policy / "affected_cpus"), read_sysfs(policy / "scaling_governor")
            lines.append(f"cores {cores}: {governor}, {int(least) // 1000} to {int(most) // 1000} MHz")
    return lines


@dataclasses.dataclass(frozen=True)
class PowerModes:
    """Modes that trade speed for power: a Jetson's by nvpmodel, or the governors of the processor's clocks.

    now: the present mode, of each group of cores if these have their own. apply: sets as many; raises PowerError.
    """

    kind: str
    names: tuple[str, ...]
    now: tuple[str, ...]
    apply: Callable[[Sequence[str]], object]

    @classmethod
    def find(cls, root: Root = "/") -> PowerModes | None:
        """Finds the machine's modes; None: there are none to choose from."""
        ids = {name: i for i, name in NVPMODEL.findall(read_sysfs(pathlib.Path(root, "etc/nvpmodel.conf")) or "")}
        if ids and shutil.which("nvpmodel"):
            now = NVPMODEL_NOW.findall(run_nvpmodel("-q"))
            return cls("nvpmodel", tuple(ids), tuple(now), lambda modes: run_nvpmodel("-m", ids[modes[0]]))
        files = _find(root, "sys/devices/system/cpu/cpufreq/policy*/scaling_governor")
        now = [read_sysfs(file) or "" for file in files]
        names = (read_sysfs(files[0].with_name("scaling_available_governors")) or "") if files else ""
        usable = tuple(name for name in names.split() if name != "userspace")  # whose clock is the last one set

        def write(modes: Sequence[str]) -> None:
            try:
                for file, mode in zip(files, modes, strict=True):
                    file.write_text(mode)
            except OSError as error:
                raise PowerError(f"{error.filename} can't be written ({error_text(error)}): {AS_ROOT}") from None

        return cls("governor", usable, tuple(now), write) if usable else None


def run_nvpmodel(*arguments: str) -> str:
    """Runs nvpmodel, without an answer to what it asks, and returns what it prints. Raises PowerError."""
    command = ["nvpmodel", *arguments]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=MODE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise PowerError(f"{' '.join(command)} fails ({error_text(error)}): {AS_ROOT}") from None
    return done.stdout.decode(errors="replace")


def power_file(name: str) -> pathlib.Path | None:
    """Finds a file of `power/` by its name there: in the checkout, else where the wheel put it."""
    return next((folder / name for folder in (CHECKOUT, INSTALLED) if (folder / name).exists()), None)
