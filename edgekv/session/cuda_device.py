"""The device cuda: what it can run, the memory that it has, and the decoder on it."""

from __future__ import annotations

from edgekv.decoder.cuda import CudaDecoder
from edgekv.errors import CacheError, ConfigError
from edgekv.kernels.cuda import driver as cupy_driver
from edgekv.kernels.cuda.loops import CUDA_KINDS
from edgekv.kvcache import CACHES, CacheSpec
from edgekv.linear.cuda import NO_CHANGES
from edgekv.linear.cuda_ops import refuse_experts
from edgekv.linear.cuda_weights import DeviceWeights
from edgekv.linear.formats import WeightFormat
from edgekv.machine import all_cores
from edgekv.models.config import ModelConfig
from edgekv.session.device import Device
from edgekv.session.model import Model
from edgekv.types import TaskProgress


def runs(spec: CacheSpec) -> bool:
    """Whether the GPU reads all kinds of codecs that the scheme has."""
    kinds = spec.scheme.kinds(spec.knobs)
    return kinds is not None and kinds <= CUDA_KINDS


SCHEMES = tuple(name for name, scheme in CACHES.items() if runs(CacheSpec(scheme, scheme.Knobs())))
"""KV schemes that run on CUDA."""


class CudaDevice(Device):
    """The GPU that CuPy finds first (CUDA_VISIBLE_DEVICES chooses another)."""

    def available(self, spec: CacheSpec, config: ModelConfig | None = None) -> bool:
        """Whether CuPy, a GPU and the kernels of scheme and layers are there."""
        lacks_layers = config is not None and (config.experts is not None or bool(config.recurrences))
        return runs(spec) and not lacks_layers and cupy_driver.available()

    def require(self, spec: CacheSpec) -> None:
        """CacheError for a scheme without kernels, ConfigError without CuPy or a GPU."""
        if not runs(spec):
            raise CacheError(
                f"kv={spec.scheme.name!r} does not run on device='cuda'; these do: {', '.join(SCHEMES)}; or use "
                "device='cpu'",
                field="kv",
                value=spec.scheme.name,
                accepted=SCHEMES,
            )
        cupy_driver.require_cupy()

    def require_layers(self, config: ModelConfig) -> None:
        """ConfigError for a model with layers that do not attend, or with experts."""
        if config.experts:
            raise refuse_experts()
        if config.recurrences:
            raise ConfigError(
                f"device='cuda': it has no kernels for the layers of {config.model_type} that do not attend; use "
                "device='cpu'",
                field="device",
                value="cuda",
                accepted=["cpu", "numpy"],
            )

    def require_slots(self, slots: int) -> None:
        """ConfigError for more than one: a step is a recording of one conversation's."""
        if slots > 1:
            raise ConfigError(
                f"slots={slots}: device='cuda' decodes one conversation at a time; use slots=1, or device='cpu'",
                field="slots",
                value=slots,
                accepted=["1"],
            )

    def require_loras(self) -> None:
        """ConfigError: the linear layers of the GPU know none."""
        raise ConfigError(NO_CHANGES, field="loras")

    def free_bytes(self) -> int:
        """Of the GPU's memory."""
        return cupy_driver.free_bytes()

    def decoder(
        self, model: Model, form: WeightFormat, capacity: int, threads: int | None, progress: TaskProgress | None
    ) -> CudaDecoder:
        self.require_layers(model.config)
        driver = cupy_driver.CupyDriver()
        weights = DeviceWeights(model.store(form, progress), driver, progress)
        return CudaDecoder(weights, driver, capacity, all_cores(threads))
