"""The device behind CuPy: programs of .cu files, compiled by NVRTC at their first launch and cached by CuPy."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from edgekv.errors import ConfigError
from edgekv.files import atomic_write, cache_root

Array = Any  # of the device: a cupy.ndarray, or a test's own
Macros = tuple[tuple[str, int | str], ...]

FOLDER = pathlib.Path(__file__).parent
N_MOVES = 16  # numbers on the device: that of positions first, one that stays 0 last
# Of cuBLAS.
AS_IT_IS, TRANSPOSED, SINGLE, HALF, SINGLE_SUMS, TENSOR_CORES = 0, 1, 0, 2, 68, 99
ONE, ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)
OUT_OF_MEMORY = ("cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED")
INSTALL = "pip install 'edgekv[cuda12]' (or [cuda13]: the version that nvidia-smi shows, or lower)"


@dataclasses.dataclass(frozen=True)
class Program:
    """``files`` behind common.cu and ptx.cu, with ``macros``: names in this folder, or paths; all without ``.cu``.

    exact: products and sums are rounded one by one, as NumPy rounds them; for encoders, equal to the bit.
    """

    files: tuple[str | pathlib.Path, ...]
    macros: Macros = ()
    exact: bool = False

    def source(self, basics: tuple[str, ...] = ("common", "ptx")) -> str:
        """The text, in which compiler messages still name the files."""
        return "".join(_text(name) for name in (*basics, *self.files))

    def options(self) -> tuple[str, ...]:
        """Of the compiler, macros among them."""
        defines = (f"-D{name}={value}" for name, value in self.macros)
        return "-std=c++14", f"--fmad={'false' if self.exact else 'true'}", *defines


@functools.cache
def _text(name: str | pathlib.Path) -> str:
    path = FOLDER / f"{name}.cu"
    return f'#line 1 "{path.name}"\n{path.read_text()}'


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
    """Whether tiled_linear.cu and tiled.cu compile: from sm_80 on."""
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


class CupyDriver:
    """Works on the current device, in any thread, on the default stream; only `record` uses another one.

    So drivers beside each other, and threads, see each other's work in order, and a recording sees its own alone.
    """

    def __init__(self) -> None:
        self.cupy: Any = require_cupy()
        runtime = self.cupy.cuda.runtime
        properties = runtime.getDeviceProperties(runtime.getDevice())
        self.multiprocessors = int(properties["multiProcessorCount"])
        self.memory_bytes = int(properties["totalGlobalMem"])
        generation = int(properties["major"]), int(properties["minor"])
        self.multiplies_halves, self.has_matrix_tiles = generation >= (7, 0), generation >= (7, 5)
        self.has_whole_tiles = generation >= (8, 0)
        self._launch_early = _early_launcher() if generation >= (9, 0) else None
        self._cuda = int(runtime.runtimeGetVersion())
        self.stream, self._recorder = self.cupy.cuda.Stream.null, self.cupy.cuda.Stream(non_blocking=True)
        self._is_recording = False
        self.moves = self.zeros((N_MOVES,), np.int32)
        self.shift, self.still = self.moves[:1], self.moves[-1:]
        self._modules: dict[Program, Any] = {}
        self._kernels: dict[tuple[Program, str], Any] = {}

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array of the device, contents undefined."""
        return self.cupy.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array of the device, filled with zeros."""
        return self.cupy.zeros(shape, dtype)

    def upload(self, host: npt.NDArray[Any]) -> Array:
        """A copy of a host's array on the device. Raises CannotRecord while a step is recorded."""
        if self._is_recording:
            raise CannotRecord("it uploads an array: taken without a recording, the step leaves it on the device")
        return self.cupy.asarray(host)

    def free_bytes(self) -> int:
        """What the device has free, and what CuPy holds unused."""
        unused = self.cupy.get_default_memory_pool().free_bytes()
        return int(self.cupy.cuda.runtime.memGetInfo()[0]) + int(unused)

    def launch(self, launch: Launch, *arguments: Array | int | float) -> None:
        program, kernel, grid, block, early = launch
        try:
            function = self._kernels.get((program, kernel))
            if function is None:
                function = self._kernels[program, kernel] = self._compile(program, kernel)
            if early and self._launch_early is not None:
                values = [_ctypes_argument(x) for x in arguments]
                self._launch_early(function.kernel.ptr, grid, block, self._current.ptr, values)
            else:
                function(grid, (block,), tuple(map(_argument, arguments)))
        except RuntimeError as error:
            _raise_memory_error(error, f"for {kernel}")
            raise

    @property
    def _current(self) -> Any:
        return self._recorder if self._is_recording else self.stream

    def _compile(self, program: Program, kernel: str) -> Any:
        try:
            if program not in self._modules:
                self._modules[program] = self.cupy.RawModule(code=program.source(), options=program.options())
            return self._modules[program].get_function(kernel)
        except self.cupy.cuda.compiler.CompileException as error:
            log = cache_root() / "cuda-compile.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(log, f"{program}\n{error}\n".encode())
            raise ConfigError(
                f"device='cuda': {'+'.join(map(str, program.files))}.cu does not compile for this GPU; the "
                f"compiler's log is in {log}; use device='cpu'"
            ) from None

    def multiply_halves(self, x: Array, w: Array, y: Array, adds: bool) -> None:
        from cupy_backends.cuda.libs import cublas

        (n, k), rows, stride = x.shape, len(w), y.strides[0] // y.itemsize
        one, onto = ONE.ctypes.data, (ONE if adds else ZERO).ctypes.data
        sums = SINGLE_SUMS if self._cuda >= 11000 else SINGLE
        factors = w.data.ptr, HALF, k, x.data.ptr, HALF, k
        try:
            handle = self.cupy.cuda.device.get_cublas_handle()
            cublas.gemmEx(  # by columns: y.T = w x.T
                *(handle, TRANSPOSED, AS_IT_IS, rows, n, k, one, *factors),
                *(onto, y.data.ptr, SINGLE, stride, sums, TENSOR_CORES),
            )
        except RuntimeError as error:
            _raise_memory_error(error, "for a product of cuBLAS")
            raise

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """A function that does on the device again what ``step`` would do now; ``step`` itself does nothing there.

        Memory comes from a pool of its own, so that what the recording writes to is nobody else's. Raises
        CannotRecord where CuPy, or a library that it calls, does not support that, or has no memory for it: the
        device is then as it was before, and the step can be taken plainly.
        """
        pool = self.cupy.cuda.MemoryPool()
        try:
            with self.cupy.cuda.using_allocator(pool.malloc), self._recorder:
                self._recorder.begin_capture()
                self._is_recording = True
                try:
                    step()
                finally:
                    self._is_recording = False
                    graph = self._recorder.end_capture()
        except (RuntimeError, MemoryError) as error:  # CuPy's and CUDA's own errors are RuntimeErrors
            raise CannotRecord(str(error)) from error

        def replay(held: Any = pool) -> None:
            graph.launch(self.stream)

        return replay


def _raise_memory_error(error: RuntimeError, what: str) -> None:
    """MemoryError, as CuPy's own allocations raise, where the driver or cuBLAS found too little memory."""
    if any(name in str(error) for name in OUT_OF_MEMORY):
        raise MemoryError(f"Out of memory {what} ({error})") from error


def _early_launcher() -> EarlyLauncher | None:
    """None: this driver has none."""
    try:
        return EarlyLauncher()
    except (OSError, AttributeError):
        return None


def _ctypes_argument(x: Array | int | float) -> Any:
    if isinstance(x, int):
        return ctypes.c_int(x)
    return ctypes.c_float(x) if isinstance(x, float) else ctypes.c_void_p(x.data.ptr)


def _argument(x: Array | int | float) -> Any:
    if type(x) is int:
        return np.int32(x)
    return np.float32(x) if type(x) is float else x


def require_cupy() -> Any:
    """The module `cupy` with a GPU that it can use; else ConfigError says what is missing."""
    try:
        import cupy
    except ImportError as error:
        detail = str(error).splitlines()[0]
        raise ConfigError(f"device='cuda' needs CuPy ({detail}): {INSTALL}, or use device='cpu'") from error
    try:
        cupy.cuda.runtime.getDeviceCount()
        cupy.zeros(1)
    except (RuntimeError, ImportError) as error:  # CUDARuntimeError and CUDADriverError are RuntimeErrors
        version = ".".join(map(str, divmod(cupy.cuda.runtime.runtimeGetVersion() // 10, 100)))
        raise ConfigError(
            f"device='cuda': CuPy for CUDA {version} finds no GPU that it can use ({error}): install or update "
            f"the NVIDIA driver, or {INSTALL}, or use device='cpu'"
        ) from error
    try:
        cupy.cuda.nvrtc.getVersion()
    except (RuntimeError, ImportError) as error:
        detail = str(error).splitlines()[0]
        raise ConfigError(
            f"device='cuda': CuPy finds no CUDA compiler ({detail}): {INSTALL}, or use device='cpu'"
        ) from error
    return cupy


def available() -> bool:
    """Whether CuPy and a GPU are present, without an error."""
    try:
        require_cupy()
    except ConfigError:
        return False
    return True


def free_bytes() -> int:
    """Of the device's memory."""
    return int(require_cupy().cuda.runtime.memGetInfo()[0])


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
    """Launches that begin before the one before them has ended: cuLaunchKernelEx of the driver, which CuPy lacks.

    Raises OSError or AttributeError where it is not there.
    """

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
            name = "CUDA_ERROR_OUT_OF_MEMORY" if status == 2 else f"CUDA driver error {status}"
            raise RuntimeError(f"cuLaunchKernelEx: {name}")
