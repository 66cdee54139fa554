"""The device behind CuPy: its memory, and kernels compiled by NVRTC at their first launch, cached by CuPy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.errors import ConfigError
from edgekv.files import atomic_write, cache_root
from edgekv.kernels.cuda.counter import N_MOVES
from edgekv.kernels.cuda.early import EarlyLauncher
from edgekv.kernels.cuda.program import Array, CannotRecord, Launch, Program

# Of cuBLAS.
AS_IT_IS, TRANSPOSED, SINGLE, HALF, SINGLE_SUMS, TENSOR_CORES = 0, 1, 0, 2, 68, 99
ONE, ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)
OUT_OF_MEMORY = ("cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED")
INSTALL = "pip install 'edgekv[cuda12]' (or [cuda13]: the version that nvidia-smi shows, or lower)"


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
                f"device='cuda': {'+'.join(program.files)}.cu does not compile for this GPU; the compiler's log "
                f"is in {log}; use device='cpu'"
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
