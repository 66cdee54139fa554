"""Weights of a shape without a checkpoint, for timing alone."""

from __future__ import annotations

import hashlib
import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from edgekv.checkpoint.checkpoint import Checkpoint
from edgekv.checkpoint.tensors import DTYPES, Shape, Tensor, Tensors
from edgekv.models import architecture
from edgekv.models.architecture import WeightPart
from edgekv.types import F32, Array, TaskProgress
from edgekv.weights.checkpoint_weights import CheckpointWeights, CodedRows
from edgekv.weights.formats import ModelFormat, WeightFormat
from edgekv.weights.store import WeightStore, open_or_build

STD = 0.02  # of the weights, as models are initialised: activations stay in range


class RandomTensor(Tensor):
    """A float16 tensor in no file, whose values are drawn when they are read."""

    def __init__(self, path: pathlib.Path, name: str, shape: Shape, rng: np.random.Generator) -> None:
        super().__init__(path, name, "F16", shape, 2 * math.prod(shape))
        self._rng = rng

    def read(self) -> Array:
        drawn: F32 = self._rng.standard_normal(self.shape, np.float32)
        drawn *= np.float32(STD)
        return drawn.astype(np.float16)

    def release(self) -> None:
        return


class RandomWeights(CheckpointWeights):
    """A checkpoint of random tensors, with a seed from the config; codes are drawn, not quantized."""

    def __init__(self, config: dict[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]
        self._rng = np.random.default_rng(int(digest, 16))
        arch, name = architecture(config), f"random-{digest}"
        path = pathlib.Path(name)
        drawn = {key: RandomTensor(path, key, shape, self._rng) for key, shape in arch.tensors().items()}
        super().__init__(Checkpoint(path, None, Tensors(drawn, ()), config, None, None, lambda _: name), arch)

    def codes_in(self, form: WeightFormat, parts: Sequence[WeightPart]) -> Iterator[CodedRows]:
        """Draws codes."""
        specs = form.arrays(sum(part.rows for part in parts), parts[0].columns)
        (_, codes_shape), (dtype, scales_shape) = specs["codes"], specs["scales"]
        scale = STD / np.std(form.levels())  # gives uniform codes this deviation
        yield self._rng.integers(0, 256, codes_shape, np.uint8), np.full(scales_shape, scale, DTYPES[dtype]), None

    def vector(self, name: str) -> F32:
        """Returns ones (size,)."""
        return np.ones(self.arch.vectors()[name][1], np.float32)


def random_store(config: dict[str, Any], form: ModelFormat, progress: TaskProgress | None = None) -> WeightStore:
    """Opens a shape's store in the cache folder, made at the first call."""
    return open_or_build(RandomWeights(config), form, progress)
