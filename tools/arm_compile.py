"""Compiles the decode kernels for Arm processors and writes their assembly, for tools/arm_asm.py to read.

    tools/arm_emulated.sh python tools/arm_compile.py --out FOLDER     or on any Arm

Each processor's kernels are compiled in a process of its own, by NUMBA_CPU_NAME and with an empty cache.
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

import numba
import numpy as np

CPUS = ("cortex-a76", "cortex-a57", "cortex-a78ae")
PACKAGE = "edgekv.kernels.cpu"
# Loops of codecs, by module: the name of its `Loops` and those of it that are read.
LOOPS = (
    ("rows", "F16", ("score", "add")),
    ("planes", "CENTRED", ("score",)),
    ("interleaved_values", "INTERLEAVED", ("add",)),
    ("signs", "SKETCH", ("score",)),
    ("int4", "INT4", ("add",)),
    ("ints", "KEYS", ("score",)),
    ("ints", "VALUES", ("add",)),
    ("kivi", "KEYS", ("score",)),
    ("kivi", "VALUES", ("add",)),
    ("gather", "PLANE_VALUES", ("again",)),
    ("fier", "KEYS", ("score",)),
    ("retrieval", "CHOSEN_F16", ("score", "add")),
)


def module(name: str) -> Any:
    return importlib.import_module(f"{PACKAGE}.{name}")


def compile_all() -> dict[str, list[dict[str, Any]]]:
    """Assembly of every loop above, and of each version of every function that they call."""
    loops = [
        {"name": f"{name}.{loops}.{which}", "assembly": getattr(getattr(module(name), loops), which).assembly()}
        for name, loops, names in LOOPS
        for which in names
    ]
    loops.append({"name": "softmax.weigh", "assembly": weigh_assembly()})
    split_rope()
    return {"loops": loops, "functions": functions()}


def weigh_assembly() -> str:
    """The softmax of a block has no loop of its own: attention's walk calls it."""
    weigh = module("softmax").weigh
    caller = numba.njit("int64(int64, int64, int64, int64, int64)")(lambda *args: weigh(*args))
    (assembly,) = caller.inspect_asm().values()
    return str(assembly)


def split_rope() -> None:
    """Takes arrays: zeros, since what is compiled depends on their types alone."""
    from edgekv.kernels import numba_kernels

    def f32(*shape: int) -> Any:
        return np.zeros(shape, np.float32)

    none, angles, heads = f32(0), f32(1, 64), [f32(1, 1, 128) for _ in range(3)]
    numba_kernels().split_rope(f32(1, 384), angles, angles, *heads, 1.0, none, none, 1e-5)


def functions() -> list[dict[str, Any]]:
    """first: of how many parts the first argument is, where it is a tuple."""
    found = []
    for info in pkgutil.iter_modules(importlib.import_module(PACKAGE).__path__):
        for name, function in vars(module(info.name)).items():
            if getattr(function, "__module__", None) == f"{PACKAGE}.{info.name}" and hasattr(
                function, "inspect_asm"
            ):
                for signature in function.signatures:
                    first = len(signature[0]) if signature and hasattr(signature[0], "__len__") else 0
                    found.append(
                        {
                            "name": f"{info.name}.{name}",
                            "first": first,
                            "literal": "Literal" in str(signature),
                            "assembly": function.inspect_asm(signature),
                        }
                    )
    return found


def compile_for(cpu: str) -> dict[str, list[dict[str, Any]]]:
    """`compile_all` in a process of its own, which compiles for `cpu`."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CACHE_DIR": cache}
        command = [sys.executable, __file__, "--this"]
        result = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    compiled: dict[str, list[dict[str, Any]]] = json.loads(result.stdout)
    return compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="append", metavar="NAME", help=f"by default {', '.join(CPUS)}")
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="where CPU.json goes")
    parser.add_argument("--this", action="store_true", help="only NUMBA_CPU_NAME, to standard output")
    arguments = parser.parse_args()
    if platform.machine() != "aarch64":
        raise SystemExit("this is no Arm: run it through tools/arm_emulated.sh")
    if arguments.this:
        print(json.dumps(compile_all()))
        return
    if arguments.out is None:
        parser.error("say --out FOLDER")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for cpu in arguments.cpu or CPUS:
        (arguments.out / f"{cpu}.json").write_text(json.dumps(compile_for(cpu)), encoding="utf-8")
        print(f"{cpu}: compiled")


if __name__ == "__main__":
    main()
