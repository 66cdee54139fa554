"""What a device is: a place to compute, which has memory and opens a decoder."""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager, nullcontext

from edgekv.decoder.decoder import Decoder
from edgekv.kvcache import CacheSpec
from edgekv.linear.formats import WeightFormat
from edgekv.machine import available_memory_bytes
from edgekv.models.config import ModelConfig
from edgekv.session.model import Model
from edgekv.types import TaskProgress


class Device(abc.ABC):
    """A place to compute."""

    def available(self, spec: CacheSpec, config: ModelConfig | None = None) -> bool:
        """Whether this machine has it, and it has the scheme and the model's layers; None: of any model."""
        return True

    def require(self, spec: CacheSpec) -> None:
        """An EdgeKVError says what is missing for the scheme."""
        return

    def require_layers(self, config: ModelConfig) -> None:
        """An EdgeKVError where a model has layers that it has no kernels for."""
        return

    def preparing(self, spec: CacheSpec) -> AbstractContextManager[None]:
        """Within the block, in which a model is read, works on what the scheme will need."""
        return nullcontext()

    def require_slots(self, slots: int) -> None:
        """An EdgeKVError where so many conversations can't decode together."""
        return

    def require_loras(self) -> None:
        """An EdgeKVError where a LoRA can't be applied beside the weights."""
        return

    def free_bytes(self) -> int:
        """Memory for weights and caches."""
        return available_memory_bytes()

    @abc.abstractmethod
    def decoder(
        self, model: Model, form: WeightFormat, capacity: int, threads: int | None, progress: TaskProgress | None
    ) -> Decoder:
        """Loads the weights in this format.

        threads: cores to use; None: all, but for weight products as many as are fastest.
        """
