"""CUDA programs compile for every GPU generation that edgekv names, without a GPU and without spills."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import os
import pathlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from kernel_cases import blank
from test_cuda_attend import PAIRS

import edgekv
from edgekv.codecs.planes.cuda import encode_program
from edgekv.kernels.cuda.driver import FOLDER, Program
from edgekv.kernels.cuda.kernels import ENCODE, attend_program, kernels_of, range_program, read_keys, read_values
from edgekv.kernels.cuda.matvec import MAX_CHUNKS, linear_program, packed_program, rotated_program
from edgekv.kernels.weight_codes import CODEBOOKS
from edgekv.papers.fier import SignIndex
from edgekv.papers.h1b import cuda as signs
from edgekv.papers.int4 import cuda as int4
from edgekv.papers.kvcomp import cuda as huffman

PACKAGE = pathlib.Path(edgekv.__file__).parent
LEAST = {"prefill_attention": 75, "tiled_linear": 80, "tiled": 80}  # of what is only launched from a generation on
ALL = {53: "Jetson Nano", 62: "TX2", 72: "Xavier", 75: "Turing", 87: "Orin", 90: "H100, H200"}
REPORT = re.compile(r"Function properties for (\w+)\n.*?(\d+) bytes stack frame, (\d+) bytes spill stores", re.S)


def codecs(pair: str, head_dim: int = 128) -> list[Any]:
    return [blank(codec) for codec in PAIRS[pair](2, 192, head_dim)]


@functools.cache
def programs() -> dict[Program, str]:
    """Returns what decoding launches, for heads of 128 channels, and its names."""
    packed = (4, 32, False), (4, 128, False), (8, 32, False), *((bits, 128, True) for bits in CODEBOOKS)
    found = {
        **{linear_program(bits, 128): f"linear, {bits} bits" for bits in (4, 8, 16, 32)},
        **{linear_program(bits, 128, True): f"linear, q{bits}" for bits in CODEBOOKS},
        **{rotated_program(bits): f"rotated, q{bits}" for bits in CODEBOOKS},
        **{packed_program(*each, MAX_CHUNKS[each[0] // 2 * 2], 8): f"tiled_linear, {each}" for each in packed},
        **{Program(("prefill_attention",), (("WIDTH", n), ("HEAD_DIM", n))): "prompt" for n in (64, 128, 256)},
        Program(("layers",)): "layers",
        **{Program(("exact",), (("WIDTH", 128),), exact=True): "rotations", ENCODE: "encoders"},
        **{module.ENCODE: module.__name__ for module in (huffman, int4, signs)},
        encode_program(2): "encoders of planes",
        range_program("KEYS", read_keys(blank(SignIndex(2, 192, 128, 32, "mad"))), 1): "scores of FIER's index",
    }
    for pair in PAIRS:
        keys, values = (read(codec) for read, codec in zip((read_keys, read_values), codecs(pair), strict=True))
        found[range_program("KEYS", keys, 4)] = f"scores of {pair}"
        found[range_program("VALUES", values, 4)] = f"sums of {pair}"
        if keys.in_one_launch and values.in_one_launch:
            found |= {attend_program(keys, values, n, True): f"attend, {pair}, {n} rows" for n in (1, 4)}
    tiled = (1, 128, "signs"), (1, 128, "2-bit keys, 3-bit values"), (1, 64, "signs"), (4, 128, "signs")
    for rows, width, pair in (*tiled, (4, 128, "4- and 2-bit keys of heads")):
        keys, values = codecs(pair, width)
        fused = kernels_of(keys).fused(SimpleNamespace(has_integer_mma=True), rows, keys, values)
        program = attend_program(read_keys(keys), read_values(values), rows, True, fused)
        found[program] = f"tiled, {pair}, {rows} rows"
    return found


class Nvrtc:
    """The runtime compiler's C functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    @classmethod
    def find(cls) -> Nvrtc | None:
        """Finds it in the wheel nvidia-cuda-nvrtc (-cu12), or where the system's loader looks."""
        places = find_spec("nvidia") and find_spec("nvidia").submodule_search_locations
        found = [path for place in places or () for path in pathlib.Path(place).rglob("libnvrtc.so*")]
        system = ctypes.util.find_library("nvrtc")
        for path in [*map(str, sorted(found)), *([system] if system else [])]:
            try:
                return cls(ctypes.CDLL(path))
            except OSError:  # noqa: PERF203
                continue
        return None

    def architectures(self) -> list[int]:
        count = ctypes.c_int()
        self.library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self.library.nvrtcGetSupportedArchs(numbers)
        return list(numbers)

    def compile(self, source: str, options: tuple[str, ...]) -> tuple[bool, str]:
        """Returns whether it compiles, and the log."""
        handle, size = ctypes.c_void_p(), ctypes.c_size_t()
        self.library.nvrtcCreateProgram(ctypes.byref(handle), source.encode(), b"edgekv.cu", 0, None, None)
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = self.library.nvrtcCompileProgram(handle, len(options), arguments)
        self.library.nvrtcGetProgramLogSize(handle, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self.library.nvrtcGetProgramLog(handle, log)
        self.library.nvrtcDestroyProgram(ctypes.byref(handle))
        return status == 0, log.value.decode()


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    found = Nvrtc.find()
    if found is None:
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc-cu12 (12.x knows all generations down to sm_53)")
    return found


def test_every_source_file_is_compiled_here() -> None:
    compiled = {FOLDER / file for each in programs() for file in each.files} | {FOLDER / "common", FOLDER / "ptx"}
    sources = PACKAGE.rglob("*.cu")
    assert compiled == {path.with_suffix("") for path in sources}


def jobs() -> Iterator[tuple[Program, int]]:
    """Yields each program for each architecture that launches it; outside of CI each file once.

    Those are compiled for the oldest architecture or for Orin, in turn.
    """
    files: set[str] = set()
    for i, each in enumerate(reversed(programs())):
        least = max(LEAST.get(pathlib.Path(file).name, 0) for file in each.files)
        if os.environ.get("EDGEKV_ALL_ARCHITECTURES"):
            yield from ((each, architecture) for architecture in ALL if architecture >= least)
        elif not files.issuperset(each.files):
            files.update(each.files)
            yield each, 87 if least or i % 2 else 53


def test_programs_compile_without_spills(nvrtc: Nvrtc) -> None:
    known = set(nvrtc.architectures())  # later ones compile for fewer
    chosen = [(each, architecture) for each, architecture in jobs() if architecture in known]

    def compiled(job: tuple[Program, int]) -> tuple[bool, str]:
        as_cupy_does = "-ftz=true", f"-arch=sm_{job[1]}", "--ptxas-options=-v"
        return nvrtc.compile(job[0].source(), (*job[0].options(), *as_cupy_does))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = pool.map(compiled, chosen)
    for (program, architecture), (done, log) in zip(chosen, results, strict=True):
        name = f"{programs()[program]} for {ALL[architecture]}"
        assert done, f"{name}: {log}"
        found = REPORT.findall(log)
        assert found, f"{name}: no report in {log}"
        for kernel, stack, spills in found:
            assert (int(stack), int(spills)) == (0, 0), f"{name}: {kernel} uses stack {stack}, spills {spills}"
