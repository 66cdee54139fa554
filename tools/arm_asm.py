"""The decode kernels' machine code on Arm: inner loops, their instructions, and how many a key or value takes.

    tools/arm_emulated.sh python tools/arm_asm.py --json docs/data/arm-asm.json     or on any Arm
    tools/arm_emulated.sh python tools/arm_asm.py --cpu cortex-a76

Compiles every hot kernel for each CPU, by NUMBA_CPU_NAME in a process with an empty cache, and reads the assembly.
A kernel's inner loop is the one that multiplies or counts most. Instructions per token of 128 channels and query
row are the loop's length over what it does in one pass, and those of the loops around it that a token still feels;
what a block of 64 tokens shares is left out. All numbers are counts, and none is a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from typing import Any

from arm_kernels import KERNELS, Kernel
from arm_loops import CALLS, chains, functions

CPUS = ("cortex-a76", "cortex-a57", "cortex-a78ae")


@dataclasses.dataclass(frozen=True)
class Found:
    """What the assembly of one kernel says."""

    kernel: str
    function: str
    instructions_per_token: float
    loop: int  # instructions of the inner loop
    work: int  # multiplications or bits of one pass
    vector: int
    loads: int
    stores: int
    calls: int
    scalar_float: int
    mnemonics: dict[str, int]


def measure(name: str, kernel: Kernel) -> Found:
    """Compiles the kernel and counts its inner loop."""
    function = kernel.function.rpartition(".")[2]
    candidates = [
        (function not in symbol, -loop.work(kernel.work), loop, around)
        for assembly in assemblies(kernel)
        for symbol, code, labels in functions(assembly)
        if not symbol.startswith(("_ZN7cpython", "cfunc")) and (not kernel.emitted or symbol == function)
        for loop, around in chains(code, labels)
        if loop.work(kernel.work)
    ]
    if not candidates:
        raise SystemExit(f"{name}: no loop of {kernel.function} has {' or '.join(kernel.work)}")
    candidates.sort(key=lambda candidate: candidate[:2])  # the function itself before what it calls
    *_, inner, around = candidates[kernel.rank]
    work = inner.work(kernel.work)
    per_token = len(inner.code) * kernel.needed / work
    per_token += sum(own / tokens for own, tokens in zip(around, kernel.outer, strict=False))
    code = inner.code
    return Found(
        kernel=name,
        function=kernel.function,
        instructions_per_token=round(per_token, 1),
        loop=len(code),
        work=work,
        vector=sum(i.vector for i in code),
        loads=sum(i.mnemonic.startswith("ld") for i in code),
        stores=sum(i.mnemonic.startswith("st") for i in code),
        calls=sum(i.mnemonic in CALLS for i in code),
        scalar_float=sum(i.scalar_float for i in code),
        mnemonics=inner.counts(),
    )


def assemblies(kernel: Kernel) -> list[str]:
    """Of each version that the kernel's call compiles."""
    if kernel.emitted:
        return [kernel.emitted()]
    module, _, function = kernel.function.rpartition(".")
    dispatcher = getattr(importlib.import_module(f"edgekv.kernels.cpu.{module}"), function)
    before = set(dispatcher.signatures)
    kernel.call()
    compiled = set(dispatcher.signatures) - before or before  # one function may serve several kernels
    if kernel.parts:  # the first argument is a tuple of as many
        compiled = {signature for signature in compiled | before if len(signature[0]) == kernel.parts}
    general = {signature for signature in compiled if "Literal" not in str(signature)}
    return [dispatcher.inspect_asm(signature) for signature in general or compiled]


def table(found: list[Found]) -> str:
    """A line per kernel."""
    head = f"{'kernel':<26}{'per token':>10}{'loop':>6}{'vector':>8}{'loads':>7}{'calls':>7}{'scalar':>8}  most"
    rows = [
        f"{f.kernel:<26}{f.instructions_per_token:>10.1f}{f.loop:>6}{f.vector:>8}{f.loads:>7}{f.calls:>7}"
        f"{f.scalar_float:>8}  " + ", ".join(f"{n} {name}" for name, n in most(f.mnemonics))
        for f in found
    ]
    return "\n".join([head, *rows])


def most(mnemonics: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(mnemonics.items(), key=lambda item: -item[1])[:5]


def run_for(cpu: str) -> list[dict[str, Any]]:
    """`measure_all` in a process of its own, which compiles for `cpu`."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CACHE_DIR": cache}
        command = [sys.executable, __file__, "--this"]
        result = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="append", metavar="NAME", help=f"by default {', '.join(CPUS)}")
    parser.add_argument("--json", metavar="FILE", help="write all counts")
    parser.add_argument("--this", action="store_true", help="only NUMBA_CPU_NAME, as JSON")
    arguments = parser.parse_args()
    if platform.machine() != "aarch64":
        raise SystemExit("this is no Arm: run it through tools/arm_emulated.sh")
    if arguments.this:
        print(json.dumps([dataclasses.asdict(measure(name, kernel)) for name, kernel in KERNELS.items()]))
        return
    counts = {cpu: run_for(cpu) for cpu in arguments.cpu or CPUS}
    for cpu, found in counts.items():
        print(f"{cpu}\n{table([Found(**item) for item in found])}\n")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            file.write(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
