"""Compiles the decode kernels for Arm processors and writes their assembly, for tools/arm_asm.py to read.

    python tools/arm_compile.py --out FOLDER

Each processor's kernels are compiled in a process of its own, by NUMBA_CPU_NAME and with an empty cache. Where
this is no Arm, LLVM is told to make Arm's code, which the llvmlite of PyPI can, and nothing is run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import pkgutil
import platform
import subprocess
import sys
import tempfile
from typing import Any

import llvmlite.binding as llvmlite
import numpy as np

ARM, TRIPLE = "aarch64", "aarch64-unknown-linux-gnu"
CPUS = ("cortex-a76", "cortex-a57", "cortex-a78ae")
PACKAGE = "edgekv.kernels.cpu"
# Loops of codecs: module, kind, and those of its `Loops` that are read.
LOOPS = (
    ("rows", "f16", ("score", "add")),
    ("planes", "centred_planes", ("score",)),
    ("interleaved_values", "interleaved", ("add",)),
    ("papers.signs", "signs", ("score",)),
    ("papers.int4", "int4", ("add",)),
    ("papers.kivi", "kivi_keys", ("score",)),
    ("papers.kivi", "kivi_values", ("add",)),
    ("gather", "plane_keys", ("measure", "estimate")),
    ("gather", "plane_values", ("second_stage",)),
    ("papers.fier", "sign_index", ("score",)),
)


def module(name: str) -> Any:
    return importlib.import_module(f"{PACKAGE}.{name}")


def compile_all(only: str = "") -> dict[str, list[dict[str, Any]]]:
    """Assembly of every loop above, and of each version of every function that they call; only: of one module."""
    named = [
        (f"{kind}.{which}", name, module(name).LOOPS[kind], which)
        for name, kind, names in LOOPS
        for which in names
    ]
    chosen = module("sparse_attention").CHOSEN["f16"]
    named += [(f"chosen f16.{which}", "sparse_attention", chosen, which) for which in ("score", "add")]
    loops = [
        {"name": name, "assembly": getattr(which_loops, which).assembly()}
        for name, file, which_loops, which in named
        if only in ("", file)
    ]
    if only in ("", "softmax"):
        loops.append({"name": "softmax.weigh", "assembly": weigh_assembly()})
    if only in ("", "rope"):
        compile_rope()
    return {"loops": loops, "functions": functions()}


def make_arm_code() -> None:
    """Numba and edgekv, not yet imported, take this machine for an Arm."""
    llvmlite.initialize_all_targets()
    llvmlite.initialize_all_asmprinters()
    target = llvmlite.Target.from_triple(TRIPLE)
    llvmlite.get_process_triple = llvmlite.get_default_triple = lambda: TRIPLE
    llvmlite.Target.from_default_triple = staticmethod(lambda: target)
    platform.machine = lambda: ARM


def weigh_assembly() -> str:
    """The softmax of a block has no loop of its own: attention's walk calls it."""
    import numba

    weigh = module("softmax").weigh
    caller = numba.njit("int64(int64, int64, int64, int64, int64)")(
        lambda s, gap, rows, n, ends: weigh(s, gap, rows, n, ends)
    )
    (assembly,) = caller.inspect_asm().values()
    return str(assembly)


def compile_rope() -> None:
    """For the arrays that it is called with, which the parallel version would be given, too."""
    import numba

    rope = module("rope")

    def compile_only(function: Any, n_items: int, work: int, args: Any) -> None:
        function.compile((numba.intp, numba.intp, numba.typeof(args)))

    def f32(*shape: int) -> Any:
        return np.zeros(shape, np.float32)

    rope.run, none, angles, heads = compile_only, f32(0), f32(1, 64), [f32(1, 1, 128) for _ in range(3)]
    rope.split_rope(f32(1, 384), angles, angles, *heads, 1.0, none, none, 1e-5)


def functions() -> list[dict[str, Any]]:
    """first: of how many parts the first argument is, where it is a tuple."""
    found = []
    for info in pkgutil.walk_packages(importlib.import_module(PACKAGE).__path__, f"{PACKAGE}."):
        for name, function in vars(importlib.import_module(info.name)).items():
            if getattr(function, "__module__", None) == info.name and hasattr(function, "inspect_asm"):
                for signature in function.signatures:
                    first = len(signature[0]) if signature and hasattr(signature[0], "__len__") else 0
                    found.append(
                        {
                            "name": f"{info.name.removeprefix(PACKAGE)[1:]}.{name}",
                            "first": first,
                            "literal": "Literal" in str(signature),
                            "assembly": function.inspect_asm(signature),
                        }
                    )
    return found


def compile_for(cpu: str, only: str = "") -> dict[str, list[dict[str, Any]]]:
    """`compile_all` in a process of its own, which compiles for `cpu`."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CACHE_DIR": cache}
        if platform.machine() != ARM:
            environment |= {"NUMBA_CPU_FEATURES": "+neon"}  # not this machine's; more comes with the name
        command = [sys.executable, __file__, "--this", "--only", only]
        result = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    compiled: dict[str, list[dict[str, Any]]] = json.loads(result.stdout)
    return compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="append", metavar="NAME", help=f"by default {', '.join(CPUS)}")
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="where CPU.json goes")
    parser.add_argument("--only", default="", metavar="MODULE", help="its loops alone")
    parser.add_argument("--this", action="store_true", help="only NUMBA_CPU_NAME, to standard output")
    arguments = parser.parse_args()
    if arguments.this:
        if platform.machine() != ARM:
            make_arm_code()
        print(json.dumps(compile_all(arguments.only)))
        return
    if arguments.out is None:
        parser.error("say --out FOLDER")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for cpu in arguments.cpu or CPUS:
        compiled = compile_for(cpu, arguments.only)
        (arguments.out / f"{cpu}.json").write_text(json.dumps(compiled), encoding="utf-8")
        print(f"{cpu}: compiled")


if __name__ == "__main__":
    main()
