"""A device for `edgekv.kernels.cuda` on the CPU: kernels compiled by g++, arrays as CuPy's."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import operator
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from edgekv.kernels.cuda.driver import N_INPUTS, CaptureError, Launch, Program, by_value

SHIM = pathlib.Path(__file__).with_name("shim.h")
KERNEL = re.compile(r'extern "C" __global__ void\s*(?:__launch_bounds__\([^)]*\))?\s*(\w+)\(([^)]*)\)')
OPTIONAL = re.compile(r"#ifdef (KEYS|VALUES|WIDTH)\n.*?\n#endif", re.DOTALL)
FLAGS = (
    "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-fPIC", "-fno-gnu-unique", "-U_FORTIFY_SOURCE",
    "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error",
)  # fmt: skip


class HostArray(np.lib.mixins.NDArrayOperatorsMixin):
    """A NumPy array that, like CuPy's, refuses to become one by itself and takes no NumPy arrays as operands."""

    __array_priority__ = 100
    is_recording = False  # then nothing is written

    def __init__(self, host: np.ndarray) -> None:
        self.host = host

    T = property(lambda self: HostArray(self.host.T))

    def __len__(self) -> int:
        return len(self.host)

    def __getitem__(self, key: Any) -> HostArray:
        return HostArray(np.asarray(self.host[_keys(key)]))

    def __setitem__(self, key: Any, value: Any) -> None:
        if not HostArray.is_recording:
            self.host[_keys(key)] = _unwrap(value)

    def __int__(self) -> int:
        return int(self.host)

    def __float__(self) -> float:
        return float(self.host)

    def __bool__(self) -> bool:
        return bool(self.host)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", None)
        if out is not None and HostArray.is_recording:
            return out[0]
        if out is not None:
            kwargs["out"] = tuple(_unwrap(x) for x in out)
        return _wrap(getattr(ufunc, method)(*map(_unwrap, inputs), **kwargs))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.asarray:  # only ever with like=: the argument is the host's
            return HostArray(np.array(*args, **kwargs))
        return _wrap(function(*_unwrap(args), **_unwrap(kwargs)))

    def get(self) -> np.ndarray:
        return self.host.copy()

    @property
    def data(self) -> Any:
        """Where a kernel finds it, as CuPy's."""
        assert self.host.flags.c_contiguous or self.strides[-1] == self.itemsize, "kernels take rows"
        return SimpleNamespace(ptr=self.host.ctypes.data)


def _method(name: str) -> Any:
    def method(self: HostArray, *args: Any, **kwargs: Any) -> Any:
        return _wrap(getattr(self.host, name)(*_unwrap(args), **_unwrap(kwargs)))

    return method


ATTRIBUTES = "shape dtype ndim size nbytes strides itemsize flags"
METHODS = "reshape view astype copy transpose fill sum max min mean ravel argmax cumsum any all repeat"
for _name in ATTRIBUTES.split():
    setattr(HostArray, _name, property(operator.attrgetter(f"host.{_name}")))
for _name in METHODS.split():
    setattr(HostArray, _name, _method(_name))


def _unwrap(x: Any) -> Any:
    if isinstance(x, HostArray):
        return x.host
    if isinstance(x, np.ndarray) and x.ndim:
        raise TypeError(f"Unsupported type {type(x)}: a NumPy array among the device's")
    if isinstance(x, (tuple, list)):
        return type(x)(map(_unwrap, x))
    return {k: _unwrap(v) for k, v in x.items()} if isinstance(x, dict) else x


def _keys(key: Any) -> Any:
    """Returns the indices for NumPy; they may be NumPy arrays, as with CuPy."""
    parts = key if isinstance(key, tuple) else (key,)
    unwrapped = tuple(x.host if isinstance(x, HostArray) else x for x in parts)
    return unwrapped if isinstance(key, tuple) else unwrapped[0]


def _wrap(x: Any) -> Any:
    if isinstance(x, (np.ndarray, np.generic)):
        return HostArray(np.asarray(x))
    return type(x)(map(_wrap, x)) if isinstance(x, (tuple, list)) else x


class OutOfMemoryError(MemoryError):
    """An error that is named and worded as CuPy's."""


class HostDriver:
    """A CPU in place of `edgekv.kernels.cuda.driver.Driver`.

    In every other launch the threads take turns from the last on.
    """

    multiprocessors, memory_bytes = 2, 1 << 20
    has_half_gemm = has_half_mma = has_integer_mma = True
    free = 1 << 40  # bytes that an allocation may have

    def __init__(self) -> None:
        self.backwards = False
        self.inputs = self.zeros((N_INPUTS,), np.int32)
        self.position_delta, self.ids, self.zero = self.inputs[:1], self.inputs[-2:-1], self.inputs[-1:]
        self.stream, self.pinned_inputs = mock.Mock(), lambda: (np.zeros(N_INPUTS, np.int32), mock.Mock())

    def empty(self, shape: tuple[int, ...], dtype: Any) -> HostArray:
        """Returns a poisoned array: every byte is 0xff, NaN in floats."""
        x = np.empty(self._allowed(shape, dtype), dtype)
        x.reshape(-1).view(np.uint8).fill(0xFF)
        return HostArray(x)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> HostArray:
        return HostArray(np.zeros(self._allowed(shape, dtype), dtype))

    def _allowed(self, shape: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if n_bytes > self.free:
            raise OutOfMemoryError(f"Out of memory allocating {n_bytes:,} bytes (allocated so far: 0 bytes).")
        return shape

    def upload(self, host: np.ndarray) -> HostArray:
        if HostArray.is_recording:
            raise CaptureError("it uploads an array")
        return HostArray(np.array(host, order="C"))

    def half_gemm(self, x: HostArray, w: HostArray, y: HostArray, adds: bool) -> None:
        assert x.flags.c_contiguous
        assert w.flags.c_contiguous
        assert (x.dtype, w.dtype, y.dtype) == (np.float16, np.float16, np.float32)
        product = x.host.astype(np.float32) @ w.host.astype(np.float32).T
        y.host[...] = y.host + product if adds else product

    def free_bytes(self) -> int:
        return self.free

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Runs the work once without its launches, and returns it to be run again, as nothing is captured here."""
        HostArray.is_recording = True
        try:
            work()
        except (RuntimeError, MemoryError) as error:
            raise CaptureError(str(error)) from error
        finally:
            HostArray.is_recording = False
        return work

    def launch(self, launch: Launch, *arguments: Any) -> None:
        program, kernel, grid, threads, *_ = launch
        if HostArray.is_recording:
            return
        assert all(n > 0 for n in grid)
        assert threads > 0
        self.backwards = not self.backwards
        values = [by_value(x, program) for x in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(x.ctypes.data for x in values))
        x, y, z = (*grid, 1, 1)[:3]
        library, counts = _build(program)
        assert len(values) == counts[kernel], kernel
        getattr(library, f"run_{kernel}")(x, y, z, threads, self.backwards, pointers)


@functools.cache
def _build(program: Program) -> tuple[ctypes.CDLL, dict[str, int]]:
    """Compiles the program with a function per kernel that runs it here; returns their argument counts too."""
    source, counts = program.source(("common",)), {}
    given = dict(program.macros)
    compiled = OPTIONAL.sub(lambda part: part[0] if part[1] in given else "", source)
    for name, parameters in KERNEL.findall(compiled):
        types = [re.sub(r"\w+$", "", p).strip() for p in parameters.split(",")]
        counts[name] = len(types)
        call = ", ".join(f"*({kind}*)a[{i}]" for i, kind in enumerate(types))
        source += (
            f'\nextern "C" void run_{name}(int x, int y, int z, int block, bool backwards, void** a)\n'
            f"{{\n    dim3 grid{{(unsigned)x, (unsigned)y, (unsigned)z}};\n"
            f"    fibers::run(grid, block, backwards, [&] {{ {name}({call}); }});\n}}\n"
        )
    defines = [f"-D{name}={value}" for name, value in program.macros]
    header = _shim()
    library = header.with_name(_digest(source, *defines) + ".so")
    if not library.exists():
        command = ["g++", *FLAGS, "-shared", "-Wl,-Bsymbolic", *defines, "-include", str(header), "-x", "c++", "-"]
        _compile(command, library, source, str(program))
    return ctypes.CDLL(str(library)), counts


@functools.cache
def _shim() -> pathlib.Path:
    """Precompiles the shim, which is most of what there is to compile, in a folder of its own."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++, to run the CUDA kernels on the CPU")
    folder = pathlib.Path(tempfile.gettempdir()) / f"edgekv-cuda-{os.getuid()}-{_digest(SHIM.read_text(), *FLAGS)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    header = folder / SHIM.name
    if not (folder / "shim.h.gch").exists():
        shutil.copyfile(SHIM, header)
        _compile(["g++", *FLAGS, "-x", "c++-header", str(header)], folder / "shim.h.gch", "", SHIM.name)
    return header


def _compile(command: list[str], target: pathlib.Path, source: str, what: str) -> None:
    partial = target.with_suffix(f".{os.getpid()}")
    done = subprocess.run([*command, "-o", partial], input=source, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{what}: {done.stderr[:4000]}"
    partial.replace(target)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
