"""Machine code of the decode kernels: the reader of assembly on any machine, the code itself on an Arm."""

import platform

import arm_asm
import arm_compile
import arm_kernels
import arm_page
import pytest
from arm_loops import Instruction, chains, functions

# Two nested loops, and a way out of the inner one that lies behind it in the text but in no loop.
ASSEMBLY = """
	.text
	.globl	outer
outer:
	.cfi_startproc
	mov	x8, xzr
.LBB0_1:                                // =>This Loop Header: Depth=1
	movi	v0.2d, #0000000000000000
	mov	x9, x2
.LBB0_2:
	ldr	q1, [x0], #16
	ldr	q2, [x1], #16
	cbz	x3, .LBB0_5
	fmla	v0.4s, v1.4s, v2.4s
	fmla	v0.4s, v2.4s, v2.4s
	subs	x9, x9, #1
	b.ne	.LBB0_2
	faddp	v0.4s, v0.4s, v0.4s
	faddp	s0, v0.2s
	fadd	s0, s0, s3
	str	s0, [x4, x8, lsl #2]
	add	x8, x8, #1
	cmp	x8, x5
	b.lo	.LBB0_1
	ret
.LBB0_5:
	bl	failed
	ret
.Lfunc_end0:
	.size	outer, .Lfunc_end0-outer
flat:
	fmul	s0, s0, s1
	ret
"""

F16, LEVELS = ({"fmla.4s", "fcvtl.4s"},), ({"fmla.4s", "ucvtf.4s"},)
PRODUCTS = ({"udot.4s"}, {"umull.8h", "uadalp.4s"})
KINDS = {
    "scores f16": F16,
    "values f16": F16,
    "scores 8-bit": LEVELS,
    "values 8-bit": LEVELS,
    "scores 4-bit": LEVELS,
    "values 4-bit": LEVELS,
    "kivi scores": LEVELS,
    "kivi values": LEVELS,
    "h1b scores": ({"eor.16b", "cnt.16b", "udot.4s"}, {"eor.16b", "cnt.16b", "uadalp.8h"}),
    "h1b values": PRODUCTS,
    **{f"{bits}-bit scan": ({"tbl.16b", "ushr.16b"},) for bits in arm_kernels.BITS},
    "centres": ({"sdot.4s"}, {"smull.8h", "sadalp.4s"}),
    "weights in bytes": ({"fcvtl.4s", "fmul.4s"},),
    **{f"{bits}-bit values": PRODUCTS for bits in arm_kernels.BITS},
    "bitplane key unpacked": ({"tbl.16b", "ushl.16b", "and.16b"},),
    "bitplane key": ({"sdot.4s"}, {"smull.8h", "sadalp.4s"}),
    "bitplane value": ({"fadd.4s"},),
    "fier scores": ({"fadd.4s"},),
    "fier key": F16,
    "fier value": F16,
    "softmax": ({"fmla.4s", "shl.4s"},),
    "rope": ({"fmul.4s"},),
}
NEEDED = {kernel: KINDS[kernel.partition(",")[0]] for kernel in arm_kernels.KERNELS}

# A token's weight, doubled; and what a block's rounded weights are divided by and sum up to.
SCALARS = {"bitplane value, 4 planes": 3, "bitplane value, 2 planes": 1, "weights in bytes": 6}


def test_functions_are_told_apart() -> None:
    found = {name: len(code) for name, code, _ in functions(ASSEMBLY)}
    assert found == {"outer": 20, "flat": 2}


def test_loops_are_those_of_the_control_flow() -> None:
    _, code, labels = next(functions(ASSEMBLY))
    ((inner, around),) = chains(code, labels)
    assert [i.mnemonic for i in inner.code] == ["ldr", "ldr", "cbz", "fmla", "fmla", "subs", "b.ne"]
    assert inner.counts()["fmla.4s"] == 2
    assert inner.work(("fmla.4s",)) == 8
    assert [len(own) for own in around] == [9]  # two before the inner loop and seven behind it


def test_what_odd_sizes_take_is_not_counted_around_a_loop() -> None:
    tail = "\tcbz\tx6, .LBB0_4\n\tfadd\ts0, s0, s3\n\tfadd\ts0, s0, s3\n.LBB0_4:\n\tstr\ts0, [x4, x8, lsl #2]"
    _, code, labels = next(functions(ASSEMBLY.replace("\tstr\ts0, [x4, x8, lsl #2]", tail)))
    ((_, around),) = chains(code, labels)
    assert [len(own) for own in around] == [10]


def test_a_function_without_a_loop_has_none() -> None:
    _, code, labels = list(functions(ASSEMBLY))[1]
    assert list(chains(code, labels)) == []


@pytest.mark.parametrize(
    ("text", "name", "vector", "scalar_float"),
    [
        ("fmla\tv0.4s, v1.4s, v2.s[0]", "fmla.4s", True, False),
        ("udot\tv0.4s, v1.16b, v2.16b", "udot.4s", True, False),
        ("fmadd\ts0, s1, s2, s0", "fmadd", False, True),
        ("ucvtf\td0, x3", "ucvtf", False, True),
        ("faddp\ts0, v0.2s", "faddp.2s", True, False),
        ("fmov\ts0, w1", "fmov", False, False),
        ("ldr\tq0, [x1]", "ldr", False, False),
        ("ldr\ts0, [x1]", "ldr", False, False),
    ],
)
def test_instructions_are_of_a_kind(text: str, name: str, vector: bool, scalar_float: bool) -> None:
    instruction = Instruction(*text.split("\t"))
    assert (instruction.name, instruction.vector, instruction.scalar_float) == (name, vector, scalar_float)


def test_the_fewest_instructions_of_a_pass_are_given_in_order() -> None:
    _, code, labels = next(functions(ASSEMBLY))
    ((_, (own,)),) = chains(code, labels)
    assert [i.mnemonic for i in own] == ["movi", "mov", "faddp", "faddp", "fadd", "str", "add", "cmp", "b.lo"]


KERNEL = arm_kernels.Kernel("any.outer", arm_kernels.FLOAT, 128, (4,))
COMPILED = {"loops": [], "functions": [{"name": "any.outer", "first": 0, "literal": False, "assembly": ASSEMBLY}]}


def test_a_token_feels_the_inner_loop_and_its_share_of_those_around() -> None:
    found = arm_asm.measure("any", KERNEL, COMPILED)
    assert (found.loop, found.work, found.cycles_per_token) == (7, 8, None)
    assert found.instructions_per_token == pytest.approx(7 * 128 / 8 + 9 / 4, abs=0.05)


def test_cycles_are_those_of_a_chain_of_sums() -> None:
    if arm_asm.mca() is None:
        pytest.skip("needs llvm-mca")
    try:
        arm_asm.mca_version()
    except SystemExit as error:
        pytest.skip(str(error))
    chain = [Instruction("fadd", "v0.4s, v0.4s, v1.4s")] * 10
    assert arm_asm.cycles(chain, "cortex-a76") == pytest.approx(20, abs=1)  # two cycles each
    free = [Instruction("fadd", f"v{i}.4s, v30.4s, v31.4s") for i in range(10)]
    assert arm_asm.cycles(free, "cortex-a76") == pytest.approx(5, abs=0.5)  # on two units
    found = arm_asm.measure("any", KERNEL, COMPILED, "cortex-a76")
    assert found.loop_cycles is not None
    assert found.cycles_per_token is not None
    assert 0 < found.loop_cycles * 128 / 8 < found.cycles_per_token


@pytest.fixture(scope="module", params=arm_compile.CPUS)
def found(request: pytest.FixtureRequest) -> dict[str, arm_asm.Found]:
    if platform.machine() != "aarch64":
        pytest.skip("needs an Arm, or tools/arm_emulated.sh")
    compiled = arm_compile.compile_for(request.param)
    return {name: arm_asm.measure(name, kernel, compiled) for name, kernel in arm_kernels.KERNELS.items()}


@pytest.mark.parametrize("kernel", NEEDED)
def test_inner_loops_are_vectors_without_calls(found: dict[str, arm_asm.Found], kernel: str) -> None:
    loop = found[kernel]
    assert any(names <= set(loop.mnemonics) for names in NEEDED[kernel]), loop.mnemonics
    assert loop.calls == 0
    assert loop.scalar_float <= SCALARS.get(kernel, 0), loop.mnemonics
    assert loop.vector >= loop.loop / 4  # besides addresses, loads and branches


def test_scores_are_looked_up_on_an_arm() -> None:
    """Compiled here, for a Cortex-A76: LLVM makes the code of other processors, too."""
    compiled = arm_compile.compile_for("cortex-a76", "planes")
    for kernel in ("1-bit scan", "2-bit scan, 2 rows", "centres"):
        loop = arm_asm.measure(kernel, arm_kernels.KERNELS[kernel], compiled)
        assert any(names <= set(loop.mnemonics) for names in NEEDED[kernel]), loop.mnemonics
        assert (loop.calls, loop.scalar_float) == (0, 0)


def test_rotation_is_vectors_on_an_arm() -> None:
    """What Python calls as a kernel, not as a loop of a codec, is compiled here, too."""
    loop = arm_asm.measure("rope", arm_kernels.KERNELS["rope"], arm_compile.compile_for("cortex-a76", "rope"))
    assert "fmul.4s" in loop.mnemonics
    assert (loop.calls, loop.scalar_float) == (0, 0)


@pytest.fixture(scope="module")
def values() -> dict[str, arm_asm.Found]:
    """Compiled here, too."""
    compiled = arm_compile.compile_for("cortex-a76", "interleaved_values")
    kernels = {name: kernel for name, kernel in arm_kernels.KERNELS.items() if "bit values" in name}
    return {name: arm_asm.measure(name, kernel, compiled) for name, kernel in kernels.items()}


@pytest.mark.parametrize("bits", arm_kernels.BITS)
@pytest.mark.parametrize("rows", ["", ", 2 rows", ", 4 rows"])
def test_values_take_weights_from_lanes(values: dict[str, arm_asm.Found], bits: int, rows: str) -> None:
    loop = values[f"{bits}-bit values{rows}"]
    assert (loop.calls, loop.scalar_float) == (0, 0)
    assert "dup.4s" not in loop.mnemonics
    assert "scvtf.4s" not in loop.mnemonics


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_vectors_do_little_beside_products_of_values(values: dict[str, arm_asm.Found], bits: int) -> None:
    """16 products for each of four rows; two instructions make numbers of each row's sums and add them."""
    loop = values[f"{bits}-bit values, 4 rows"]
    unpacking = 2 * bits  # a byte's highest code
    assert loop.mnemonics["udot.4s"] == 64
    assert loop.vector <= 64 + 2 * 4 + unpacking


def test_the_page_is_that_of_the_data() -> None:
    page = arm_page.PAGE.read_text(encoding="utf-8")
    assert [page.count(f"<!-- /{name} -->") for name in arm_page.TABLES] == [1, 2, 1]
    assert arm_page.updated(page) == page
