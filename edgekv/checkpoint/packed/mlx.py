"""MLX's affine quantization, as mlx-lm writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgekv.checkpoint.packed.parts import Parts, Quantization, settings_of, width
from edgekv.checkpoint.packed.tensors import Packed, unpack
from edgekv.checkpoint.tensors import to_float32
from edgekv.errors import ConfigError
from edgekv.schema import shown
from edgekv.types import F32


class Mlx(Packed):
    """MLX's affine: (rows, columns packed), each group of columns with a scale and a bias."""

    def __init__(self, parts: Parts, module: str, settings: Quantization) -> None:
        self._bits = width(settings, "mlx", 2, 4, 8)
        self._words = parts.words(f"{module}.weight")
        rows, columns = len(self._words), self._words.shape[1] * 32 // self._bits
        self._group = settings.group_size or 64
        if self._group < 1 or columns % self._group:
            raise parts.wrong(f"{module}.weight", f"columns that {self._group} divides")
        shape = (rows, columns // self._group)
        self._ends = [parts.shaped(f"{module}.{end}", shape) for end in ("scales", "biases")]
        self.kind = f"MLX {self._bits}-bit"
        super().__init__((rows, columns), [f"{module}.{end}" for end in ("weight", "scales", "biases")])

    def values(self, lo: int, hi: int) -> F32:
        scales, biases = (to_float32(np.ascontiguousarray(end[lo:hi]))[..., None] for end in self._ends)
        numbers = unpack(self._words[lo:hi], self._bits).reshape(hi - lo, -1, self._group)
        values: F32 = (numbers * scales + biases).reshape(hi - lo, -1)
        return values


def mlx(parts: Parts, settings: Quantization, raw: Mapping[str, Any] | None = None) -> dict[str, Packed]:
    """A module may have settings of its own, under its name."""
    if settings.mode not in (None, "affine"):
        raise ConfigError(f"config.json: quantization: mode is {shown(settings.mode)}; accepted: affine")
    found: dict[str, Packed] = {}
    for module in parts.named(".scales"):
        own = (raw or {}).get(module)
        found[f"{module}.weight"] = Mlx(
            parts, module, settings_of(own, module) if isinstance(own, dict) else settings
        )
    return found
