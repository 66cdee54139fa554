"""Launches that begin before the one before them has ended: a call of the CUDA driver that CuPy lacks."""

from __future__ import annotations

import ctypes
from typing import Any

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
OVERLAPS = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")),
        *(("shared", ctypes.c_uint), ("stream", ctypes.c_void_p)),
        *(("attributes", ctypes.POINTER(_Attribute)), ("n_attributes", ctypes.c_uint)),
    )


class EarlyLauncher:
    """cuLaunchKernelEx of the driver's library. Raises OSError or AttributeError where it is not there."""

    def __init__(self) -> None:
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx

    def __call__(
        self, function: int, grid: tuple[int, ...], block: int, stream: int, arguments: list[Any]
    ) -> None:
        """Runs a kernel by its handle; arguments are values of ctypes. Raises RuntimeError."""
        attribute = _Attribute(OVERLAPS, 0, 1)
        x, y, z = (*grid, 1, 1)[:3]
        config = _Config(x, y, z, block, 1, 1, 0, stream, ctypes.pointer(attribute), 1)
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
        status = self._launch(ctypes.byref(config), ctypes.c_void_p(function), pointers, None)
        if status:
            name = "CUDA_ERROR_OUT_OF_MEMORY" if status == OUT_OF_MEMORY else f"CUDA driver error {status}"
            raise RuntimeError(f"cuLaunchKernelEx: {name}")
