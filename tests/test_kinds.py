"""The registry of codecs' kinds: each has a file of the same name in every backend, imported when it is used."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from helpers import raises
from test_architecture import imports

from edgekv.errors import CacheError
from edgekv.kernels.cpu.loops import loops_of as cpu_loops
from edgekv.kernels.cuda.loops import loops_of as cuda_loops
from edgekv.kernels.kinds import FUNCTIONS, KINDS, NO_CUDA, find_function, find_loops, reads
from edgekv.kernels.reference.loops import loops_of as reference_loops

HOST_BACKENDS = ("edgekv.kernels.reference", "edgekv.kernels.cpu")
CUDA = "edgekv.kernels.cuda"
KERNELS = pathlib.Path(__file__).resolve().parent.parent / "edgekv" / "kernels"

ONLY_PLANES = """
import sys
from edgekv.kernels import numba_kernels
from edgekv.kernels.cpu.loops import loops_of
numba_kernels(1)
loops_of("centred_planes"), loops_of("interleaved")
print([name for name in sys.modules if name.startswith("edgekv.kernels.cpu.papers.")])
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_a_file_of_the_same_name_in_each_backend(kind: str) -> None:
    for backend in HOST_BACKENDS:
        assert reads(backend, kind)
        assert find_loops(backend, kind)
    assert reads(CUDA, kind) == (kind not in NO_CUDA)
    if kind not in NO_CUDA:
        assert find_loops(CUDA, kind)


def test_a_file_has_loops_of_the_kinds_that_name_it_and_of_no_others() -> None:
    for backend in (*HOST_BACKENDS, CUDA):
        for module in {*KINDS.values()}:
            kinds = [kind for kind, name in KINDS.items() if name == module and reads(backend, kind)]
            if kinds:
                assert sorted(sys.modules[f"{backend}.{module}"].LOOPS) == sorted(kinds)


@pytest.mark.parametrize("backend", [*HOST_BACKENDS, CUDA])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_few_call_are_found(backend: str, name: str) -> None:
    if backend == CUDA and not (KERNELS / "cuda" / f"{FUNCTIONS[name].replace('.', '/')}.py").exists():
        # Of policies that work on the host, and of models that run there alone.
        assert FUNCTIONS[name] in ("papers.evict", "papers.visual", "recurrence")
    else:
        assert callable(find_function(backend, name))


def test_a_cpu_kind_can_be_stored_and_read() -> None:
    """Keys have scores, values sums; who has no encoder of its own is encoded by its codec, in several steps."""
    for kind in KINDS.keys() - {"decoded"}:
        loops = cpu_loops(kind)
        assert loops.score or loops.add or loops.second_stage
        plain = reference_loops(kind)
        assert plain.decode or plain.scores or plain.sums or plain.second_stage
        assert (loops.encode is None) == (plain.encode is None)
        if kind not in NO_CUDA:
            assert (cuda_loops(kind).encode is None) == (plain.encode is None)


def test_an_unknown_kind_is_refused() -> None:
    for loops_of in (cpu_loops, reference_loops, cuda_loops):
        with raises(CacheError, field="kv", match="7-bit"):
            loops_of("7-bit")


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
