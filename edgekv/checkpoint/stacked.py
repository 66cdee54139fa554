"""Checkpoints that hold the projections of all experts of a layer in one tensor, seen as a tensor for each.

GPT-OSS: ``experts.gate_up_proj`` (experts, inputs, 2 * outputs), gate and up by turns, ``experts.down_proj``
(experts, inputs, outputs), and a bias (experts, outputs) of each.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.checkpoint.tensor_set import TensorSet
from edgekv.checkpoint.tensors import TensorFile, TensorInfo
from edgekv.errors import CheckpointError

STACKED = re.compile(r"^(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?$")
MOST_EXPERTS = 1 << 14
PARTS = {"gate_up_proj": (("gate_proj", 0, 2), ("up_proj", 1, 2)), "down_proj": (("down_proj", 0, 1),)}
"""Of a tensor the projections in it: name, first of its outputs, and the step between them."""


class StackedTensors(TensorFile):
    """A checkpoint's tensors with those of stacked experts one by one, (outputs, inputs), under ``experts.E.``."""

    def __init__(self, tensors: TensorSet) -> None:
        self.path, self._inner = Path(tensors.files[0].path), tensors
        self.metadata = dict(tensors.files[0].metadata)
        self.nbytes, self.data_start = tensors.nbytes_total, 0
        self._places: dict[str, tuple[str, int, int, int]] = {}
        self._infos = {}
        for name in tensors.names():
            found = STACKED.match(name)
            if found is None:
                self._infos[name] = tensors.info(name)
            else:
                self._add(name, *found.groups())

    def _add(self, name: str, base: str, projection: str, bias: str | None) -> None:
        info = self._inner.info(name)
        if len(info.shape) != (2 if bias else 3) or not 1 <= info.shape[0] <= MOST_EXPERTS:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has shape {info.shape}, expected {2 if bias else 3} axes, the "
                "first of experts: download the checkpoint again"
            )
        for part, first, step in PARTS[projection]:
            shape = tuple(reversed((*info.shape[1:-1], len(range(first, info.shape[-1], step)))))
            own = TensorInfo(info.dtype, shape, info.nbytes // info.shape[0] // step)
            for e in range(info.shape[0]):
                single = f"{base}.{e}.{part}.{'bias' if bias else 'weight'}"
                self._infos[single], self._places[single] = own, (name, e, first, step)

    def array(self, name: str) -> npt.NDArray[Any]:
        self.require_type(name)
        if name not in self._places:
            return self._inner.array(name)
        stacked, expert, first, step = self._places[name]
        single: npt.NDArray[Any] = self._inner.array(stacked)[expert, ..., first::step].T
        return single

    def bytes_of(self, name: str) -> npt.NDArray[np.uint8]:
        return self._inner.bytes_of(name)

    def release(self, name: str) -> None:
        self._inner.release(self._places[name][0] if name in self._places else name)
