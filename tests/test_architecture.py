"""The rooms of edgekv and the one way through them: a module imports what is below it, and nothing in a circle."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import grimp

# From top to bottom; rooms of one line know nothing of each other. Names are those of modules, or of packages.
LAYERS = (
    ("edgekv.__main__",),
    ("edgekv.cli",),
    ("edgekv.server", "edgekv.board"),
    ("edgekv.chat", "edgekv.quality"),
    ("edgekv.session",),
    ("edgekv.vision",),
    ("edgekv.decoder",),
    ("edgekv.linear", "edgekv.kvcache"),
    ("edgekv.kernels", "edgekv.checkpoint"),
    ("edgekv.models", "edgekv.tokenizer", "edgekv.power"),
    ("edgekv.machine", "edgekv.schema", "edgekv.cache_folder", "edgekv.files", "edgekv.folders"),
    ("edgekv.errors", "edgekv.types", "edgekv.version", "edgekv.numba_cache"),
)
BACKENDS = ("edgekv.kernels.reference", "edgekv.kernels.cpu", "edgekv.kernels.cuda")
KNOW_PAPERS = {  # what joins the papers' part to ours
    "edgekv.kvcache.registry",
    "edgekv.kernels.contract.attention",  # whose Kernels a backend provides whole
}
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
    assert not empty


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


def test_ours_knows_nothing_of_the_papers() -> None:
    def in_papers(module: str) -> bool:
        return "papers" in module.split(".")

    known = {module for module, imported in imports() if in_papers(imported) and not in_papers(module)}
    assert known == KNOW_PAPERS


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
    """Tarjan's components have one module each."""
    number: dict[str, int] = {}
    least: dict[str, int] = {}
    path: list[str] = []
    circles: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = least[module] = len(number)
        path.append(module)
        for imported in graph().find_modules_directly_imported_by(module):
            if imported not in number:
                visit(imported)
            if imported in path:
                least[module] = min(least[module], least[imported])
        if least[module] == number[module]:
            circle = path[path.index(module) :]
            del path[path.index(module) :]
            if len(circle) > 1:
                circles.append(sorted(circle))

    for module in sorted(graph().modules):
        if module not in number:
            visit(module)
    assert circles == []
