"""What `import edgekv` gives: the public names, lazily, and a version wherever it is used from."""

import ast
import pathlib
import subprocess
import sys
from importlib import metadata

import pytest

import edgekv
from edgekv import errors
from edgekv.machine import find_version

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_dir_lists_the_public_names() -> None:
    assert dir(edgekv) == sorted(edgekv.__all__)
    with pytest.raises(AttributeError, match="no attribute 'sessions'"):
        _ = edgekv.sessions


def test_type_checkers_see_the_same_names() -> None:
    """What is imported for them alone, from the same modules."""
    tree = ast.parse(pathlib.Path(edgekv.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = [
        (alias.asname, f"{node.module}.{alias.name}")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert len(seen) == len(block.body)
    assert dict(seen) == {name: f"edgekv.{home}.{name}" for name, home in edgekv._HOMES.items()}


def test_every_error_is_public() -> None:
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert {name for name in kinds if name.endswith("Error")} <= set(edgekv.__all__)


@pytest.mark.parametrize("name", sorted(set(edgekv._HOMES)))
def test_a_name_is_the_one_of_its_module(name: str) -> None:
    value = getattr(edgekv, name)
    if isinstance(value, type):
        assert value.__module__ == f"edgekv.{edgekv._HOMES[name]}"
    elif name == "register":
        assert value.__module__ == "edgekv.kvcache.registry"


def test_a_checkout_that_was_never_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none)
    assert f'version = "{find_version()}"' in (ROOT / "pyproject.toml").read_text()
    assert find_version(tmp_path / "pyproject.toml") == "unknown"
    code = (
        "import importlib.metadata as m\n"
        "def none(name): raise m.PackageNotFoundError(name)\n"
        "m.version = none\n"
        "import edgekv; print(edgekv.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == find_version()


def test_importing_loads_nothing_large() -> None:
    """Neither Numba nor onnxruntime, nor NumPy, before a name that needs it is used."""
    code = "import sys, edgekv; sys.exit(any(m in sys.modules for m in ('numba', 'onnxruntime', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
