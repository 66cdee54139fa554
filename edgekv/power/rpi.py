"""Raspberry Pi 5: every rail's volts and amperes from the PMIC, through `vcgencmd pmic_read_adc`."""

from __future__ import annotations

import re
import shutil
import subprocess

from edgekv.power.base import (
    Correction,
    MeterAbsent,
    MeterRefused,
    PowerMeter,
    Reading,
    Root,
    Throttle,
    try_reading,
)

LINE = re.compile(r"\s*(\w+)_([AV])\s+(?:current|volt)\(\d+\)=(\d+(?:\.\d*)?)\2\s*")
TIMEOUT_S = 2.0
PERMISSION = re.compile(r"VCHI|/dev/vc|permission|not permitted", re.IGNORECASE)
REMEDY = "sudo usermod -aG video $USER, then log in again"

# Bits of `vcgencmd get_throttled` in force; the same 16 higher have happened since boot.
LIMITS = {0: "under-voltage", 1: "frequency capped", 2: "throttled", 3: "soft temperature limit"}


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
        self.rails = self.total = tuple(parse_rails(self._run()))
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
            remedy = REMEDY if PERMISSION.search(str(error)) else "try `vcgencmd pmic_read_adc` by hand"
            raise MeterRefused(f"rpi-pmic: vcgencmd fails ({error}): {remedy}") from None
        try_reading(meter, REMEDY)
        return meter

    def read(self) -> Reading:
        watts = parse_rails(self._run())
        missing = [rail for rail in self.total if rail not in watts]
        if missing:
            raise ValueError(f"pmic_read_adc left out {missing[0]}")
        return Reading(power_w={rail: watts[rail] for rail in self.rails})

    def _run(self) -> str:
        return run_vcgencmd(self._vcgencmd, "pmic_read_adc")


def run_vcgencmd(vcgencmd: str, command: str) -> str:
    """What it prints. Raises OSError where it fails or takes too long."""
    try:
        done = subprocess.run(
            [vcgencmd, command], stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"vcgencmd {command} did not answer within {TIMEOUT_S} s") from None
    text = done.stdout.decode(errors="replace")
    if done.returncode or text.startswith("error="):
        said = " ".join((text + done.stderr.decode(errors="replace")).split())
        raise OSError(f"vcgencmd {command}: {said or f'exit status {done.returncode}'}")
    return text


def parse_rails(text: str) -> dict[str, float]:
    """Watts by rail, in the order of the voltages; lines of another form are skipped."""
    amperes: dict[str, float] = {}
    volts: dict[str, float] = {}
    for line in text.splitlines():
        match = LINE.fullmatch(line)
        if match:
            {"A": amperes, "V": volts}[match[2]][match[1]] = float(match[3])
    return {rail: volts[rail] * amperes[rail] for rail in volts if rail in amperes}


def vcgencmd_throttle() -> Throttle | None:
    """`vcgencmd get_throttled`; None where there is no such command or it fails."""
    vcgencmd = shutil.which("vcgencmd")
    if vcgencmd is None:
        return None
    try:
        bits = int(run_vcgencmd(vcgencmd, "get_throttled").strip().removeprefix("throttled="), 16)
    except (OSError, ValueError):
        return None
    now = frozenset(text for bit, text in LIMITS.items() if bits >> bit & 1)
    return Throttle(now, {text: bits >> (16 + bit) & 1 for bit, text in LIMITS.items()})
