"""Compiled kernels on disk: looked for when one is first needed, and loaded without what only compiling needs."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.runtime._nrt_python import c_helpers

from edgekv import numba_cache


@functools.cache
def _name_helpers() -> None:
    """Tells LLVM where what kernels call of Numba's own is; a compilation does so by itself."""
    for name, address in c_helpers.items():
        llvm.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


@functools.cache
def sources() -> str:
    """A digest of all that is compiled into kernels."""
    package, digest = pathlib.Path(__file__).parent, hashlib.sha256()
    for source in sorted([*package.rglob("*.py"), *(package.parent / "contract").rglob("*.py")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()


@functools.cache
def _stamp(source: str) -> str:
    return hashlib.sha256(pathlib.Path(source).read_bytes()).hexdigest()


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
        return str(numba_cache.folder(self._source))

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
        return cls(function) if numba_cache.folder(function.__code__.co_filename) else None

    @functools.cached_property
    def _files(self) -> Any:
        files = _Files(self._function)
        numba_cache.forget_old(files.cache_path, sources())
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
