"""CUDA C++ files joined into programs, compiled when they are first launched."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

Array = Any  # of the device: a cupy.ndarray, or a test's own
Macros = tuple[tuple[str, int | str], ...]

FOLDER = pathlib.Path(__file__).parent
OPTIONS = ("-std=c++14",)


@dataclasses.dataclass(frozen=True)
class Program:
    """``files`` of this folder (``papers/huffman``: papers/huffman.cu) behind the common ones, with ``macros``.

    exact: products and sums are rounded one by one, as NumPy rounds them; for encoders, equal to the bit.
    """

    files: tuple[str, ...]
    macros: Macros = ()
    exact: bool = False

    def source(self, basics: tuple[str, ...] = ("common", "ptx")) -> str:
        """The text, in which compiler messages still name the files."""
        return "".join(f'#line 1 "{name}.cu"\n{_text(name)}' for name in (*basics, *self.files))

    def options(self) -> tuple[str, ...]:
        """Of the compiler, macros among them."""
        defines = tuple(f"-D{name}={value}" for name, value in self.macros)
        return (*OPTIONS, f"--fmad={'false' if self.exact else 'true'}", *defines)


@functools.cache
def _text(name: str) -> str:
    return (FOLDER / f"{name}.cu").read_text()


class Launch(NamedTuple):
    """A kernel of a program, run by ``grid`` blocks of ``block`` threads.

    early: it may begin before the launches before it have ended, and waits for them by itself (`wait_for_inputs`).
    """

    program: Program
    kernel: str
    grid: tuple[int, ...]
    block: int
    early: bool = False


class CannotRecord(Exception):
    """The step does something that can't be recorded: it is taken plainly."""


class Driver(Protocol):
    """What the kernels need of a device."""

    multiprocessors: int
    memory_bytes: int
    """Of the device, in use or not."""
    multiplies_halves: bool
    """Whether products of halves are faster than those of float32: on tensor cores, from sm_70 on."""
    has_matrix_tiles: bool
    """Whether prompt_attention.cu compiles: from sm_75 on."""
    has_whole_tiles: bool
    """Whether tiled_linear.cu and tiled_planes.cu compile: from sm_80 on."""
    moves: Array
    """int32: how far the counters of a replayed step have moved since it was recorded, else 0."""
    shift: Array
    """Of these the first, by which positions move."""
    still: Array
    """Of these the last, which stays 0."""

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array of the device, contents undefined."""

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array of the device, filled with zeros."""

    def upload(self, host: npt.NDArray[Any]) -> Array:
        """A copy of a host's array on the device. Raises CannotRecord while a step is recorded."""

    def free_bytes(self) -> int:
        """Bytes of the device that are not in use."""

    def launch(self, launch: Launch, *arguments: Array | int | float) -> None:
        """Runs a kernel; ints arrive as int, floats as float, arrays as pointers."""

    def multiply_halves(self, x: Array, w: Array, y: Array, adds: bool) -> None:
        """y (n, rows) float32 = x (n, k) float16 times w (rows, k) float16, or y + that; sums in float32.

        x and w are contiguous; y has contiguous rows, maybe part of longer ones.
        """

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """A function that repeats what ``step`` launches, without Python. Raises CannotRecord."""
