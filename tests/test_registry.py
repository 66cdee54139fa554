"""How codecs find the loops that read them: their classes name a module for each backend, imported when used."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers import raises
from kernel_cases import CODECS

from edgekv.errors import CacheError
from edgekv.kernels.cuda.kernels import kernels_of as cuda_loops
from edgekv.kernels.interface import find_codec_kernels

ONLY_PLANES = """
import sys
from edgekv.kernels import numba_kernels
from edgekv.kernels.cpu.loops import kernels_of
from edgekv.codecs.planes import CentredPlanes, InterleavedValues
numba_kernels(1)
kernels_of(CentredPlanes), kernels_of(InterleavedValues)
print([name for name in sys.modules if name.startswith("edgekv.papers")])
"""


@pytest.mark.parametrize("kind", CODECS)
def test_a_codec_can_be_stored_and_read(kind: str) -> None:
    """Keys have scores, values sums; who has no encoder of its own is encoded by its codec, in several steps."""
    codec = CODECS[kind]
    cpu = find_codec_kernels("cpu", codec)
    assert cpu is None or cpu.score or cpu.add
    if "cuda" in codec.backends:
        loops = find_codec_kernels("cuda", codec)
        assert loops.keys or loops.values
    else:
        with raises(CacheError, field="kv", match=kind):
            cuda_loops(codec)


def test_only_what_is_used_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", ONLY_PLANES], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
