"""Weights of a shape without a checkpoint: random codes, for timing alone."""

from __future__ import annotations

import hashlib
import json
import pathlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.models import architecture
from edgekv.types import F32, TaskProgress
from edgekv.weights.checkpoint_weights import CheckpointWeights, Codes
from edgekv.weights.formats import WeightFormat, store_specs
from edgekv.weights.store import WeightStore, build, default_folder, is_store

STD = 0.02  # of the weights, as models are initialised: activations stay in range


class RandomWeights(CheckpointWeights):
    """What `build` asks of a checkpoint, drawn instead of read: seeded by the config, nothing is quantized."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.arch = architecture(config)
        self._linears = self.arch.linears()
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]
        self._rng = np.random.default_rng(int(digest, 16))
        self.source: Any = SimpleNamespace(identity=f"random-{digest}", tokenizer_folder=None, config=config)

    @property
    def table_dtypes(self) -> dict[str, str]:
        return dict.fromkeys(self.arch.tables(), "F16")

    @property
    def nbytes(self) -> int:
        """0: there is no checkpoint."""
        return 0

    @property
    def own_format(self) -> None:
        return None

    def requantized(self, form: WeightFormat) -> tuple[str, ...]:
        return ()

    def exact_codes(self, name: str, form: WeightFormat) -> tuple[Codes, F32]:
        """Draw codes (rows, blocks, bytes) and scales (rows, blocks)."""
        specs = store_specs(self.arch, form, self.table_dtypes)
        codes = self._rng.integers(0, 256, specs[f"{name}.codes"][1], np.uint8)
        largest_code = 2 ** (form.bits - 1)
        uniform = STD * np.sqrt(3) / largest_code  # the step that gives uniform codes this deviation
        return codes, np.full(specs[f"{name}.scales"][1], uniform, np.float32)

    def matrix(self, name: str) -> F32:
        linear = self._linears[name]
        return self._normal(linear.rows, linear.columns)

    def bias(self, name: str) -> F32 | None:
        """(rows,) zeros; None: the linear has none."""
        return np.zeros(self._linears[name].rows, np.float32) if self._linears[name].biases else None

    def release(self, name: str) -> None:
        return

    def vector(self, name: str) -> F32:
        """(size,) ones."""
        return np.ones(self.arch.vectors()[name][1], np.float32)

    def array(self, name: str) -> F32:
        """Normal numbers."""
        return self._normal(*self.arch.arrays()[name][1])

    def table(self, name: str) -> npt.NDArray[np.generic]:
        return self._normal(*self.arch.tables()[name][1]).astype(np.float16)

    def _normal(self, *shape: int) -> F32:
        drawn: F32 = self._rng.standard_normal(shape, np.float32)
        drawn *= np.float32(STD)
        return drawn


def random_folder(config: dict[str, Any], form: WeightFormat) -> pathlib.Path:
    """Where the shape's store is, or would be."""
    return default_folder(RandomWeights(config).source.identity, form)


def random_store(config: dict[str, Any], form: WeightFormat, progress: TaskProgress | None = None) -> WeightStore:
    """The shape's store in the cache folder, made at the first call."""
    weights, folder = RandomWeights(config), random_folder(config, form)
    if not is_store(folder):
        build(weights, form, folder, progress)
    return WeightStore(folder)
