"""Power of a machine and energy of what it runs: sensors, sampling, joules by phase."""

from edgekv.power.energy import EnergyMeter, PowerSampler
from edgekv.power.meters import METERS, find_meter, survey

__all__ = ["METERS", "EnergyMeter", "PowerSampler", "find_meter", "survey"]
