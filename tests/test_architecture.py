"""The rooms of edgekv and the one way through them: a module imports what is below it, and nothing in a circle."""

from __future__ import annotations

import functools
import graphlib
import pathlib
from collections.abc import Iterator

import grimp

import edgekv

# From top to bottom; rooms of one line know nothing of each other. Names are those of modules, or of packages.
LAYERS = (
    ("edgekv.__main__", "edgekv.papers", "edgekv.plugin"),  # entry points name papers, nothing of ours imports any
    ("edgekv.cli",),
    ("edgekv.server",),
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
CODE = (".py", ".cu", ".js", ".css", ".html", ".c", ".cpp", ".sh")
ROOM_LINES = {  # at most, of each room of the package, and of the tests and the tools: what was reached
    "(root)": 1_245, "checkpoint": 2_400, "cli": 2_959, "codecs": 2_903, "engine": 5_517, "eval": 1_325,
    "kernels": 8_252, "kvcache": 1_966, "models": 2_099, "papers": 4_291, "power": 1_381, "server": 2_914,
    "text": 1_002, "vision": 535, "weights": 2_366, "tests": 22_000, "tools": 4_447,
}  # fmt: skip
PACKAGE_FILES = 206
FACE = "edgekv"  # loads its names when they are used, and nothing in the package imports it


@functools.cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("edgekv", cache_dir=None)


def imports() -> Iterator[tuple[str, str]]:
    """Yields (module, what it imports), also within functions and for types alone."""
    for module in sorted(graph().modules):
        for imported in sorted(graph().find_modules_directly_imported_by(module)):
            yield module, imported


def home(module: str) -> str | None:
    """Returns the room of a module: the longest name in LAYERS that it lies in."""
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
    """Look first for what else may go where a bound is passed; lower it where a room has shrunk."""
    sizes = dict.fromkeys(ROOM_LINES, 0)
    everything = (file for name in ("edgekv", "tests", "tools") for file in (ROOT / name).rglob("*"))
    files = [file for file in everything if file.suffix in CODE and "vendor" not in file.parts]
    for file in files:
        top, *rest = file.relative_to(ROOT).parts
        room = top if top != "edgekv" else rest[0] if len(rest) > 1 else "(root)"
        sizes[room] += len(file.read_text(errors="replace").splitlines())
    assert {room: n for room, n in sizes.items() if n > ROOM_LINES[room]} == {}
    assert sum(ROOT / "edgekv" in file.parents for file in files) <= PACKAGE_FILES


def test_parallel_kernels_are_called_by_run_parallel_alone() -> None:
    """`run_parallel` holds the lock without which two Python threads in Numba's workqueue end the process."""
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert [path for path, text in texts.items() if "parallel=True" in text] == ["kernels/cpu/loops.py"]
    assert [path for path, text in texts.items() if "@parallel_loop" in text] == ["kernels/cpu/launch.py"]
    assert {path for path, text in texts.items() if "parallel_for" in text} == {"kernels/cpu/launch.py"}
    assert texts["kernels/cpu/launch.py"].count("parallel_for") == 2
    assert "threads.run_parallel(parallel_for.call, " in texts["kernels/cpu/launch.py"]
