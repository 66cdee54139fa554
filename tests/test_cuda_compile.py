"""CUDA programs compile for every GPU generation that edgekv names, without a GPU and without spills."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import pathlib
import re
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest

import edgekv
from edgekv.kernels.cuda import matvec
from edgekv.kernels.cuda.driver import FOLDER, Program
from edgekv.kernels.cuda.kernels import attend_program
from edgekv.kernels.cuda.loops import MOST_SHARES, Reader
from edgekv.kernels.cuda.matvec import MOST_CHUNKS, linear_program
from edgekv.kernels.cuda.planes import encode_program
from edgekv.kernels.cuda.rows import ENCODE
from edgekv.papers.fier import cuda as fier
from edgekv.papers.h1b import cuda as signs
from edgekv.papers.int4 import cuda as int4
from edgekv.papers.kivi import cuda as kivi
from edgekv.papers.kvcomp import cuda as huffman

PAPERS = pathlib.Path(edgekv.__file__).parent / "papers"
LEAST = {
    "prompt_attention": 75,
    "tiled_linear": 80,
    "tiled": 80,
}  # of what is only launched from a generation on
ARCHITECTURES = {53: "Jetson Nano", 62: "TX2", 72: "Xavier", 75: "Turing", 87: "Orin", 90: "H100, H200"}
REPORT = re.compile(
    r"Function properties for (\w+)\n.*?(\d+) bytes stack frame, (\d+) bytes spill stores", re.DOTALL
)

ROWS = {"HEAD_DIM": 128, "KEY_DIM": 128, "ROWS": 4, "TILES": 1}
HUFFMAN = {"CODE_BLOCK": 64, "PLAIN_BITS": 3 * 64 * 128, "TABLE_BITS": 11}
KEYS = {
    "rows": {"KEYS": "RowKeys<u16>"},
    "h1b/keys": {"KEYS": "SignKeys", "KEY_DIM": 256},
    "columns": {"KEYS": "ColumnKeys<4>", "KEY_SCALES": "SCALE_PER_TOKEN", "KEY_BLOCK": 32},
    "centred": {"KEYS": "CentredKeys", "KEY_BITS": 1, "KEY_HEADS": 0},
    "kvcomp/read": {"KEYS": "HuffmanKeys", **HUFFMAN},
    "fier/keys": {"KEYS": "FierKeys", "GROUP": 32},
}
VALUES = {
    "rows": {"VALUES": "RowValues<float>"},
    "byte_values": {"VALUES": "ByteValues<4>", "VALUE_SCALES": "FROM_ZERO"},
    "interleaved_values": {"VALUES": "InterleavedValues", "VALUE_BITS": 2, "VALUE_HEADS": 0},
    "kvcomp/read": {"VALUES": "HuffmanValues", **HUFFMAN},
}
PAIRS = [  # of a scheme's codecs, beside exact tokens for those that keep some; tiles at once for a single query
    ("rows", {"VALUES": "RowValues<u16>"}, "rows", False, 1),
    ("h1b/keys", VALUES["byte_values"], "byte_values", False, 4),
    ("columns", {"VALUES": "ByteValues<4>", "VALUE_SCALES": "FROM_MIDDLE"}, "byte_values", False, 1),
    ("centred", VALUES["interleaved_values"], "interleaved_values", True, 4),
]
HEADS = {
    **KEYS["centred"],
    **VALUES["interleaved_values"],
    **{"KEY_BITS": 4, "KEY_HEADS": 1, "VALUE_BITS": 4, "VALUE_HEADS": 1},
}
KIVI = {
    **{"KEYS": "ColumnKeys<2>", "KEY_SCALES": "STEP_PER_CHANNEL", "KEY_BLOCK": 32},
    **{"VALUES": "ByteValues<2>", "VALUE_SCALES": "FROM_LOW"},
}


SIGNS = KEYS["centred"] | VALUES["interleaved_values"]
TILED = [
    (1, 128, SIGNS),
    (1, 128, SIGNS | {"KEY_BITS": 2}),
    (1, 64, SIGNS),
    (1, 128, HEADS),
    (4, 128, SIGNS),
    (4, 128, HEADS),
]
TILED_LINEAR = {
    "WARPS_OF_BLOCK": matvec.TILING.warps,
    "AHEAD": matvec.TILING.ahead,
    "BLOCKS_AT_ONCE": matvec.TILING.blocks,
}


def program(files: tuple[str, ...], **macros: object) -> Program:
    """Of files of ours by name, and of the papers' (folder/file)."""
    places = [PAPERS / file if "/" in file else file for file in dict.fromkeys(files)]
    return Program(tuple(places), tuple(macros.items()))


def attend(files: tuple[str, ...], exact: bool, macros: dict[str, object]) -> Program:
    more = {"MOST_SHARES": MOST_SHARES} | ({"EXACT": 1} if exact else {})
    return program((*files, *(["rows"] if exact else []), "attend"), **ROWS | macros | more)


def tiled(rows: int, width: int, macros: dict[str, Any]) -> Program:
    """attend.cu on tensor cores, beside exact tokens."""
    keys, values = (
        Reader("", "", (), 64, width, tuple((name, macros[name]) for name in names))
        for names in (("KEY_BITS", "KEY_HEADS"), ("VALUE_BITS", "VALUE_HEADS"))
    )
    return attend_program(keys, values, rows, True, is_tiled=True)


PROGRAMS = {
    **{f"scores-{file}": program((file, "ranges"), **ROWS | macros) for file, macros in KEYS.items()},
    **{f"values-{file}": program((file, "ranges"), **ROWS | macros) for file, macros in VALUES.items()},
    **{f"attend-{k}": attend((k, file), exact, KEYS[k] | values) for k, values, file, exact, _ in PAIRS},
    **{
        f"attend-{k}-one": attend((k, file), exact, KEYS[k] | values | {"ROWS": 1, "TILES": tiles})
        for k, values, file, exact, tiles in PAIRS
    },
    "attend-heads": attend(("centred", "interleaved_values"), True, HEADS),
    "attend-heads-one": attend(("centred", "interleaved_values"), True, HEADS | {"ROWS": 1, "TILES": 1}),
    "attend-kivi": attend(("columns", "byte_values"), True, KIVI),
    "attend-kivi-one": attend(("columns", "byte_values"), True, KIVI | {"ROWS": 1, "TILES": 2}),
    "scores-fier-one": program(("fier/keys", "ranges"), **ROWS | KEYS["fier/keys"] | {"ROWS": 1, "TILES": 2}),
    **{f"linear-{bits}": linear_program(bits, 128) for bits in (4, 8, 16, 32)},
    **{
        f"packed_linear-{bits}-{rows}": program(
            ("packed_linear",), WEIGHT_BITS=bits, BLOCK=32, ROWS=rows, MOST_CHUNKS=MOST_CHUNKS[-1]
        )
        for bits, rows in ((4, 2), (4, 4), (8, 2))
    },
    **{
        f"tiled_linear-{bits}-{block}": program(
            ("tiled_linear",),
            WEIGHT_BITS=bits,
            BLOCK=block,
            MOST_SPANS=MOST_CHUNKS[-1] // 8,
            **TILED_LINEAR,
        )
        for bits, block in ((4, 32), (4, 128), (8, 32))
    },
    **{
        f"attend-tiled-{rows}-{width}-{macros['KEY_BITS']}": tiled(rows, width, macros)
        for rows, width, macros in TILED
    },
    **{
        f"prompt_attention-{width}": program(("prompt_attention",), WIDTH=width, HEAD_DIM=width)
        for width in (64, 128, 256)
    },
    **{name: program((name,)) for name in ("layers", "small")},
    "rotate": Program(("exact",), (("WIDTH", 128),), exact=True),
    **{
        "encode": ENCODE,
        **{module.__name__: module.ENCODE for module in (fier, huffman, int4, kivi, signs)},
        "encode-planes": encode_program(2),
    },
}


class Nvrtc:
    """The runtime compiler's C functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    @classmethod
    def find(cls) -> Nvrtc | None:
        """In the wheel nvidia-cuda-nvrtc (-cu12), or where the system's loader looks."""
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
        """Whether it compiles, and the log."""
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
        pytest.skip(
            "needs NVRTC: pip install nvidia-cuda-nvrtc-cu12 (any 12.x knows all generations down to sm_53)"
        )
    return found


def test_every_source_file_is_compiled_here() -> None:
    compiled = {name for each in PROGRAMS.values() for name in each.files} | {"common", "ptx"}
    papers = {path.with_suffix("") for path in PAPERS.rglob("*.cu")}
    assert compiled == papers | {path.stem for path in FOLDER.glob("*.cu")}


def least(each: Program) -> int:
    """The generation from which on a program is launched."""
    return max(LEAST.get(file, 0) for file in each.files)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_programs_compile_without_spills(nvrtc: Nvrtc, architecture: int) -> None:
    if architecture not in nvrtc.architectures():
        pytest.skip(f"this NVRTC no longer compiles for sm_{architecture} ({ARCHITECTURES[architecture]})")
    programs = {name: each for name, each in PROGRAMS.items() if architecture >= least(each)}
    as_cupy_does = "-ftz=true", f"-arch=sm_{architecture}", "--ptxas-options=-v"
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = pool.map(
            lambda each: nvrtc.compile(each.source(), (*each.options(), *as_cupy_does)), programs.values()
        )
    for name, (done, log) in zip(programs, results, strict=True):
        assert done, f"{name}: {log}"
        found = REPORT.findall(log)
        assert found, f"{name}: no report in {log}"
        for kernel, stack, spills in found:
            assert (int(stack), int(spills)) == (0, 0), (
                f"{name}: {kernel} uses {stack} B of stack, spills {spills} B"
            )
