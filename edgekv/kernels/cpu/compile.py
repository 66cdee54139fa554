"""How kernels are compiled, and kept on disk so that this is done once on a machine."""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm
import numba
from numba.core import dispatcher
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime._nrt_python import c_helpers
from numba.extending import intrinsic as _intrinsic

from edgekv.kernels import kernel_cache
from edgekv.kernels.kernel_cache import CPU_FEATURES as CPU_FEATURES
from edgekv.kernels.kernel_cache import digest, sources


@functools.cache
def _name_helpers() -> None:
    """Tells LLVM where what kernels call of Numba's own is; a compilation does so by itself."""
    for name, address in c_helpers.items():
        llvm.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


@functools.cache
def _stamp(source: str) -> str:
    """A digest of what a function may call of its own package's, or of its file alone."""
    file = pathlib.Path(source)
    if (file.parent / "__init__.py").exists():
        return _package_stamp(file.parent)
    return digest([file])


@functools.cache
def _package_stamp(folder: pathlib.Path) -> str:
    return digest(sorted(folder.rglob("*.py")))


class _Place:
    """Where a function's files are, as Numba asks for it, which by itself would have them beside the source."""

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        self._source, self._line = source, function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, function: Callable[..., Any], source: str) -> _Place:
        return cls(function, source)

    def ensure_cache_path(self) -> None:
        """It is there."""

    def get_cache_path(self) -> str:
        return str(kernel_cache.folder(self._source))

    def get_source_stamp(self) -> str:
        return _stamp(self._source)

    def get_disambiguator(self) -> str:
        return str(self._line)


class _Parts(CompileResultCacheImpl):  # type: ignore[misc]
    """What is kept of a kernel: its machine code, and how Python calls it."""

    _locator_classes = (_Place,)

    def reduce(self, compiled: Any) -> Any:
        library, described = compiled.library, compiled.fndesc
        described.typemap = described.calltypes = None
        names = described.llvm_cpython_wrapper_name, described.llvm_cfunc_wrapper_name
        defined = [name for name in names if library._codegen._engine.is_symbol_defined(name)]
        # Numba keeps the module for other functions to link. Here it says what the machine code defines, no more.
        module = "\n".join(f'define void @"{name}"() {{ ret void }}' for name in defined)
        code = library._get_compiled_object(), llvm.parse_assembly(module).as_bitcode()
        rest = compiled.environment, compiled.signature, False, (), "", compiled.reload_init, ()
        return (library.name, "object", code), described, *rest


class _Files(FunctionCache):  # type: ignore[misc]
    """What a process saves that still runs older sources is not found by newer ones."""

    _impl_class = _Parts

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), sources())


class KeptKernel:
    """What Numba asks of a function's cache.

    Numba's own makes a file in the folder for every function that is defined, fills the tables of all types and
    operators before it reads a kernel, and reads what only a compilation needs.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @classmethod
    def of(cls, function: Callable[..., Any]) -> KeptKernel | None:
        """None: there is no place for it."""
        return cls(function) if kernel_cache.folder(function.__code__.co_filename) else None

    @functools.cached_property
    def _files(self) -> Any:
        files = _Files(self._function)
        kernel_cache.forget_old(files.cache_path, sources())
        return files

    @property
    def cache_path(self) -> str:
        """The folder."""
        return str(self._files.cache_path)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The compiled function; None: it has not been compiled for this processor and these types, or damaged."""
        _name_helpers()
        try:
            return self._files._load_overload(signature, target_context)
        except Exception:  # pickle raises whatever it stumbles over
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keeps it, if there is room."""
        with contextlib.suppress(OSError):
            self._files.save_overload(signature, compiled)

    def enable(self) -> None:
        """It is from the start."""
        self._files.enable()

    def disable(self) -> None:
        """Keeps and loads nothing from now on."""
        self._files.disable()

    def flush(self) -> None:
        """Forgets what is kept."""
        self._files.flush()


class InnerCompiler(dispatcher._FunctionCompiler):  # type: ignore[misc, name-defined]
    """Numba's, which would make machine code and a Python wrapper of each: half of the time that kernels take."""

    def _customize_flags(self, flags: Any) -> Any:
        flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
        return flags

    def _compile_core(self, args: Any, return_type: Any) -> Any:
        compiled = super()._compile_core(args, return_type)
        # What callers know it by. Numba wants a built-in function; called from Python, this one raises KeyError.
        entry_point = f"{{{self.py_func.__name__} is called by kernels alone}}".format
        compiled.library.finalize = functools.partial(_link, compiled.library)
        compiled.target_context.insert_user_function(entry_point, compiled.fndesc, [compiled.library])
        return compiled._replace(entry_point=entry_point)


@global_compiler_lock  # type: ignore[untyped-decorator]
def _link(library: Any) -> None:
    """As `CPUCodeLibrary.finalize`, up to the optimised module that callers link."""
    for linked in dict.fromkeys(library._linking_libraries):
        library._reload_init.update(linked._reload_init)
        library._final_module.link_in(linked._get_module_for_linking(), preserve=True)
    library._optimize_final_module()
    library._final_module.verify()
    library._finalize_dynamic_globals()
    library._finalized = True


F = TypeVar("F", bound=Callable[..., Any])
Scalar = Any  # a number inside a kernel
Args = tuple[Any, ...]

# Sums may be reordered and fused, which vectorising needs; infinities and NaNs keep their meaning.
FAST = {"reassoc", "contract", "arcp", "nsz"}


def _inner(function: F, **options: Any) -> F:
    """Called by what is compiled alone, and kept on disk as a part of that."""
    dispatcher = numba.njit(nogil=True, error_model="numpy", **options)(function)
    dispatcher._compiler.__class__ = InnerCompiler
    return cast(F, dispatcher)


def kept_jit(function: F, **options: Any) -> F:
    """Called from Python, and kept on disk."""
    dispatcher = numba.njit(nogil=True, no_cfunc_wrapper=True, **options)(function)
    if (kept := KeptKernel.of(function)) is not None:
        dispatcher._cache = kept
    return cast(F, dispatcher)


def jit(function: F) -> F:
    """Exact arithmetic, as written: said in so many words, or a function takes on that of its first caller."""
    return _inner(function, fastmath=False)


def fast_jit(function: F) -> F:
    """Sums in any order."""
    return _inner(function, fastmath=FAST)


def inline_jit(function: F) -> F:
    """`fast_jit`, always inlined: for what runs so often that passing arrays would show."""
    return _inner(function, fastmath=FAST, forceinline=True)


def entry_jit(function: F) -> F:
    """Called from Python, and kept on disk; exact."""
    return kept_jit(function, error_model="numpy", fastmath=False)


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """`numba.extending.intrinsic`: the decorated function is called without its first argument."""
    return cast(Callable[..., Any], _intrinsic(function))
