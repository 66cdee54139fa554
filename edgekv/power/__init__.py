"""Power of a machine and energy of what it runs: sensors, sampling, joules by phase."""

from edgekv.power.energy import EnergyMeter
from edgekv.power.meters import METERS, find_meter, survey
from edgekv.power.sampler import PowerSampler

__all__ = ["METERS", "EnergyMeter", "PowerSampler", "Sampler", "find_meter", "survey"]

Sampler = PowerSampler  # its older name
