"""bitsandbytes' 4-bit weights: nf4 and fp4."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from edgekv.checkpoint.packed.parts import SIDE, Parts, Quantization
from edgekv.checkpoint.packed.tensors import Packed
from edgekv.checkpoint.tensors import to_float32
from edgekv.errors import ConfigError
from edgekv.types import F32


class QuantState(Struct):
    """bitsandbytes' own, JSON in a tensor."""

    quant_type: str
    blocksize: Annotated[int, Meta(ge=1, le=1 << 16)]
    shape: Annotated[list[SIDE], Meta(min_length=2, max_length=2)]
    nested_blocksize: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    nested_offset: float = 0.0


class NormalFloat(Packed):
    """Numbers of a table of 16 times the largest of a block, which may be packed too."""

    def __init__(self, parts: Parts, module: str, ending: str) -> None:
        weight, tensors = f"{module}.weight", parts.tensors
        state = self._state(parts, f"{weight}{ending}")
        rows, columns = state.shape
        self._codes = tensors.array(weight).reshape(-1)
        self._table = to_float32(parts.shaped(f"{weight}.quant_map", (16,)))
        n_blocks = -(-rows * columns // state.blocksize)
        largest = parts.shaped(f"{weight}.absmax", (n_blocks,))
        names = [weight, *parts.beside(weight, ending, ".quant_map", ".absmax")]
        if self._codes.size != -(-rows * columns // 2) or self._codes.dtype != np.uint8:
            raise parts.wrong(weight, f"{rows} x {columns} numbers in 4 bits")
        if state.nested_blocksize is not None:
            n = -(-n_blocks // state.nested_blocksize)
            steps = to_float32(parts.shaped(f"{weight}.nested_absmax", (n,)))
            table = to_float32(parts.shaped(f"{weight}.nested_quant_map", (256,)))
            if largest.dtype != np.uint8:
                raise parts.wrong(f"{weight}.absmax", "bytes")
            each = steps[np.arange(n_blocks) // state.nested_blocksize]
            largest = table[largest] * each + np.float32(state.nested_offset)
            names += [f"{weight}.nested_absmax", f"{weight}.nested_quant_map"]
        self._largest, self._size = to_float32(largest), state.blocksize
        self.kind = f"bitsandbytes {state.quant_type}"
        super().__init__((rows, columns), names)

    @staticmethod
    def _state(parts: Parts, name: str) -> QuantState:
        try:
            return msgspec.json.decode(parts.tensors.bytes_of(name).tobytes(), type=QuantState)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise parts.wrong(name, "bitsandbytes' quant_state") from None

    def values(self, lo: int, hi: int) -> F32:
        first, stop = lo * self.shape[1], hi * self.shape[1]
        pairs = self._codes[first // 2 : -(-stop // 2)]
        codes = np.stack([pairs >> 4, pairs & 15], axis=1).reshape(-1)  # the high half first
        numbers = self._table[codes[first % 2 : first % 2 + stop - first]]
        values: F32 = numbers * self._largest[np.arange(first, stop) // self._size]
        return values.reshape(hi - lo, -1)


def bitsandbytes(parts: Parts, settings: Quantization) -> dict[str, Packed]:
    """4-bit weights; what is in 8 bits has outliers apart, and is refused."""
    if any(name.endswith(".SCB") for name in parts.tensors.names()):
        raise ConfigError(
            "config.json: quantization_config: bitsandbytes in 8 bits is not supported; accepted: 4 bits"
        )
    found: dict[str, Packed] = {}
    for kind in ("nf4", "fp4"):
        ending = f".quant_state.bitsandbytes__{kind}"
        found |= {f"{m}.weight": NormalFloat(parts, m, ending) for m in parts.named(f".weight{ending}")}
    return found
