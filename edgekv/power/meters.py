"""Power sensors of boards, processors, GPUs and batteries: one class each, listed in METERS.

A new sensor is a subclass of `PowerMeter` and a line in METERS. Paths, names and units are those of the kernel's
Documentation (hwmon/ina3221.rst, power/powercap), the Jetson Linux Developer Guide and nvml.h.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
import os
import pathlib
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from edgekv.errors import PowerError, unknown

Root = str | os.PathLike[str]
Clock = Callable[[], float]
Source = Callable[[], float]

LEAST_RAIL_W, MOST_RAIL_W = -10.0, 10_000.0  # an idle shunt may read a little below 0; beyond these it is garbage
READ_ATTEMPTS = 3  # a sensor that answers EIO now and then is still a sensor


class MeterAbsent(PowerError):
    """This kind of sensor is not on this machine."""


class MeterRefused(PowerError):
    """The sensor is here and can't be read; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """Watts, or joules since some fixed moment, or both, of each rail that answered.

    Raises ValueError for watts that no rail can carry.
    """

    power_w: Mapping[str, float] = dataclasses.field(default_factory=dict)
    energy_j: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for rail, watts in self.power_w.items():
            if not LEAST_RAIL_W <= watts <= MOST_RAIL_W:  # NaN too
                raise ValueError(f"{rail} reads {watts} W")


@dataclasses.dataclass(frozen=True)
class Correction:
    """watts = slope * total + offset_w: what the rails leave out, fitted by somebody with a wall meter."""

    name: str
    slope: float
    offset_w: float
    source: str

    def __str__(self) -> str:
        return f"{self.name} = {self.slope} x sum + {self.offset_w} W ({self.source})"

    def joules(self, joules: float, seconds: float) -> float:
        """Correct the joules of a sum over so many seconds."""
        return self.slope * joules + self.offset_w * seconds


@dataclasses.dataclass(frozen=True)
class Throttle:
    """Limits on the clocks: those in force, and how often each was met so far (since boot, or a sticky 0 or 1)."""

    now: frozenset[str] = frozenset()
    ever: Mapping[str, int] = dataclasses.field(default_factory=dict)


def all_limits(*found: Throttle | None) -> Throttle | None:
    """Join what several sources report; None where none reports anything."""
    known = [each for each in found if each is not None]
    ever = {name: count for each in known for name, count in each.ever.items()}
    return Throttle(frozenset().union(*(each.now for each in known)), ever) if known else None


class PowerMeter(abc.ABC):
    """One kind of sensor, found by `probe`, read by `read`.

    rails: every rail it reads; total: those whose sum is the total, none of them part of another. covers: what the
    total includes and leaves out. sees: the devices ("cpu", "gpu") whose work shows in it. max_hz: how often
    reading it makes sense. tick_s: how old an energy counter's value can be.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    covers: ClassVar[str]
    sees: ClassVar[frozenset[str]] = frozenset({"cpu", "gpu"})
    max_hz: ClassVar[float] = 100.0
    tick_s: ClassVar[float] = 0.0
    correction: ClassVar[Correction | None] = None

    rails: tuple[str, ...]
    total: tuple[str, ...]

    @classmethod
    @abc.abstractmethod
    def probe(cls, root: Root = "/") -> PowerMeter:
        """Return the machine's sensor after one reading of it. ``root`` is the folder that holds `sys`.

        Raises MeterAbsent, or MeterRefused where it is there and does not answer.
        """

    @abc.abstractmethod
    def read(self) -> Reading:
        """Read the rails; all of `total` are in it. Raises OSError or ValueError: this sample is lost."""

    def read_edge(self) -> Reading:
        """Read where a phase begins or ends: everything, even what is too expensive to be read each time."""
        return self.read()

    def throttle(self) -> Throttle | None:
        """Return the clock limits that this sensor itself reports; None: it reports none."""
        return None

    def require_reading(self, remedy: str) -> None:
        """Raise MeterRefused if none of a few readings succeeds."""
        for _ in range(READ_ATTEMPTS):
            try:
                self.read()
                return
            except (OSError, ValueError) as error:  # noqa: PERF203
                why = reason(error)
        raise MeterRefused(f"{self.name} is here but can't be read ({why}): {remedy}")


class FileMeter(PowerMeter):
    """A meter each of whose rails is read by a function of its own; in watts, unless `read` says otherwise."""

    def __init__(self, sources: Mapping[str, Source], total: tuple[str, ...] | None = None) -> None:
        self._sources, self.rails = dict(sources), tuple(sources)
        self.total = self.rails if total is None else total

    def read(self) -> Reading:
        return Reading(power_w=self._values())

    def _values(self) -> dict[str, float]:
        """Read every rail. One outside `total` may fail and is left out; one of `total` raises its error."""
        values = {rail: self._sources[rail]() for rail in self.total}
        for rail in self._sources.keys() - values.keys():
            with contextlib.suppress(OSError, ValueError):
                values[rail] = self._sources[rail]()
        return values


def reason(error: Exception) -> str:
    """Shorten an error to a few words, without the path that an OSError repeats."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__


class NumberFile:
    """A file that holds one whole number, different at each call; it stays open, so that a reading is cheap.

    Calls raise OSError, or ValueError where the content is no number.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._fd = -1

    def __call__(self) -> int:
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        return int(os.pread(self._fd, 64, 0))

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def scaled(factor: float, *paths: pathlib.Path) -> Source:
    """Return a reader of the product of the files' numbers, times a factor."""
    files = [NumberFile(path) for path in paths]
    return lambda: factor * math.prod(file() for file in files)


def read_word(path: pathlib.Path) -> str | None:
    """Return the text of a file without blanks around it; None where it can't be read."""
    try:
        return path.read_text(errors="replace").strip("\0\n ")
    except OSError:
        return None


def folders(root: Root, pattern: str) -> list[pathlib.Path]:
    """List the folders below ``root`` that match, in a stable order."""
    return sorted(pathlib.Path(root).glob(pattern))


class EnergyCounter:
    """Joules since the first reading, from an energy counter that wraps around at ``range_j``.

    A step that would need more than ``most_w`` is garbage and raises ValueError: the next good value continues
    from the last. After several in a row the counter was restarted and nothing more is known.
    """

    def __init__(
        self, range_j: float = math.inf, most_w: float = 5000.0, clock: Clock = time.perf_counter
    ) -> None:
        self._range_j, self._most_w, self._clock = range_j, most_w, clock
        self._last: tuple[float, float] | None = None  # time, raw joules
        self._joules = 0.0
        self._rejected = 0

    def advance(self, raw_j: float) -> float:
        """Return the joules so far, given what the counter shows now."""
        now = self._clock()
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
VCGENCMD_S = 2.0  # it may take
NO_PERMISSION = re.compile(r"VCHI|/dev/vc|permission|not permitted", re.IGNORECASE)
JOIN_GROUP = "sudo usermod -aG video $USER, then log in again"
# Bits of `vcgencmd get_throttled` in force; the same 16 higher have happened since boot.
PI_LIMITS = {0: "under-voltage", 1: "frequency capped", 2: "throttled", 3: "soft temperature limit"}


class RpiPmic(PowerMeter):
    """Watts of each rail that has both a current and a voltage, paired by name: indices vary.

    EXT5V and BATT have a voltage only.
    """

    name = "rpi-pmic"
    summary = "Raspberry Pi 5 PMIC"
    covers = "the board's own rails; not what hangs on USB, the HAT connector or PCIe, nor the PMIC's own losses"
    max_hz = 10.0
    correction = Correction("at the wall", 1.1451, 0.5879, "fit of github.com/jfikar/RPi5-power")

    def __init__(self, vcgencmd: str) -> None:
        self._vcgencmd = vcgencmd
        self.rails = self.total = tuple(self._watts())
        if not self.rails:
            raise ValueError("no line of pmic_read_adc is a rail's current with its voltage")

    @classmethod
    def probe(cls, root: Root = "/") -> RpiPmic:
        vcgencmd = shutil.which("vcgencmd")
        if vcgencmd is None:
            raise MeterAbsent("no vcgencmd on the PATH: not a Raspberry Pi, or its tools are not installed")
        try:
            meter = cls(vcgencmd)
        except (OSError, ValueError) as error:
            if "not registered" in str(error):
                raise MeterAbsent(
                    "this Raspberry Pi's firmware can't measure its rails: only the Pi 5 does"
                ) from None
            remedy = JOIN_GROUP if NO_PERMISSION.search(str(error)) else "try `vcgencmd pmic_read_adc` by hand"
            raise MeterRefused(f"rpi-pmic: vcgencmd fails ({error}): {remedy}") from None
        meter.require_reading(JOIN_GROUP)
        return meter

    def read(self) -> Reading:
        watts = self._watts()
        missing = [rail for rail in self.total if rail not in watts]
        if missing:
            raise ValueError(f"pmic_read_adc left out {missing[0]}")
        return Reading(power_w={rail: watts[rail] for rail in self.rails})

    def _watts(self) -> dict[str, float]:
        return parse_pmic(run_vcgencmd(self._vcgencmd, "pmic_read_adc"))


def run_vcgencmd(vcgencmd: str, command: str) -> str:
    """Return what it prints. Raises OSError where it fails or takes too long."""
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
    """Return the watts by rail, in the order of the voltages; lines of another form are skipped."""
    found: dict[str, dict[str, float]] = {"A": {}, "V": {}}
    for match in filter(None, map(PMIC_LINE.fullmatch, text.splitlines())):
        found[match[2]][match[1]] = float(match[3])
    return {rail: volts * found["A"][rail] for rail, volts in found["V"].items() if rail in found["A"]}


def vcgencmd_throttle() -> Throttle | None:
    """Read `vcgencmd get_throttled`; None where there is no such command or it fails."""
    vcgencmd = shutil.which("vcgencmd")
    if vcgencmd is None:
        return None
    try:
        bits = int(run_vcgencmd(vcgencmd, "get_throttled").strip().removeprefix("throttled="), 16)
    except (OSError, ValueError):
        return None
    now = frozenset(text for bit, text in PI_LIMITS.items() if bits >> bit & 1)
    return Throttle(now, {text: bits >> (16 + bit) & 1 for bit, text in PI_LIMITS.items()})


# Jetson: INA238 and INA3221

WHOLE_RAILS = ("VDD_IN", "POM_5V_IN")  # the module's input: everything else is inside
FED_BY = {"VDDQ_VDD2_1V8AO": "VIN_SYS_5V0"}  # AGX Orin: a rail that another one feeds


class Ina238(FileMeter):
    """Every hwmon device called ina238; the USB-C ports' `ucsi-source-psy-*` report contracts, not power."""

    name = "ina238"
    summary = "Jetson Thor INA238"
    covers = "everything that the board's input feeds, the carrier board included"

    @classmethod
    def probe(cls, root: Root = "/") -> Ina238:
        devices = [d for d in folders(root, "sys/class/hwmon/hwmon*") if read_word(d / "name") == "ina238"]
        if not devices:
            raise MeterAbsent("no Jetson Thor INA238")
        sources = {}
        for device in devices:
            label = read_word(device / "power1_label") or read_word(device / "in1_label")
            rail = label or ("VIN" if len(devices) == 1 else device.name)
            sources[rail] = scaled(1e-6, device / "power1_input")
        meter = cls(sources, ("VIN",) if "VIN" in sources else None)
        meter.require_reading(f"look at {devices[0]} as root")
        return meter


class Ina3221(FileMeter):
    """Kernel 5 and later (L4T 34 on): hwmon files in{n}_input mV and curr{n}_input mA; there is no power file."""

    name = "ina3221"
    summary = "Jetson INA3221 through hwmon"
    covers = "the Jetson module; the carrier board, USB and NVMe only where VDD_IN includes them"
    pattern: ClassVar[str] = "sys/bus/i2c/drivers/ina3221/*-*/hwmon/hwmon*"

    @classmethod
    def probe(cls, root: Root = "/") -> Ina3221:
        sources: dict[str, Source] = {}
        for folder in folders(root, cls.pattern):
            for rail, watts in cls.channels(folder):
                sources[rail if rail not in sources else f"{rail}@{folder}"] = watts
        if not sources:
            raise MeterAbsent(f"no {cls.summary}")
        whole = [rail for rail in WHOLE_RAILS if rail in sources][:1]
        meter = cls(sources, tuple(whole or [rail for rail in sources if FED_BY.get(rail) not in sources]))
        meter.require_reading(f"look at {folder} as root")
        return meter

    @staticmethod
    def channels(folder: pathlib.Path) -> Iterator[tuple[str, Source]]:
        """Yield (rail, reader of its watts); channel 7 is the sum of the shunts, NC is nothing."""
        for channel in (1, 2, 3):
            rail = read_word(folder / f"in{channel}_label")
            amperes = folder / f"curr{channel}_input"
            if rail and rail != "NC" and amperes.exists():
                yield rail, scaled(1e-6, folder / f"in{channel}_input", amperes)


class Ina3221Iio(Ina3221):
    """Kernel 4.9 (L4T 32): industrial-I/O files rail_name_{n} and in_power{n}_input in mW."""

    name = "ina3221-iio"
    summary = "Jetson INA3221 of L4T 32 (kernel 4.9)"
    pattern = "sys/bus/i2c/drivers/ina3221x/*-*/iio:device*"

    @staticmethod
    def channels(folder: pathlib.Path) -> Iterator[tuple[str, Source]]:
        for channel in (0, 1, 2):
            rail = read_word(folder / f"rail_name_{channel}")
            if rail and rail != "NC":
                yield rail, scaled(1e-3, folder / f"in_power{channel}_input")


# Processors and GPUs that count their energy

RAPL_ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")  # AMD's too; intel-rapl-mmio shows the same packages again
RAPL_REMEDY = "energy_uj belongs to root; install the udev rule that `edgekv power doctor` names, or run as root"
NVML_ENERGY_S = 5.0  # between readings of the counter: one costs 3 to 5 ms of a core on an H200, one of power 0.1
# Clock limits by the end of their constant's name in nvml.h; idle and application clocks are none.
NVML_LIMITS = {
    "SwPowerCap": "GPU power cap",
    "HwSlowdown": "GPU hardware slowdown",
    "SwThermalSlowdown": "GPU temperature",
    "HwThermalSlowdown": "GPU hardware temperature",
    "HwPowerBrakeSlowdown": "GPU power brake",
}


class Rapl(FileMeter):
    """Microjoules of packages and memory; core and uncore are parts of a package, psys contains it."""

    name = "rapl"
    summary = "RAPL of Intel and AMD processors"
    covers = "processor packages, and memory where it has a counter; not the board, disks, fans or a GPU"
    sees = frozenset({"cpu"})
    max_hz = 20.0
    tick_s = 0.001

    @classmethod
    def probe(cls, root: Root = "/", clock: Clock = time.perf_counter) -> Rapl:
        every = [z for z in folders(root, "sys/class/powercap/intel-rapl:*") if RAPL_ZONE.fullmatch(z.name)]
        names = {zone.name: read_word(zone / "name") or zone.name for zone in every}
        zones: dict[str, Source] = {}
        for zone in every:
            parent = zone.name.rpartition(":")[0]
            rail = f"{names[parent]}/{names[zone.name]}" if parent in names else names[zone.name]
            raw, counter = scaled(1e-6, zone / "energy_uj"), EnergyCounter(_rapl_range_j(zone), clock=clock)
            zones[rail] = lambda raw=raw, counter=counter: counter.advance(raw())  # type: ignore[misc]
        if not zones:
            raise MeterAbsent("no RAPL counters")
        total = tuple(rail for rail in zones if re.fullmatch(r"package-[^/]*|([^/]*/)?dram", rail))
        meter = cls(zones, total or tuple(zones)[:1])
        meter.require_reading(RAPL_REMEDY)
        return meter

    def read(self) -> Reading:
        return Reading(energy_j=self._values())


def _rapl_range_j(zone: pathlib.Path) -> float:
    try:
        return NumberFile(zone / "max_energy_range_uj")() * 1e-6
    except FileNotFoundError:
        return math.inf
    except (OSError, ValueError) as error:
        raise MeterRefused(
            f"rapl: {zone}/max_energy_range_uj can't be read ({reason(error)}): {RAPL_REMEDY}"
        ) from None


class Nvml(PowerMeter):
    """One rail per NVIDIA GPU: joules from its counter (Volta and later), watts beside it; either alone is enough.

    The counter is read at the edges of phases, and now and then between them. On a Jetson NVML initialises and
    then refuses every power call, so only a real reading counts.
    """

    name = "nvml"
    summary = "NVIDIA GPU through NVML"
    covers = "each GPU's whole board with its memory; not the processor, its memory or the machine around it"
    sees = frozenset({"gpu"})
    max_hz = 20.0
    tick_s = 0.1  # measured on an H200

    def __init__(self, library: Any, clock: Clock = time.perf_counter) -> None:
        """Raises MeterRefused where no GPU reports energy or power. ``library``: the module `pynvml`."""
        self._library, self._clock = library, clock
        self._energy_due_s = clock()
        self._handles: dict[str, Any] = {}
        try:
            library.nvmlInit()
            count = library.nvmlDeviceGetCount()
            self._handles = {f"gpu{i}": library.nvmlDeviceGetHandleByIndex(i) for i in range(count)}
        except library.NVMLError as error:
            raise MeterAbsent(f"NVML finds no usable GPU ({error})") from None
        self.rails = self.total = tuple(self._handles)
        self._counters = {rail: EnergyCounter(clock=clock) for rail in self.rails}
        self._watts = self._working(self._instant_watts) or self._working(self._average_watts)
        self._joules = self._working(self._raw_joules)
        if not self._handles or not (self._watts or self._joules):
            raise MeterRefused(
                "nvml: the driver reports neither energy nor power for this GPU (as on every Jetson)"
            )

    @classmethod
    def probe(cls, root: Root = "/") -> Nvml:
        try:
            import pynvml  # the module of nvidia-ml-py
        except ImportError:
            if pathlib.Path(root, "proc/driver/nvidia/version").exists():
                raise MeterRefused(
                    "nvml: reading the GPU needs nvidia-ml-py: pip install 'edgekv[nvml]'"
                ) from None
            raise MeterAbsent("no NVIDIA driver") from None
        meter = cls(pynvml)
        meter.require_reading("see what `nvidia-smi` says")
        return meter

    def read(self) -> Reading:
        return self._read(with_energy=self._watts is None or self._clock() >= self._energy_due_s)

    def read_edge(self) -> Reading:
        return self._read(with_energy=True)

    def _read(self, with_energy: bool) -> Reading:
        power, energy = {}, {}
        try:
            for rail, handle in self._handles.items():
                if self._joules and with_energy:
                    energy[rail] = self._counters[rail].advance(self._joules(handle))
                if self._watts:
                    power[rail] = self._watts(handle)
        except self._library.NVMLError as error:
            raise OSError(f"NVML: {error}") from error
        if energy:
            self._energy_due_s = self._clock() + NVML_ENERGY_S
        return Reading(power, energy)

    def throttle(self) -> Throttle | None:
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
        """Return ``read`` itself if every GPU answers it."""
        try:
            for handle in self._handles.values():
                read(handle)
        except (self._library.NVMLError, AttributeError, ValueError):
            return None
        return read

    def _instant_watts(self, handle: Any) -> float:
        """Read the present power: the usual call averages over a second on recent GPUs, this field does not."""
        (field,) = self._library.nvmlDeviceGetFieldValues(handle, [self._library.NVML_FI_DEV_POWER_INSTANT])
        if field.nvmlReturn:
            raise ValueError(f"NVML error {field.nvmlReturn}")
        return float(field.value.uiVal) * 1e-3

    def _average_watts(self, handle: Any) -> float:
        return float(self._library.nvmlDeviceGetPowerUsage(handle)) * 1e-3

    def _raw_joules(self, handle: Any) -> float:
        return float(self._library.nvmlDeviceGetTotalEnergyConsumption(handle)) * 1e-3


class Battery(FileMeter):
    """power_now in uW, or current_now (uA) times voltage_now (uV); some drivers count discharging as negative."""

    name = "battery"
    summary = "a discharging battery"
    covers = "the whole machine with its display; a slow average, good for minutes rather than seconds"
    max_hz = 1.0

    @classmethod
    def probe(cls, root: Root = "/") -> Battery:
        supplies = folders(root, "sys/class/power_supply/*")
        # A mouse's or a headset's battery has the scope Device.
        batteries = [
            s for s in supplies if read_word(s / "type") == "Battery" and read_word(s / "scope") != "Device"
        ]
        if not batteries:
            raise MeterAbsent("no battery")
        for battery in batteries:
            status = read_word(battery / "status")
            if status != "Discharging":
                raise MeterRefused(
                    f"battery {battery.name} is {(status or 'in an unknown state').lower()}: unplug the charger: "
                    "only a discharging battery shows what the machine draws"
                )
        meter = cls({device.name: lambda device=device: _battery_watts(device) for device in batteries})  # type: ignore[misc]
        meter.require_reading("its driver reports neither power_now nor current_now and voltage_now")
        return meter


def _battery_watts(device: pathlib.Path) -> float:
    status = read_word(device / "status")
    if status != "Discharging":
        raise ValueError(f"{device.name} is {status}")
    try:
        return abs(scaled(1e-6, device / "power_now")())
    except FileNotFoundError:
        return abs(scaled(1e-12, device / "current_now", device / "voltage_now")())


METERS: dict[str, type[PowerMeter]] = {  # the preferred first: sensors that see the whole board
    kind.name: kind for kind in (RpiPmic, Ina238, Ina3221, Ina3221Iio, Rapl, Nvml, Battery)
}
NO_METER = "no power sensor that edgekv knows is here (an external meter's log: `edgekv run --power-csv`)"


@dataclasses.dataclass(frozen=True)
class SurveyedMeter:
    """One kind of sensor on this machine: the meter, or why there is none."""

    name: str
    meter: PowerMeter | None = None
    problem: PowerError | None = None


def survey(root: Root = "/") -> list[SurveyedMeter]:
    """Try every entry of METERS."""
    findings = []
    for name, kind in METERS.items():
        try:
            findings.append(SurveyedMeter(name, meter=kind.probe(root)))
        except PowerError as problem:  # noqa: PERF203
            findings.append(SurveyedMeter(name, problem=problem))
    return findings


def require_meter_name(name: str) -> None:
    """Raise PowerError for what is neither "auto" nor in METERS."""
    if name not in ("auto", *METERS):
        raise unknown(PowerError, "meter", name, ("auto", *METERS))


def find_meter(name: str = "auto", root: Root = "/", device: str | None = None) -> tuple[PowerMeter, list[str]]:
    """Return the named meter, or the best that sees the work of ``device`` ("cpu", "gpu"; None: any); and notes.

    The notes say which better sensors can't be read. Raises PowerError: none is here, or none can be read.
    """
    require_meter_name(name)
    if name != "auto":
        return METERS[name].probe(root), []
    notes = []
    for finding in survey(root):
        if isinstance(finding.problem, MeterRefused):
            notes.append(str(finding.problem))
        if finding.meter is None:
            continue
        if device in finding.meter.sees or device is None:
            return finding.meter, notes
        notes.append(f"{finding.name} is here but sees no work on the {device}")
    raise MeterAbsent("; ".join(notes) or NO_METER)
