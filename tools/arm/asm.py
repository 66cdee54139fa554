"""The decode kernels' machine code on Arm: inner loops, their instructions and cycles per key or value.

    python tools/arm/asm.py [--cpu cortex-a76 ...] [--json FILE]     with llvm-mca

Each processor's kernels are compiled in a process of its own, by NUMBA_CPU_NAME and with an empty cache. Where
this is no Arm, LLVM is told to make Arm's code, which the llvmlite of PyPI can, and nothing is run.

A kernel's inner loop is the one that multiplies or counts most. Per token of 128 channels and query row counted
are the loop's instructions over what it does in one pass, and those of the loops around it that a token still
feels; what a block of 64 tokens shares is left out. Cycles are those of llvm-mca for ITERATIONS passes of the same
code on one core with everything in its first cache, and at least the instructions over what the processor decodes
in a cycle. All numbers are counts and predictions, and none is a time that was measured.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import heapq
import importlib
import itertools
import json
import os
import pathlib
import pkgutil
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import llvmlite.binding as llvmlite
import numpy as np

ARM, TRIPLE = "aarch64", "aarch64-unknown-linux-gnu"
PACKAGE = "edgekv.kernels.cpu"
SIGNS = "edgekv.papers.h1b.cpu"
# Loops of codecs: module, kind, and those of its `CodecKernels` that are read.
LOOPS = (
    ("edgekv.codecs.f16.cpu", "f16", ("score", "add")),
    ("edgekv.codecs.planes.cpu", "centred_planes", ("score",)),
    ("edgekv.codecs.planes.cpu", "interleaved", ("add",)),
    (SIGNS, "signs", ("score",)),
)


ITERATIONS = 200
# Of each processor: LLVM's model, and instructions decoded a cycle. LLVM has none for the A76 and the A78 and
# would take the A57's: the Neoverse N1 is the A76 with another second cache, which the A78 followed.
MODELS = {"cortex-a76": ("neoverse-n1", 4), "cortex-a57": ("cortex-a57", 3), "cortex-a78ae": ("neoverse-n1", 4)}
TOOLS = ("llvm-mca", *(f"llvm-mca-{version}" for version in range(25, 15, -1)))
FEATURES = "+dotprod,+fullfp16"

Compiled = dict[str, list[dict[str, Any]]]


# Products, or bits counted, tested or spread, that one of these does; "a.b" is the mnemonic on operands of kind b.
WORK = {
    "fmla.4s": 4,
    "fmls.4s": 4,
    "fmul.4s": 4,
    "udot.4s": 16,
    "sdot.4s": 16,
    "umull.8h": 8,
    "umull2.8h": 8,
    "smull.8h": 8,
    "smull2.8h": 8,
    "cnt.16b": 128,
    "shl.4s": 4,
    "tbl.16b": 64,  # signs: of four channels of 16 tokens
    "fcvtl.4s": 4,
    "fcvtl2.4s": 4,
}
CALLS = {"bl", "blr"}
ENDS = {"b", "br", "ret"}  # what follows in the text does not follow
VECTOR = re.compile(r"\bv\d+\.(?:\d+)?[bhsd]\b")
SCALAR_FLOAT = re.compile(r"^[shd]\d+\b")
LABEL = re.compile(r"^([.\w$]+):")
CONDITIONAL = re.compile(r"^(?:b\.\w+|cbn?z|tbn?z)$")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One inner loop to be found and counted.

    function: that holds it, module.name under `edgekv.kernels.cpu`, or the name of a function that
    `edgekv.kernels.cpu.emit` writes into ``loop``, the name of a compiled loop. work: names in WORK, of which the
    loop has most. needed: so many multiplications, or bits, for one token of 128 channels and one query row.
    outer: tokens, times rows, that one pass of each loop around it does, as far as they are counted.
    """

    function: str
    work: tuple[str, ...]
    needed: int
    outer: tuple[float, ...] = ()
    loop: str = ""
    straight: bool = False  # a function without a loop: all of it is counted


DOT = ("udot.4s", "sdot.4s", "umull.8h", "umull2.8h", "smull.8h", "smull2.8h")
FLOAT = ("fmla.4s", "fmls.4s", "fmul.4s")
COUNT = ("cnt.16b",)
TABLE = ("tbl.16b",)
HALF = ("fcvtl.4s", "fcvtl2.4s")
BITS = (1, 2, 3, 4)
F16_SCORE, F16_ADD, COLUMNS, SCAN = "f16.score", "f16.add", "interleaved.add", "centred_planes.score"

KERNELS = {
    "scores f16": Kernel("score_rows_1", FLOAT, 128, (4,), loop=F16_SCORE),
    "scores f16, 4 rows": Kernel("score_rows_4", FLOAT, 128, (16,), loop=F16_SCORE),
    "values f16": Kernel("add_rows_1", FLOAT, 128, loop=F16_ADD),
    "values f16, 4 rows": Kernel("add_rows_4", FLOAT, 128, loop=F16_ADD),
    "h1b scores": Kernel(f"{SIGNS}._score_block", COUNT, 256, (32,)),
    **{
        f"{bits}-bit scan" + ("" if rows == 1 else f", {rows} rows"): Kernel(
            f"score_planes_{rows}", TABLE, 128 * bits, (outer[0] / bits, *outer[1:]), loop=SCAN
        )
        for bits in BITS
        for rows, outer in {1: (64, 64, 64), 2: (128, 128, 128), 4: (128, 128, 256, 256)}.items()
    },
    "centres": Kernel("score_planes_1", DOT, 20, (64,), loop=SCAN),
    "centres, 2 rows": Kernel("score_planes_2", DOT, 20, (128,), loop=SCAN),
    "weights in bytes": Kernel("round_weights_1", HALF, 1, loop=COLUMNS, straight=True),
    **{
        f"{bits}-bit values" + ("" if rows == 1 else f", {rows} rows"): Kernel(
            f"add_columns_{bits}_{rows}",
            DOT,
            256 if bits == 3 else 128,
            (channels * rows * 256 / 128,),
            loop=COLUMNS,
        )
        for bits in BITS
        for rows, channels in {1: 8, 2: 8, 4: 4}.items()  # of 256 tokens in one pass of the outer loop
    },
    "softmax": Kernel("weigh", ("shl.4s",), 1, loop="softmax.weigh"),
    "rope": Kernel("rope._rotate", FLOAT, 256),
}


def module(name: str) -> Any:
    return importlib.import_module(name if "." in name else f"{PACKAGE}.{name}")


def compile_all(only: str = "") -> dict[str, list[dict[str, Any]]]:
    """Assembly of every loop above, and of each version of every function that they call; only: of one module."""
    named = [
        (f"{kind}.{which}", name, module(name).KERNELS[kind], which)
        for name, kind, names in LOOPS
        for which in names
    ]
    loops = [
        {"name": name, "assembly": getattr(which_loops, which).assembly()}
        for name, file, which_loops, which in named
        if only in ("", file)
    ]
    if only in ("", "softmax"):
        loops.append({"name": "softmax.weigh", "assembly": weigh_assembly()})
    if only in ("", "rope"):
        compile_rope()
    return {"loops": loops, "functions": compiled_functions()}


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


def compiled_functions() -> list[dict[str, Any]]:
    """Name and assembly of every compiled version of every function."""
    found = []
    infos = pkgutil.walk_packages(importlib.import_module(PACKAGE).__path__, f"{PACKAGE}.")
    for file in (*(info.name for info in infos), SIGNS):
        for name, function in vars(importlib.import_module(file)).items():
            if getattr(function, "__module__", None) == file and hasattr(function, "inspect_asm"):
                known = f"{file.removeprefix(f'{PACKAGE}.')}.{name}"
                found += [
                    {"name": known, "literal": "Literal" in str(each), "assembly": function.inspect_asm(each)}
                    for each in function.signatures
                ]
    return found


def compile_for(cpu: str, only: str = "") -> dict[str, list[dict[str, Any]]]:
    """`compile_all` in a process of its own, which compiles for `cpu`."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CACHE_DIR": cache}
        if platform.machine() != ARM:
            environment |= {"NUMBA_CPU_FEATURES": "+neon"}  # not this machine's; more comes with the name
        command = [sys.executable, __file__, "--this", only]
        result = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    compiled: dict[str, list[dict[str, Any]]] = json.loads(result.stdout)
    return compiled


@dataclasses.dataclass(frozen=True)
class Instruction:
    mnemonic: str
    operands: str

    @property
    def vector(self) -> bool:
        return bool(VECTOR.search(self.operands))

    @property
    def name(self) -> str:
        """The mnemonic with the kind of the first vector operand: fmla.4s."""
        kind = VECTOR.search(self.operands)
        return f"{self.mnemonic}.{kind[0].partition('.')[2]}" if kind else self.mnemonic

    @property
    def scalar_float(self) -> bool:
        """Arithmetic on one float: no load, store, move or reduction of a vector."""
        computes = self.mnemonic.startswith(("f", "scvtf", "ucvtf")) and self.mnemonic != "fmov"
        return computes and not self.vector and bool(SCALAR_FLOAT.match(self.operands))


@dataclasses.dataclass(frozen=True)
class Loop:
    """A natural loop: its blocks, of which ``head`` is the first, and its instructions in the text's order."""

    head: int
    blocks: frozenset[int]
    code: list[Instruction]

    def counts(self) -> dict[str, int]:
        return dict(sorted(collections.Counter(i.name for i in self.code).items()))

    def work(self, names: tuple[str, ...]) -> int:
        counts = self.counts()
        return sum(WORK[name] * counts.get(name, 0) for name in names)


def functions(assembly: str) -> Iterator[tuple[str, list[Instruction], dict[str, int]]]:
    """Name, instructions and labels (the instruction behind each) of every function in a module's assembly."""
    name: str = ""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in assembly.splitlines():
        text = line.partition("//")[0].rstrip()
        if label := LABEL.match(text):
            if not label[1].startswith("."):
                if code:
                    yield name, code, labels
                name, code, labels = label[1], [], {}
            labels[label[1]] = len(code)
        elif text.startswith("\t") and not text.strip().startswith("."):
            mnemonic, _, operands = text.strip().partition("\t")
            code.append(Instruction(mnemonic, operands))
    if code:
        yield name, code, labels


def blocks(code: list[Instruction], labels: dict[str, int]) -> tuple[list[list[Instruction]], list[list[int]]]:
    """Basic blocks, and those that may follow each."""
    jumps = [i.mnemonic in ENDS or bool(CONDITIONAL.match(i.mnemonic)) for i in code]
    starts = sorted({0, *labels.values(), *(place + 1 for place, jump in enumerate(jumps) if jump)} - {len(code)})
    parts = [code[a:b] for a, b in itertools.pairwise([*starts, len(code)])]
    at = {start: index for index, start in enumerate(starts)}
    following: list[list[int]] = []
    for index, part in enumerate(parts):
        last = part[-1]
        target = labels.get(last.operands.split(",")[-1].strip())
        jump = last.mnemonic in ENDS or bool(CONDITIONAL.match(last.mnemonic))
        after = [at[target]] if jump and target in at else []
        if last.mnemonic not in ENDS and index + 1 < len(parts):
            after.append(index + 1)
        following.append(after)
    return parts, following


def dominators(following: list[list[int]]) -> list[set[int]]:
    """Of each block, the blocks that every way from the first to it passes; all blocks where there is none."""
    every = set(range(len(following)))
    before: list[list[int]] = [[] for _ in following]
    for index, after in enumerate(following):
        for target in after:
            before[target].append(index)
    result = [{0}, *(set(every) for _ in following[1:])]
    changed = True
    while changed:
        changed = False
        for index in range(1, len(following)):
            new = {index} | (set.intersection(*(result[i] for i in before[index])) if before[index] else every)
            if new != result[index]:
                result[index], changed = new, True
    return result


def loops(parts: list[list[Instruction]], following: list[list[int]]) -> list[Loop]:
    """Natural loops, those of the same first block as one."""
    over = dominators(following)
    bodies: dict[int, set[int]] = {}
    for index, after in enumerate(following):
        for head in after:
            if head in over[index]:
                body = bodies.setdefault(head, {head})
                rest = [index]
                while rest:
                    block = rest.pop()
                    if block not in body:
                        body.add(block)
                        rest += [i for i, targets in enumerate(following) if block in targets]
    return [
        Loop(head, frozenset(body), [i for block in sorted(body) for i in parts[block]])
        for head, body in bodies.items()
    ]


def chains(code: list[Instruction], labels: dict[str, int]) -> Iterator[tuple[Loop, list[list[Instruction]]]]:
    """Every innermost loop, and from the inside out what one pass of each loop around it adds.

    The fewest instructions: what a kernel does for odd sizes lies beside the shortest way around.
    """
    parts, following = blocks(code, labels)
    found = loops(parts, following)
    for loop in found:
        if not any(other.blocks < loop.blocks for other in found):
            around = sorted((x for x in found if loop.blocks < x.blocks), key=lambda x: len(x.blocks))
            yield (
                loop,
                [
                    shortest_pass(x, inner, found, parts, following)
                    for inner, x in zip([loop, *around], around, strict=False)
                ],
            )


def shortest_pass(
    loop: Loop, inner: Loop, found: list[Loop], parts: list[list[Instruction]], following: list[list[int]]
) -> list[Instruction]:
    """Those on the shortest way around that goes through ``inner``, without those of the loops inside."""
    inside = frozenset[int]().union(*(other.blocks for other in found if other.blocks < loop.blocks))

    def way(start: int, end: int) -> list[int]:
        """The blocks from start on, up to but without end."""
        queue: list[tuple[int, list[int]]] = [(0, [start])]
        done = set[int]()
        while queue:
            so_far, path = heapq.heappop(queue)
            block = path[-1]
            if block == end and (so_far or start != end):
                return path[:-1]
            if block not in done:
                done.add(block)
                cost = so_far + (0 if block in inside else len(parts[block]))
                for target in set(following[block]) & loop.blocks:
                    heapq.heappush(queue, (cost, [*path, target]))
        return []

    path = [*way(loop.head, inner.head), *way(inner.head, loop.head)]
    return [i for block in path if block not in inside for i in parts[block]]


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
        for loop, around in ([(Loop(0, frozenset({0}), code), [])] if kernel.straight else chains(code, labels))
        if loop.work(kernel.work)
    ]
    if not candidates:
        raise SystemExit(f"{name}: no loop of {kernel.function} has {' or '.join(kernel.work)}")
    candidates.sort(key=lambda candidate: candidate[:2])  # the function itself before what it calls
    *_, inner, around = candidates[0]
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
    """Compiles for each processor, counts, and prints a table of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="append", choices=MODELS, help="by default all")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all counts")
    parser.add_argument("--this", metavar="MODULE", help=argparse.SUPPRESS)  # assembly, by `compile_for`
    arguments = parser.parse_args()
    if arguments.this is not None:
        if platform.machine() != ARM:
            make_arm_code()
        print(json.dumps(compile_all(arguments.this)))
        return
    version, counts = mca_version(), {}
    for cpu in arguments.cpu or MODELS:
        compiled = compile_for(cpu)
        found = [measure(name, kernel, compiled, cpu) for name, kernel in KERNELS.items()]
        print(f"{cpu}, cycles of llvm-mca {version} as {MODELS[cpu][0]}\n{table(found)}\n")
        counts[cpu] = [dataclasses.asdict(one) for one in found]
    if arguments.json:
        facts = {"llvm_mca": version, "models": {cpu: MODELS[cpu][0] for cpu in counts}, "cpus": counts}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
