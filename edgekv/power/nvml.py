"""NVIDIA GPUs through NVML (the package nvidia-ml-py): the board's energy counter and its power."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from typing import Any

from edgekv.power.base import (
    Clock,
    EnergyCounter,
    MeterAbsent,
    MeterRefused,
    PowerMeter,
    Reading,
    Root,
    Throttle,
    try_reading,
)

ENERGY_S = (
    5.0  # between readings of the energy counter: one takes 3 to 5 ms of processor time on an H200, power 0.1
)

# Clock limits by the end of their constant's name in nvml.h; idle and application clocks are none.
LIMITS = {
    "SwPowerCap": "GPU power cap",
    "HwSlowdown": "GPU hardware slowdown",
    "SwThermalSlowdown": "GPU temperature",
    "HwThermalSlowdown": "GPU hardware temperature",
    "HwPowerBrakeSlowdown": "GPU power brake",
}


class Nvml(PowerMeter):
    """One rail per GPU: joules from its counter (Volta and later), watts beside it; either alone is enough.

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
        try_reading(meter, "see what `nvidia-smi` says")
        return meter

    def read(self) -> Reading:
        with_energy = self._watts is None or self._clock() >= self._energy_due_s
        return self._read(with_energy=with_energy)

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
            self._energy_due_s = self._clock() + ENERGY_S
        return Reading(power, energy)

    def throttle(self) -> Throttle | None:
        limits = set()
        try:
            for handle in self._handles.values():
                bits = self._library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
                for name, text in LIMITS.items():
                    if bits & getattr(self._library, f"nvmlClocksThrottleReason{name}"):
                        limits.add(text)
        except (self._library.NVMLError, AttributeError):
            return None
        return Throttle(now=frozenset(limits))

    def _working(self, read: Callable[[Any], float]) -> Callable[[Any], float] | None:
        """``read`` itself if every GPU answers it."""
        try:
            for handle in self._handles.values():
                read(handle)
        except (self._library.NVMLError, AttributeError, ValueError):
            return None
        return read

    def _instant_watts(self, handle: Any) -> float:
        """The usual call averages over a second on recent GPUs; this field does not."""
        (field,) = self._library.nvmlDeviceGetFieldValues(handle, [self._library.NVML_FI_DEV_POWER_INSTANT])
        if field.nvmlReturn:
            raise ValueError(f"NVML error {field.nvmlReturn}")
        return float(field.value.uiVal) * 1e-3

    def _average_watts(self, handle: Any) -> float:
        return float(self._library.nvmlDeviceGetPowerUsage(handle)) * 1e-3

    def _raw_joules(self, handle: Any) -> float:
        return float(self._library.nvmlDeviceGetTotalEnergyConsumption(handle)) * 1e-3
