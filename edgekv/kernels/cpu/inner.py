"""Functions that only compiled code calls: they become part of their callers, and nothing else is made of them."""

from __future__ import annotations

import functools
from typing import Any

from numba.core import dispatcher
from numba.core.compiler_lock import global_compiler_lock


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
