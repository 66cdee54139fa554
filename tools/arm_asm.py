"""The decode kernels' machine code on Arm: inner loops, their instructions and cycles per key or value.

    python tools/arm_compile.py --out FOLDER
    python tools/arm_asm.py --assembly FOLDER --json docs/data/arm-asm.json     with llvm-mca

A kernel's inner loop is the one that multiplies or counts most. Per token of 128 channels and query row counted
are the loop's instructions over what it does in one pass, and those of the loops around it that a token still
feels; what a block of 64 tokens shares is left out. Cycles are those of llvm-mca for ITERATIONS passes of the same
code on one core with everything in its first cache, and at least the instructions over what the processor decodes
in a cycle. All numbers are counts and predictions, and none is a time that was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
from typing import Any

from arm_kernels import KERNELS, Kernel
from arm_loops import CALLS, Instruction, chains, functions, whole

ITERATIONS = 200
# Of each processor: LLVM's model, and instructions decoded a cycle. LLVM has none for the A76 and the A78 and
# would take the A57's: the Neoverse N1 is the A76 with another second cache, which the A78 followed.
MODELS = {"cortex-a76": ("neoverse-n1", 4), "cortex-a57": ("cortex-a57", 3), "cortex-a78ae": ("neoverse-n1", 4)}
TOOLS = ("llvm-mca", *(f"llvm-mca-{version}" for version in range(25, 15, -1)))
FEATURES = "+dotprod,+fullfp16"

Compiled = dict[str, list[dict[str, Any]]]  # of tools/arm_compile.py


@dataclasses.dataclass(frozen=True)
class Found:
    """What the assembly of one kernel says; cycles: None without llvm-mca."""

    kernel: str
    function: str
    instructions_per_token: float
    cycles_per_token: float | None
    loop: int  # instructions of the inner loop
    loop_cycles: float | None
    work: int  # multiplications or bits of one pass
    vector: int
    loads: int
    stores: int
    calls: int
    scalar_float: int
    mnemonics: dict[str, int]


def measure(name: str, kernel: Kernel, compiled: Compiled, cpu: str = "") -> Found:
    """Finds the kernel's inner loop and counts it; cpu: of MODELS, for cycles."""
    function = kernel.function.rpartition(".")[2]
    emitted = bool(kernel.loop) and not function.startswith("_")
    candidates = [
        (function not in symbol, -loop.work(kernel.work), loop, around)
        for assembly in assemblies(kernel, compiled)
        for symbol, code, labels in functions(assembly)
        if not symbol.startswith(("_ZN7cpython", "cfunc")) and (not emitted or symbol == function)
        for loop, around in ([(whole(code), [])] if kernel.straight else chains(code, labels))
        if loop.work(kernel.work)
    ]
    if not candidates:
        raise SystemExit(f"{name}: no loop of {kernel.function} has {' or '.join(kernel.work)}")
    candidates.sort(key=lambda candidate: candidate[:2])  # the function itself before what it calls
    *_, inner, around = candidates[kernel.rank]
    work, code = inner.work(kernel.work), inner.code
    outer = list(zip(around, kernel.outer, strict=False))
    per_token = len(code) * kernel.needed / work + sum(len(own) / tokens for own, tokens in outer)
    spent = loop_cycles = None
    if cpu:
        loop_cycles = cycles(code, cpu)
        spent = loop_cycles * kernel.needed / work + sum(cycles(own, cpu) / tokens for own, tokens in outer)
    return Found(
        kernel=name,
        function=kernel.function,
        instructions_per_token=round(per_token, 1),
        cycles_per_token=None if spent is None else round(spent, 1),
        loop=len(code),
        loop_cycles=loop_cycles,
        work=work,
        vector=sum(i.vector for i in code),
        loads=sum(i.mnemonic.startswith("ld") for i in code),
        stores=sum(i.mnemonic.startswith("st") for i in code),
        calls=sum(i.mnemonic in CALLS for i in code),
        scalar_float=sum(i.scalar_float for i in code),
        mnemonics=inner.counts(),
    )


def assemblies(kernel: Kernel, compiled: Compiled) -> list[str]:
    """Of the loop, or of each version of the function that was compiled."""
    if kernel.loop:
        return [item["assembly"] for item in compiled["loops"] if item["name"] == kernel.loop]
    found = [item for item in compiled["functions"] if item["name"] == kernel.function]
    if kernel.parts:
        found = [item for item in found if item["first"] == kernel.parts]
    return [item["assembly"] for item in found if not item["literal"]] or [item["assembly"] for item in found]


def mca() -> str | None:
    return next((path for name in TOOLS if (path := shutil.which(name))), None)


def cycles(code: list[Instruction], cpu: str) -> float:
    """Of one pass, when the code runs over and over."""
    model, decoded = MODELS[cpu]
    if not code:
        return 0.0
    program = mca()
    assert program
    command = [program, "-mtriple=aarch64", f"-mcpu={model}", f"-iterations={ITERATIONS}"]
    if model != "cortex-a57":
        command.append(f"-mattr={FEATURES}")
    text = "\n".join(f"{i.mnemonic} {i.operands}" for i in code)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    if done.returncode or not total:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()[:400]}")
    return round(max(int(total[1]) / ITERATIONS, len(code) / decoded), 2)


def mca_version() -> str:
    """Refuses versions whose model of the N1 is that of the A57."""
    program = mca()
    if program is None:
        raise SystemExit("llvm-mca is missing: on Debian, apt-get install llvm-19")
    text = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"LLVM version (\S+)", text)
    if not version or int(version[1].partition(".")[0]) < 17:
        raise SystemExit(
            f"{program} is of LLVM {version and version[1]}: needed is 17 or newer, for the Neoverse N1"
        )
    return version[1]


def table(found: list[Found]) -> str:
    """A line per kernel."""
    head = f"{'kernel':<26}{'per token':>10}{'cycles':>8}{'loop':>6}{'cycles':>8}{'vector':>8}{'loads':>7}"
    head += f"{'calls':>7}{'scalar':>8}  most"
    rows = [
        f"{f.kernel:<26}{f.instructions_per_token:>10.1f}{f.cycles_per_token or 0:>8.1f}{f.loop:>6}"
        f"{f.loop_cycles or 0:>8.1f}{f.vector:>8}{f.loads:>7}{f.calls:>7}{f.scalar_float:>8}  "
        + ", ".join(f"{n} {name}" for name, n in most(f.mnemonics))
        for f in found
    ]
    return "\n".join([head, *rows])


def most(mnemonics: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(mnemonics.items(), key=lambda item: -item[1])[:5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--assembly", type=pathlib.Path, required=True, metavar="FOLDER", help="of tools/arm_compile.py"
    )
    parser.add_argument("--json", metavar="FILE", help="write all counts")
    arguments = parser.parse_args()
    version, counts = mca_version(), {}
    for cpu in MODELS:
        file = arguments.assembly / f"{cpu}.json"
        if not file.exists():
            print(f"{file} is missing: no counts for {cpu}")
            continue
        compiled = json.loads(file.read_text(encoding="utf-8"))
        found = [measure(name, kernel, compiled, cpu) for name, kernel in KERNELS.items()]
        print(f"{cpu}, cycles of llvm-mca {version} as {MODELS[cpu][0]}\n{table(found)}\n")
        counts[cpu] = [dataclasses.asdict(one) for one in found]
    if not counts:
        raise SystemExit(
            f"{arguments.assembly} has no assembly: python tools/arm_compile.py --out FOLDER makes it"
        )
    if arguments.json:
        facts = {"llvm_mca": version, "models": {cpu: MODELS[cpu][0] for cpu in counts}, "cpus": counts}
        pathlib.Path(arguments.json).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
