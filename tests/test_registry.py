"""How codecs find the loops that read them: their classes name a module for each backend, imported when used."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from helpers import raises
from kernel_cases import CODECS
from test_architecture import imports

from edgekv.errors import CacheError
from edgekv.kernels.cuda.loops import loops_of as cuda_loops
from edgekv.kernels.registry import FUNCTIONS, find_function, find_loops

KERNELS = pathlib.Path(__file__).resolve().parent.parent / "edgekv" / "kernels"

ONLY_PLANES = """
import sys
from edgekv.kernels import numba_kernels
from edgekv.kernels.cpu.loops import loops_of
from edgekv.kvcache.codec_planes import CentredPlanes, InterleavedValues
numba_kernels(1)
loops_of(CentredPlanes), loops_of(InterleavedValues)
print([name for name in sys.modules if name.startswith("edgekv.kernels.cpu.papers.")])
"""


@pytest.mark.parametrize("kind", CODECS)
def test_a_codec_can_be_stored_and_read(kind: str) -> None:
    """Keys have scores, values sums; who has no encoder of its own is encoded by its codec, in several steps."""
    codec = CODECS[kind]
    cpu, plain = find_loops("cpu", codec), find_loops("reference", codec)
    assert cpu.score or cpu.add
    assert plain.decode or plain.scores or plain.sums
    assert (cpu.encode is None) == (plain.encode is None)
    if "cuda" in codec.backends:
        assert (find_loops("cuda", codec).encode is None) == (plain.encode is None)
    else:
        with raises(CacheError, field="kv", match=kind):
            cuda_loops(codec)


@pytest.mark.parametrize("backend", ["reference", "cpu", "cuda"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_few_call_are_found(backend: str, name: str) -> None:
    if backend == "cuda" and not (KERNELS / "cuda" / f"{FUNCTIONS[name].replace('.', '/')}.py").exists():
        # Of policies that work on the host, and of models that run there alone.
        assert FUNCTIONS[name] in ("papers.visual", "recurrence")
    else:
        assert callable(find_function(f"edgekv.kernels.{backend}", name))


def test_only_what_is_used_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", ONLY_PLANES], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_core_knows_nothing_of_the_papers() -> None:
    """Only the list of the contract's functions and that of the schemes import from a folder `papers`."""
    found = {
        module
        for module, imported in imports()
        if module.startswith(("edgekv.kernels.", "edgekv.kvcache."))
        and ".papers" in imported
        and ".papers" not in module
    }
    assert found == {"edgekv.kernels.contract.attention", "edgekv.kvcache.registry"}
