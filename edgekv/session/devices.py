"""The devices by name: one entry each; --device reads DEVICES."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from edgekv import kernels
from edgekv.decoder.ahead import compiled_ahead
from edgekv.decoder.cpu import CpuDecoder
from edgekv.decoder.decoder import Decoder
from edgekv.errors import ConfigError, unknown
from edgekv.kernels import Kernels
from edgekv.kvcache import CacheSpec
from edgekv.linear.blocks import LinearBlocks
from edgekv.linear.cpu import cpu_linear
from edgekv.linear.formats import WeightFormat
from edgekv.linear.reference import NumpyLinear
from edgekv.linear.threads import product_threads
from edgekv.linear.weights import Weights
from edgekv.machine import all_cores
from edgekv.models.config import ModelConfig
from edgekv.session.device import Device
from edgekv.session.model import Model
from edgekv.types import TaskProgress

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class HostDevice(Device):
    """This machine's cores: the linear layers' backend, and the attention kernels."""

    open_linear: Callable[[Model, WeightFormat, int | None, TaskProgress | None], tuple[Weights, LinearBlocks]]
    open_kernels: Callable[[int], Kernels]
    ahead: Callable[[CacheSpec], AbstractContextManager[None]] = lambda spec: nullcontext()

    def preparing(self, spec: CacheSpec) -> AbstractContextManager[None]:
        return self.ahead(spec)

    def decoder(
        self, model: Model, form: WeightFormat, capacity: int, threads: int | None, progress: TaskProgress | None
    ) -> Decoder:
        kernels = self.open_kernels(all_cores(threads))
        weights, linear = self.open_linear(model, form, threads, progress)
        return CpuDecoder(weights, linear, kernels, capacity, all_cores(threads))


def _cores(
    model: Model, form: WeightFormat, threads: int | None, progress: TaskProgress | None
) -> tuple[Weights, LinearBlocks]:
    store = model.store(form, progress)
    return store, cpu_linear(store.form)(store, product_threads(store, threads))


def _numpy(
    model: Model, form: WeightFormat, threads: int | None, progress: TaskProgress | None
) -> tuple[Weights, LinearBlocks]:
    weights = model.weights if form.bits == 32 else model.store(form, progress)
    return weights, NumpyLinear(weights)


def _cuda() -> Device:
    from edgekv.session.cuda_device import CudaDevice

    return CudaDevice()


DEVICES: dict[str, Callable[[], Device]] = {
    "cpu": lambda: HostDevice(_cores, kernels.numba_kernels, compiled_ahead),  # Numba; onnxruntime for float32
    "numpy": lambda: HostDevice(_numpy, kernels.numpy_kernels),  # the reference: slow, exact
    "cuda": _cuda,  # CuPy
}


def find_device(name: str) -> Device:
    """The device of that name. Raises ConfigError (field device)."""
    if name not in DEVICES:
        raise unknown(ConfigError, "device", name, (AUTO, *DEVICES))
    return DEVICES[name]()


def resolve_device(name: str, spec: CacheSpec, config: ModelConfig | None = None) -> str:
    """What ``auto`` means here for this scheme and model: cuda where it can be had; other names stay."""
    if name != AUTO:
        return name
    if "cupy" not in sys.modules and importlib.util.find_spec("cupy") is None:
        return "cpu"  # without a look at all that a GPU would need
    return "cuda" if find_device("cuda").available(spec, config) else "cpu"
