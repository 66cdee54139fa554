"""The blocks of a model's layers on the device."""

from __future__ import annotations

from edgekv.errors import ConfigError
from edgekv.kernels.cuda.matvec import MATVEC_ROWS
from edgekv.kernels.cuda.program import Array
from edgekv.linear.blocks import LinearBlocks
from edgekv.linear.cuda_half import HalfOps
from edgekv.linear.cuda_ops import CudaOps
from edgekv.linear.cuda_weights import DeviceWeights
from edgekv.linear.low_rank import Changes

NO_CHANGES = (
    "device='cuda' applies no LoRA at run time; give `lora` without a name, which is merged into the weights, or "
    "use device='cpu'"
)


class CudaLinear(LinearBlocks):
    """The three blocks of every layer; of many rows in halves, where the device and the weights have it so."""

    def __init__(self, weights: DeviceWeights) -> None:
        self.arch, self._ops = weights.arch, CudaOps(weights)
        is_packed = any(w.bits < 32 for w in weights.linears.values())
        self.half = HalfOps(weights) if weights.driver.multiplies_halves and is_packed else None
        """The operators for many rows; None: as for few."""
        self.weights_bytes = weights.nbytes

    def with_changes(self, changes: Changes) -> LinearBlocks:
        raise ConfigError(NO_CHANGES, field="loras")

    def attention_in(self, i: int, x: Array) -> Array:
        return self.arch.attention_in(self._for(x), i, x)

    def attention_out(self, i: int, x: Array, attention: Array) -> Array:
        return self.arch.attention_out(self._for(x), i, x, attention)

    def head(self, x: Array) -> Array:
        return self.arch.head(self._for(x), x)

    def _for(self, x: Array) -> CudaOps:
        return self._ops if self.half is None or len(x) <= MATVEC_ROWS else self.half
