"""The rooms of edgekv and the one way through them: a module imports what is below it, and nothing in a circle."""

from __future__ import annotations

import ast
import functools
import graphlib
import pathlib
from collections.abc import Iterator

import grimp

import edgekv

# From top to bottom; rooms of one line know nothing of each other. Names are those of modules, or of packages.
LAYERS = (
    ("edgekv.__main__", "edgekv.papers"),  # entry points name the papers, and nothing of ours imports them
    ("edgekv.cli",),
    ("edgekv.server",),
    ("edgekv.power.board",),
    ("edgekv.eval",),
    ("edgekv.engine",),
    ("edgekv.vision",),
    ("edgekv.weights", "edgekv.kvcache"),
    ("edgekv.codecs",),
    ("edgekv.kernels", "edgekv.checkpoint"),
    ("edgekv.models", "edgekv.text", "edgekv.power"),
    ("edgekv.checks", "edgekv.files", "edgekv.machine", "edgekv.child"),
    ("edgekv.errors", "edgekv.types"),
)
BACKENDS = ("edgekv.kernels.reference", "edgekv.kernels.cpu", "edgekv.kernels.cuda")
PACKAGE = pathlib.Path(edgekv.__file__).parent
ROOT = pathlib.Path(__file__).resolve().parent.parent
PARALLEL = {  # what compiles with parallel=True, and where it is
    "kernels/cpu/loops.py": "parallel_loop",
    "weights/formats.py": "rows_jit",
}
CODE = (".py", ".cu", ".js", ".css", ".html", ".c", ".cpp", ".sh")
ROOM_LINES = {  # at most, of each room of the package, and of the tests and the tools: what was reached
    "(root)": 1_145, "checkpoint": 2_240, "cli": 2_440, "codecs": 2_970, "engine": 4_470, "eval": 850,
    "kernels": 7_750, "kvcache": 1_970, "models": 2_080, "papers": 4_400, "power": 2_110, "server": 3_070,
    "text": 990, "vision": 570, "weights": 1_955, "tests": 21_730, "tools": 4_310,
}  # fmt: skip
PACKAGE_FILES = 197
FACE = "edgekv"  # loads its names when they are used, and nothing in the package imports it


@functools.cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("edgekv", cache_dir=None)


def imports() -> Iterator[tuple[str, str]]:
    """(module, what it imports), also within functions and for types alone."""
    for module in sorted(graph().modules):
        for imported in sorted(graph().find_modules_directly_imported_by(module)):
            yield module, imported


def home(module: str) -> str | None:
    """The room of a module: the longest name in LAYERS that it lies in."""
    rooms = [room for layer in LAYERS for room in layer if module == room or module.startswith(f"{room}.")]
    return max(rooms, key=len, default=None)


def level(room: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if room in layer)


def test_every_module_has_a_room() -> None:
    assert [module for module in graph().modules if home(module) is None] == [FACE]
    empty = {room for layer in LAYERS for room in layer} - {home(module) for module in graph().modules}
    assert empty <= {"edgekv.papers"}  # a copy may be without them


def test_imports_go_down() -> None:
    upward = []
    for module, imported in imports():
        here, there = home(module), home(imported)
        if module == FACE or here == there:
            continue
        assert there is not None, f"{module} imports the face of the package"
        assert here is not None
        if level(there) <= level(here):
            upward.append((module, imported))
    assert upward == []


def test_no_backend_imports_another() -> None:
    def backend(module: str) -> str | None:
        return next((each for each in BACKENDS if f"{module}.".startswith(f"{each}.")), None)

    assert {backend(module) for module in graph().modules} == {*BACKENDS, None}
    crossing = [
        (module, imported)
        for module, imported in imports()
        if backend(module) and backend(imported) not in (backend(module), None)
    ]
    assert crossing == []


def test_no_module_imports_itself_on_a_way_round() -> None:
    modules = {module: graph().find_modules_directly_imported_by(module) for module in graph().modules}
    graphlib.TopologicalSorter(modules).prepare()  # CycleError names the way


def test_rooms_grow_by_decision() -> None:
    """Where a bound is passed, look first for what else may go; lower it where a room has shrunk."""
    sizes = dict.fromkeys(ROOM_LINES, 0)
    files = [
        file for name in ("edgekv", "tests", "tools") for file in (ROOT / name).rglob("*") if file.suffix in CODE
    ]
    for file in files:
        top, *rest = file.relative_to(ROOT).parts
        room = top if top != "edgekv" else rest[0] if len(rest) > 1 else "(root)"
        sizes[room] += len(file.read_text(errors="replace").splitlines())
    assert {room: n for room, n in sizes.items() if n > ROOM_LINES[room]} == {}
    assert sum(ROOT / "edgekv" in file.parents for file in files) <= PACKAGE_FILES


def test_parallel_kernels_are_called_by_run_parallel_alone() -> None:
    """It holds the lock without which two Python threads in Numba's workqueue end the process."""
    trees = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    makers = {(path, name_of(node)) for path, tree in trees.items() for node in tree.body if says_parallel(node)}
    assert makers == set(PARALLEL.items()), "what is compiled with parallel=True is decorated with one of these"
    kernels = {
        (path, node.name)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and {name_of(each) for each in node.decorator_list} & {*PARALLEL.values()}
    }
    assert {name for _, name in kernels} == {
        "PARALLEL_FOR",
        "_quantize",
        "_round_panel",
        "_round_panel_again",
    }
    around = [
        f"{path}:{node.lineno}: {name_of(node)}"
        for path, tree in trees.items()
        for node in used_elsewhere(path, tree, makers | kernels)
    ]
    assert around == []


def says_parallel(node: ast.AST) -> bool:
    """Whether parallel=True is said anywhere in it."""
    keywords = [each for each in ast.walk(node) if isinstance(each, ast.keyword) and each.arg == "parallel"]
    return any(isinstance(each.value, ast.Constant) and each.value.value is True for each in keywords)


def name_of(node: ast.AST) -> str:
    """The last part of what a name, an attribute, a definition or an assignment is called; else nothing."""
    if isinstance(node, ast.Assign):
        return name_of(node.targets[0])
    return str(getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", ""))


def used_elsewhere(path: str, tree: ast.Module, known: set[tuple[str, str]]) -> list[ast.Name | ast.Attribute]:
    """Where known names are read, but neither as decorators nor handed to `run_parallel`, or a part of them."""
    allowed: set[ast.AST] = set()
    names = {name for file, name in known if file == path}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            allowed.update(node.decorator_list)
        elif isinstance(node, ast.Call) and name_of(node.func) == "run_parallel":
            allowed.update(node.args)
            allowed.update(each.value for each in node.args if isinstance(each, ast.Attribute))
        elif isinstance(node, ast.ImportFrom) and node.module:
            file = f"{node.module.removeprefix('edgekv.').replace('.', '/')}.py"
            names.update(each.asname or each.name for each in node.names if (file, each.name) in known)
    of_modules = {name for _, name in known}
    return [
        node
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names)
        or (isinstance(node, ast.Attribute) and node.attr in of_modules)
        if node not in allowed
    ]
