"""The GPU by CuPy: programs of .cu files, their launches, and graphs, whose counters change between replays.

NVRTC compiles a program at its first launch; CuPy caches it. A captured launch keeps its arguments. During a
capture, counters are `Counter`s: ints that remember which cache counters they were computed from. A launch gets
the captured value and the address of a delta, the value now minus the captured one, which each replay sets first.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgekv.errors import ConfigError
from edgekv.files import atomic_write, cache_root

Array = Any  # in the device's memory: a cupy.ndarray, or what stands for one in a test
Macros = tuple[tuple[str, int | str], ...]

SCALARS = {"int": np.int32, "u32": np.uint32, "float": np.float32}  # types of the fields of C++ structs
FOLDER = pathlib.Path(__file__).parent
N_DELTAS = 15  # sums of counters whose deltas are on the device, that of positions first
N_INPUTS = N_DELTAS + 2  # of a captured graph: the deltas, the token, and a 0
GRAPH_TOKENS = 512  # at most this many tokens replay the graph of a step
# cuBLAS's names: CUBLAS_OP_N, CUDA_R_32F and so on.
OP_N, OP_T, R_32F, R_16F, COMPUTE_32F, GEMM_TENSOR_OP = 0, 1, 0, 2, 68, 99
ONE, ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)
PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
OUT_OF_MEMORY = ("cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED")
INSTALL = "pip install 'edgekv[cuda12]' (or [cuda13]: the version that nvidia-smi shows, or lower)"


@dataclasses.dataclass(frozen=True)
class Program:
    """CUDA source that is compiled together: common.cu, ptx.cu and then ``files``.

    files: names in this folder, or paths, without ``.cu``. macros: what the compiler is told to define. exact:
    products and sums are rounded one by one, as NumPy rounds them, so that encoders equal it to the bit.
    """

    files: tuple[str | pathlib.Path, ...]
    macros: Macros = ()
    exact: bool = False

    def source(self, basics: tuple[str, ...] = ("common", "ptx")) -> str:
        """Returns the files' text, with lines by which compiler messages name the files."""
        return "".join(_text(name) for name in (*basics, *self.files))

    def options(self) -> tuple[str, ...]:
        """Returns the compiler's options, macros among them."""
        defines = (f"-D{name}={value}" for name, value in self.macros)
        return "-std=c++14", f"--fmad={'false' if self.exact else 'true'}", *defines


@functools.cache
def _text(name: str | pathlib.Path) -> str:
    path = FOLDER / f"{name}.cu"
    return f'#line 1 "{path.name}"\n{path.read_text()}'


class Struct:
    """A struct that a program's .cu files declare, as a kernel's argument by value.

    name: the struct's. fields: by their names in C++, each a number, an array (passed as its address), another
    Struct, or None (a null pointer); those that are left out are 0.
    """

    def __init__(self, name: str, **fields: Any) -> None:
        self.name, self.fields = name, fields

    def packed(self, program: Program) -> npt.NDArray[Any]:
        """Returns the bytes () of the struct, laid out as the compiler of ``program`` lays them out."""
        packed = np.zeros((), struct_layout(program.files, self.name))
        for field, x in self.fields.items():
            packed[field] = by_value(x, program)
        return packed


# A line of a struct: the type of its fields, and their names with * before pointers.
FIELDS = re.compile(r" +(?:const )?(\w+)([\w\s,*]+);")
FIELD = re.compile(r"\s*(\*?)\s*(\w+)")


@functools.cache
def struct_layout(files: tuple[str | pathlib.Path, ...], name: str) -> np.dtype[np.void]:
    """Returns the dtype of a struct that common.cu or ``files`` declare, with the padding of C++."""
    source = "".join(map(_text, ("common", *files)))
    declared = re.search(rf"^struct {name} {{\n(.*?)^}};", source, re.DOTALL | re.MULTILINE)
    assert declared, name
    fields: list[Any] = []
    for line in declared[1].splitlines():
        if found := FIELDS.match(line):
            for star, field in FIELD.findall(found[2]):
                kind = np.uintp if star else SCALARS.get(found[1]) or struct_layout(files, found[1])
                fields.append((field, kind))
    return np.dtype(fields, align=True)


def by_value(x: Array | Struct | float | None, program: Program) -> npt.NDArray[Any]:
    """Returns the bytes () that a kernel gets for an argument; of an array, those of its address."""
    if isinstance(x, Struct):
        return x.packed(program)
    if isinstance(x, np.ndarray):  # `Driver.pinned_inputs`
        return np.array(x.ctypes.data, np.uintp)
    if isinstance(x, Counter) and x.terms:
        raise CaptureError(f"{x.terms}: given to a kernel without `counter`")
    if isinstance(x, (int, np.integer)):
        return np.array(x, np.int32)
    if isinstance(x, float):
        return np.array(x, np.float32)
    return np.array(0 if x is None else x.data.ptr, np.uintp)


class Launch(NamedTuple):
    """A kernel of a program, run by ``grid`` thread blocks of ``threads`` threads.

    early: the kernel may begin before earlier launches have ended, and waits for them by `grid_dependency_wait`.
    shared: bytes of its DYNAMIC_SHARED memory.
    """

    program: Program
    kernel: str
    grid: tuple[int, ...]
    threads: int
    early: bool = False
    shared: int = 0


class CaptureError(Exception):
    """Raised where a step does something that can't be captured; the step is then taken without a graph."""


class Driver:
    """The current GPU: its memory, launches and graphs, on the default stream.

    Several drivers and threads share that stream, so they see each other's work in order; only `capture` uses a
    stream of its own, so that a graph holds nothing else.

    has_half_gemm: whether tensor cores multiply float16 faster than float32 is multiplied (sm_70 on).
    has_half_mma: whether prefill_attention.cu compiles (sm_75 on).
    has_integer_mma: whether tiled_linear.cu and tiled.cu compile (sm_80 on).
    inputs: (N_INPUTS,) int32 on the device. A replay sets them from `GraphInputs`, and to 0 when it ends. Views:
    position_delta (1,), the position now minus the captured one; ids (1,), the token; zero (1,), always 0.
    """

    def __init__(self) -> None:
        self.cupy: Any = require_cupy()
        runtime = self.cupy.cuda.runtime
        properties = runtime.getDeviceProperties(runtime.getDevice())
        self.multiprocessors = int(properties["multiProcessorCount"])
        self.memory_bytes = int(properties["totalGlobalMem"])
        generation = int(properties["major"]), int(properties["minor"])
        self.has_half_gemm, self.has_half_mma = generation >= (7, 0), generation >= (7, 5)
        self.has_integer_mma = generation >= (8, 0)
        self._launch_early = _early_launcher() if generation >= (9, 0) else None
        self._cuda = int(runtime.runtimeGetVersion())
        self.stream, self._capture_stream = self.cupy.cuda.Stream.null, self.cupy.cuda.Stream(non_blocking=True)
        self._is_capturing = False
        self.inputs = self.zeros((N_INPUTS,), np.int32)
        self.position_delta, self.ids, self.zero = self.inputs[:1], self.inputs[-2:-1], self.inputs[-1:]
        self._modules: dict[Program, Any] = {}
        self._kernels: dict[tuple[Program, str], Any] = {}

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Returns an array of the device with undefined contents."""
        return self.cupy.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Returns an array of zeros on the device."""
        return self.cupy.zeros(shape, dtype)

    def pinned_inputs(self) -> tuple[npt.NDArray[np.int32], Any]:
        """Returns zeros (N_INPUTS,) in pinned memory of the host, which kernels can read, and an event."""
        pinned = np.frombuffer(self.cupy.cuda.alloc_pinned_memory(4 * N_INPUTS), np.int32, N_INPUTS)
        pinned.fill(0)
        return pinned, self.cupy.cuda.Event(disable_timing=True)

    def upload(self, host: npt.NDArray[Any]) -> Array:
        """Returns a copy of a host's array on the device. Raises CaptureError while a step is captured."""
        if self._is_capturing:
            raise CaptureError("it uploads an array: taken without a graph, the step leaves it on the device")
        return self.cupy.asarray(host)

    def free_bytes(self) -> int:
        """Returns the bytes that the device has free, with those that CuPy holds unused."""
        unused = self.cupy.get_default_memory_pool().free_bytes()
        return int(self.cupy.cuda.runtime.memGetInfo()[0]) + int(unused)

    def launch(self, launch: Launch, *arguments: Array | Struct | float | None) -> None:
        """Runs a kernel; it gets ints as int, floats as float, arrays as pointers, and None as a null pointer.

        Raises MemoryError without enough memory, ConfigError where the program does not compile.
        """
        program, kernel, grid, threads, early, shared = launch
        values = tuple(by_value(x, program) for x in arguments)  # CuPy passes arrays () of NumPy's by value
        try:
            function = self._kernels.get((program, kernel))
            if function is None:
                function = self._compile(program, kernel)
                if shared:
                    function.max_dynamic_shared_size_bytes = shared
                self._kernels[program, kernel] = function
            if early and self._launch_early is not None:
                stream = self._capture_stream if self._is_capturing else self.stream
                self._launch_early(function.kernel.ptr, grid, threads, shared, stream.ptr, values)
            else:
                function(grid, (threads,), values, shared_mem=shared)
        except RuntimeError as error:
            _raise_memory_error(error, f"for {kernel}")
            raise

    def _compile(self, program: Program, kernel: str) -> Any:
        try:
            if program not in self._modules:
                self._modules[program] = self.cupy.RawModule(code=program.source(), options=program.options())
            return self._modules[program].get_function(kernel)
        except self.cupy.cuda.compiler.CompileException as error:
            log = cache_root() / "cuda-compile.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(log, f"{program}\n{error}\n".encode())
            files = "+".join(map(str, program.files))
            problem = f"{files}.cu does not compile for this GPU; the compiler said: {log}"
            raise ConfigError(problem, advice="use {device:cpu}") from None

    def half_gemm(self, x: Array, w: Array, y: Array, adds: bool) -> None:
        """Sets y (n, rows) float32 to x (n, k) times w (rows, k), both float16; ``adds``: adds the product to y.

        Sums are float32. x and w are contiguous; y has contiguous rows, which may be parts of longer ones.
        """
        from cupy_backends.cuda.libs import cublas

        (n, k), rows, stride = x.shape, len(w), y.strides[0] // y.itemsize
        one, onto = ONE.ctypes.data, (ONE if adds else ZERO).ctypes.data
        sums = COMPUTE_32F if self._cuda >= 11000 else R_32F
        factors = w.data.ptr, R_16F, k, x.data.ptr, R_16F, k
        try:
            handle = self.cupy.cuda.device.get_cublas_handle()
            cublas.gemmEx(  # by columns: y.T = w x.T
                *(handle, OP_T, OP_N, rows, n, k, one, *factors),
                *(onto, y.data.ptr, R_32F, stride, sums, GEMM_TENSOR_OP),
            )
        except RuntimeError as error:
            _raise_memory_error(error, "for a product of cuBLAS")
            raise

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Captures what ``work`` launches, without running it, and returns a function that runs it.

        Memory comes from a pool of the graph's own. Raises CaptureError where CuPy or a library that it calls
        can't capture something, or has no memory for it: the device is then as it was before.
        """
        pool = self.cupy.cuda.MemoryPool()
        try:
            with self.cupy.cuda.using_allocator(pool.malloc), self._capture_stream:
                self._capture_stream.begin_capture()
                self._is_capturing = True
                try:
                    work()
                finally:
                    self._is_capturing = False
                    graph = self._capture_stream.end_capture()
        except (RuntimeError, MemoryError) as error:  # CuPy's and CUDA's own errors are RuntimeErrors
            raise CaptureError(str(error)) from error

        def replay(pool: Any = pool) -> None:  # keeps the pool alive
            graph.launch(self.stream)

        return replay


def _raise_memory_error(error: RuntimeError, what: str) -> None:
    """Raises MemoryError, as CuPy's allocations do, where the driver or cuBLAS found too little memory."""
    if any(name in str(error) for name in OUT_OF_MEMORY):
        raise MemoryError(f"Out of memory {what} ({error})") from error


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


def _early_launcher() -> Callable[..., None] | None:
    """Returns a function that launches a kernel early, by cuLaunchKernelEx, which CuPy lacks; None without it.

    It takes the kernel's handle, grid, threads of a block, shared bytes, stream, values, and raises RuntimeError.
    """
    try:
        launch_kernel = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None

    def launch(
        function: int, grid: tuple[int, ...], threads: int, shared: int, stream: int, values: tuple[Any, ...]
    ) -> None:
        attribute = _Attribute(PROGRAMMATIC_SERIALIZATION, 0, 1)
        x, y, z = (*grid, 1, 1)[:3]
        config = _Config(x, y, z, threads, 1, 1, shared, stream, ctypes.pointer(attribute), 1)
        pointers = (ctypes.c_void_p * len(values))(*(x.ctypes.data for x in values))
        status = launch_kernel(ctypes.byref(config), ctypes.c_void_p(function), pointers, None)
        if status:
            name = "CUDA_ERROR_OUT_OF_MEMORY" if status == 2 else f"CUDA driver error {status}"
            raise RuntimeError(f"cuLaunchKernelEx: {name}")

    return launch


def require_cupy() -> Any:
    """Returns the module `cupy`. Raises ConfigError, which says what is missing, unless it can use a GPU."""
    advice = f"{INSTALL}, or use {{device:cpu}}"
    try:
        import cupy
    except ImportError as error:
        detail = str(error).splitlines()[0]
        raise ConfigError(f"a GPU needs CuPy ({detail})", advice=advice) from error
    try:
        cupy.cuda.runtime.getDeviceCount()
        cupy.zeros(1)
    except (RuntimeError, ImportError) as error:  # CUDARuntimeError and CUDADriverError are RuntimeErrors
        version = ".".join(map(str, divmod(cupy.cuda.runtime.runtimeGetVersion() // 10, 100)))
        problem = f"CuPy for CUDA {version} finds no GPU that it can use ({error})"
        raise ConfigError(problem, advice=f"install or update the NVIDIA driver, or {advice}") from error
    try:
        cupy.cuda.nvrtc.getVersion()
    except (RuntimeError, ImportError) as error:
        detail = str(error).splitlines()[0]
        raise ConfigError(f"CuPy finds no CUDA compiler ({detail})", advice=advice) from error
    return cupy


def available() -> bool:
    """Returns whether CuPy can use a GPU."""
    try:
        require_cupy()
    except ConfigError:
        return False
    return True


Terms = tuple[tuple[Hashable, int], ...]
"""A sum of counters: their names, and how often each is added."""


class Counter(int):
    """A number in a captured graph that changes between replays: a constant plus a sum of the caches' counters.

    Comparisons see its value in the capture. Arithmetic other than + and - of integers raises CaptureError.
    """

    terms: Terms
    inputs: GraphInputs
    __array_ufunc__ = None  # NumPy's integers leave arithmetic to it

    def __new__(cls, value: int, terms: Terms, inputs: GraphInputs) -> Counter:
        self = super().__new__(cls, value)
        self.terms, self.inputs = terms, inputs
        return self

    def _sum(self, sign: int, other_sign: int, other: Any) -> Counter:
        """Returns ``sign`` times this plus ``other_sign`` times the other."""
        if not isinstance(other, (int, np.integer)):
            self._refuse(other)
        factors = {name: sign * n for name, n in self.terms}
        for name, n in other.terms if isinstance(other, Counter) else ():
            factors[name] = factors.get(name, 0) + other_sign * n
        terms = sorted(((name, n) for name, n in factors.items() if n), key=repr)
        return Counter(sign * int(self) + other_sign * int(other), tuple(terms), self.inputs)

    def _refuse(self, *others: Any) -> Any:
        raise CaptureError(f"neither + nor - of integers, of {self.terms} and {others}")


SUMS = {"add": (1, 1), "radd": (1, 1), "sub": (1, -1), "rsub": (-1, 1)}  # signs of a counter and of the other
UNARY = "neg pos abs invert round trunc floor ceil float"
BINARY = "mul truediv floordiv mod divmod pow lshift rshift and or xor"
for _name in (*UNARY.split(), *BINARY.split(), *(f"r{name}" for name in BINARY.split())):
    setattr(Counter, f"__{_name}__", Counter._refuse)
for _name, _signs in SUMS.items():
    setattr(Counter, f"__{_name}__", functools.partialmethod(Counter._sum, *_signs))


class GraphInputs:
    """What each replay of a graph reads from the host: the deltas of its sums of counters, and the token.

    pinned: (N_INPUTS,) int32 in pinned memory, which the graph copies to `Driver.inputs`. replayed: an event,
    recorded behind each replay: from then on ``pinned`` may be written again.
    """

    def __init__(self, driver: Driver, positions: Hashable) -> None:
        """positions: the name of the counter whose delta is `Driver.position_delta`."""
        self._driver = driver
        self._indices: dict[Terms, int] = {((positions, 1),): 0}  # of the sums' deltas among the inputs
        self.pinned, self.replayed = driver.pinned_inputs()

    def delta_address(self, terms: Terms) -> Array:
        """Returns a sum's delta (1,) int32 on the device. Raises CaptureError past N_DELTAS sums."""
        index = self._indices.setdefault(terms, len(self._indices))
        if index >= N_DELTAS:
            raise CaptureError(f"{index} sums of counters")
        return self._driver.inputs[index : index + 1]

    def deltas(self, counter_deltas: Mapping[Hashable, int]) -> list[int]:
        """Returns each sum's delta from those of the counters by name."""
        return [sum(n * counter_deltas[name] for name, n in terms) for terms in self._indices]

    def write(self, token: int, deltas: list[int]) -> None:
        """Waits for the end of the last replay, then writes what the next one reads."""
        self.replayed.synchronize()
        self.pinned[: len(deltas)] = deltas
        self.pinned[-2] = token


def set_inputs(driver: Driver, pinned: npt.NDArray[np.int32] | None) -> None:
    """Launches a kernel that sets the driver's inputs to ``pinned`` as it is then, or to 0 if that is None."""
    driver.launch(Launch(Program(("layers",)), "set_inputs", (1,), N_INPUTS), pinned, driver.inputs)


def counter(driver: Driver, x: int) -> Struct:
    """Returns a number as the `Counter` of common.cu: its value in a capture, and the address of its delta."""
    delta = x.inputs.delta_address(x.terms) if isinstance(x, Counter) and x.terms else driver.zero
    return Struct("Counter", captured=int(x), delta=delta)
