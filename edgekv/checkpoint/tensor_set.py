"""The tensors of one checkpoint, whatever files they are in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.checkpoint.tensors import TensorFile, TensorInfo, missing_tensor
from edgekv.errors import CheckpointError


class TensorSet:
    """The tensors of one checkpoint, from one file or from several shards, as one mapping.

    Raises CheckpointError when two files hold a tensor of the same name.
    """

    def __init__(self, files: Iterable[TensorFile]) -> None:
        self.files: Sequence[TensorFile] = tuple(files)
        self._homes: dict[str, TensorFile] = {}
        for file in self.files:
            for name in file.names():
                if name in self._homes:
                    raise CheckpointError(
                        f"{file.path}: tensor {name!r} is in {self._homes[name].path.name} too; "
                        "download the checkpoint again"
                    )
                self._homes[name] = file

    def __contains__(self, name: object) -> bool:
        return name in self._homes

    @property
    def nbytes_total(self) -> int:
        """Bytes of all the tensors' data."""
        return sum(file.nbytes - file.data_start for file in self.files)

    def names(self) -> list[str]:
        """The names of all tensors, file by file, in the order of their data."""
        return list(self._homes)

    def info(self, name: str) -> TensorInfo:
        """As TensorFile.info."""
        return self._home(name).info(name)

    def array(self, name: str) -> npt.NDArray[Any]:
        """As TensorFile.array."""
        return self._home(name).array(name)

    def outputs(self, name: str, lo: int, hi: int, transposed: bool) -> npt.NDArray[Any]:
        """As TensorFile.outputs."""
        return self._home(name).outputs(name, lo, hi, transposed)

    def quantized(self, name: str) -> str | None:
        """As TensorFile.quantized."""
        return self._home(name).quantized(name)

    def forms(self, name: str) -> tuple[str | None, str]:
        """As TensorFile.forms."""
        return self._home(name).forms(name)

    def bytes_of(self, name: str) -> npt.NDArray[np.uint8]:
        """As TensorFile.bytes_of."""
        return self._home(name).bytes_of(name)

    def blocks(self, name: str, lo: int, hi: int) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
        """As TensorFile.blocks."""
        return self._home(name).blocks(name, lo, hi)

    def zero_points(self, name: str, lo: int, hi: int) -> npt.NDArray[np.int8] | None:
        """As TensorFile.zero_points."""
        return self._home(name).zero_points(name, lo, hi)

    def offsets(self, name: str, lo: int, hi: int) -> npt.NDArray[np.float32] | None:
        """As TensorFile.offsets."""
        return self._home(name).offsets(name, lo, hi)

    def replaced(self, file: TensorFile, names: Iterable[str]) -> TensorSet:
        """The same checkpoint with these of its tensors taken from another file."""
        changed = TensorSet(self.files)
        changed._homes = {**self._homes, **dict.fromkeys(names, file)}
        return changed

    def release(self, name: str) -> None:
        """As TensorFile.release."""
        self._home(name).release(name)

    def require(self, name: str, shape: Sequence[int]) -> npt.NDArray[Any]:
        """The view of a tensor that must have this shape.

        Raises CheckpointError as `require_shape`, and for a type that can't be read.
        """
        self.require_shape(name, shape)
        return self.array(name)

    def require_shape(self, name: str, shape: Sequence[int]) -> None:
        """CheckpointError naming the tensor when it is absent (with the closest names there are) or when its shape
        is another one (with both), or its type none that can be read.
        """
        found = self.info(name).shape
        if found != tuple(shape):
            raise CheckpointError(
                f"{self._home(name).path}: tensor {name!r} has shape {found}, but its config asks for "
                f"{tuple(shape)}; give the config.json that belongs to these weights"
            )
        self._home(name).require_type(name)

    def _home(self, name: str) -> TensorFile:
        if name not in self._homes:
            where = self.files[0].path if len(self.files) == 1 else f"{len(self.files)} shards"
            raise missing_tensor(name, self._homes, where)
        return self._homes[name]
