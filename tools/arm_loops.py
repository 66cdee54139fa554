"""Loops in Arm assembly as LLVM prints it: where they are, and what their instructions do."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import re
from collections.abc import Iterator

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
    "cmtst.4s": 4,
    "cmeq.4s": 4,
    "ushl.16b": 16,
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


def whole(code: list[Instruction]) -> Loop:
    """All of a function, for what has no loop."""
    return Loop(0, frozenset({0}), code)


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
