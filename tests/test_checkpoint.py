"""Tensor files: what is read equals what was written, nothing is read before it is asked for, damage is told."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import entry, one_line, raw_file, sample
from safetensors.numpy import save_file

from edgekv.checkpoint.tensors import DTYPES, MappedTensor, Tensors, TensorWriter, to_float32
from edgekv.errors import CheckpointError


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (7,), (), (0, 4)])
def test_every_dtype_round_trips(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    expected = sample(dtype, shape)
    path = tmp_path / "a.safetensors"
    with TensorWriter(path, {"w": (dtype, shape)}) as writer:
        writer.write("w", expected)
    file = Tensors.open(path)
    found = file["w"].read()
    assert found.dtype == expected.dtype
    assert found.shape == shape
    np.testing.assert_array_equal(found, expected)
    info = file["w"]
    assert (info.dtype, info.shape, info.nbytes) == (dtype, shape, expected.nbytes)


def test_array_is_a_read_only_view_in_file_order(tmp_path: Path) -> None:
    path = raw_file(
        tmp_path / "a", {"late": entry(8, 16), "early": entry(0, 8)}, np.arange(4, dtype=np.float32).tobytes()
    )
    file = Tensors.open(path)
    assert list(file) == ["early", "late"]
    np.testing.assert_array_equal(file["late"].read(), [2, 3])
    assert not file["late"].read().flags.writeable
    assert not file["late"].read().flags.owndata
    assert file.metadata == {}


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    tensors = {name: sample(name) for name in ("F32", "F16", "I8", "I64")}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    file = Tensors.open(tmp_path / "a.safetensors")
    assert file.metadata == {"format": "pt"}
    assert sorted(file) == sorted(tensors)
    for name, expected in tensors.items():
        np.testing.assert_array_equal(file[name].read(), expected)


def test_unaligned_data_is_read(tmp_path: Path) -> None:
    text = json.dumps({"w": entry(0, 8)}).encode()
    text += b" " * (-len(text) % 8 + 1)
    file = Tensors.open(raw_file(tmp_path / "a", text, np.array([1.5, -2], np.float32).tobytes()))
    tensor = file["w"]
    assert isinstance(tensor, MappedTensor)
    assert tensor.start % 4 == 1
    np.testing.assert_array_equal(file["w"].read() + 0, [1.5, -2])


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        pytest.param({}, b"", 8 << 30, id="header of 8 GiB"),
        pytest.param({}, b"", 1 << 63, id="header of 2^63 bytes"),
        pytest.param({}, b"", 200, id="header longer than the file"),
        pytest.param(b"not JSON", b"", None, id="not JSON"),
        pytest.param(b"[1]", b"", None, id="not an object"),
        pytest.param(b"\xff\xfe{}", b"", None, id="not UTF-8"),
        pytest.param({"w": {"shape": [2]}}, bytes(8), None, id="no dtype"),
        pytest.param({"w": entry(0, 8, "Q9")}, bytes(8), None, id="unknown dtype"),
        pytest.param({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), None, id="overlap"),
        pytest.param({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20), None, id="hole"),
        pytest.param({"a": entry(0, 8), "b": entry(8, 16)}, bytes(12), None, id="past the end"),
        pytest.param({"w": entry(0, 8)}, bytes(12), None, id="bytes left over"),
        pytest.param({"w": entry(-8, 0)}, bytes(8), None, id="negative offset"),
        pytest.param({"w": entry(0, 2**64 - 1)}, bytes(8), None, id="offset overflows"),
        pytest.param({"w": entry(0, 8, shape=(2**62, 2**62))}, bytes(8), None, id="shape overflows"),
        pytest.param({"w": entry(0, 8, shape=(3,))}, bytes(8), None, id="shape against offsets"),
        pytest.param({"new\nline": entry(4, 12)}, bytes(12), None, id="newline in a name"),
    ],
)
def test_lying_headers(tmp_path: Path, header: dict[str, Any] | bytes, data: bytes, length: int | None) -> None:
    path = raw_file(tmp_path / "a.safetensors", header, data, length)
    with pytest.raises(CheckpointError) as error:
        Tensors.open(path)
    one_line(error, path, "download")


def test_truncated_files(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": sample("F32")}, path)
    for size in (path.stat().st_size - 1, 40, 8, 3, 0):
        os.truncate(path, size)
        with pytest.raises(CheckpointError) as error:
            Tensors.open(path)
        one_line(error, path, "download")


def test_files_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError) as error:
        Tensors.open(tmp_path / "absent.safetensors")
    one_line(error, "absent.safetensors", "No such file")
    with pytest.raises(CheckpointError) as error:
        Tensors.open(tmp_path)
    one_line(error, tmp_path, "it is a folder")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError) as error:
        Tensors.open(tmp_path / "pipe")
    one_line(error, "pipe", "not a regular file")

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("os.open", refuse)  # root may read a file of mode 0
    with pytest.raises(CheckpointError) as error:
        Tensors.open(tmp_path / "secret.safetensors")
    one_line(error, "secret.safetensors", "Permission denied")


def test_dtypes_without_numpy_twin_are_listed_not_read(tmp_path: Path) -> None:
    file = Tensors.open(
        raw_file(tmp_path / "a", {"mask": entry(0, 2, "BOOL"), "w": entry(2, 4, "F8_E4M3")}, bytes(4))
    )
    assert [file[name].dtype for name in file] == ["BOOL", "F8_E4M3"]
    with pytest.raises(CheckpointError) as error:
        file["w"].read()
    one_line(error, "'w'", "F8_E4M3", "BF16")


def test_shape_beyond_numpy(tmp_path: Path) -> None:
    file = Tensors.open(raw_file(tmp_path / "a", {"w": entry(0, 0, shape=(2**63, 0))}))
    with pytest.raises(CheckpointError) as error:
        file["w"].read()
    one_line(error, "'w'", 2**63)


def test_missing_tensor_names_the_close_ones(tmp_path: Path) -> None:
    save_file({"model.norm.weight": sample("F32"), "other": sample("F32")}, tmp_path / "a.safetensors")
    tensors = Tensors.open(tmp_path / "a.safetensors")
    assert "other" in tensors
    assert "norm.weight" not in tensors
    with pytest.raises(CheckpointError) as error:
        tensors["norm.weight"]
    one_line(error, "'norm.weight'", "'model.norm.weight'", "a.safetensors")


def test_require_checks_the_shape(tmp_path: Path) -> None:
    save_file({"w": sample("F32")}, tmp_path / "a.safetensors")
    tensors = Tensors.open(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(tensors.require("w", (3, 5)).read(), sample("F32"))
    with pytest.raises(CheckpointError) as error:
        tensors.require("w", (5, 3))
    one_line(error, "'w'", "(3, 5)", "(5, 3)")


BIG_FILE_PROBE = """
import sys
from edgekv.checkpoint.tensors import Tensors

def peak_kib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = peak_kib()
file = Tensors.open(sys.argv[1])
assert file["w"].read().nbytes == 13 << 30 and file["w"].read()[-1] == 0
print(peak_kib() - before)
"""


def test_opening_13_gb_does_not_read_it(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "big.safetensors", {"w": entry(0, 13 << 30, "F16", (13 << 29,))})
    os.truncate(path, path.stat().st_size + (13 << 30))  # sparse
    probe = subprocess.run(
        [sys.executable, "-c", BIG_FILE_PROBE, str(path)], capture_output=True, text=True, check=True
    )
    assert int(probe.stdout) < 16 << 10


def resident_file_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssFile"))


def test_release_gives_resident_pages_back(tmp_path: Path) -> None:
    nbytes = 64 << 20
    path = raw_file(
        tmp_path / "a", {"w": entry(0, nbytes, "U8", (nbytes,)), "x": entry(nbytes, nbytes, "U8", (0,))}
    )
    os.truncate(path, path.stat().st_size + nbytes)
    tensors = Tensors.open(path)
    array = tensors["w"].read()
    assert not array.any()
    touched = resident_file_bytes()
    tensors["w"].release()
    tensors["x"].release()
    assert resident_file_bytes() < touched - nbytes // 2
    assert not array[:: 1 << 20].any()


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_to_float32(dtype: str) -> None:
    special = [0.0, -0.0, 1.5, -2.75, np.inf, -np.inf, np.nan, 6e-8, 3e4]
    array = np.array([special, special[::-1]]).astype(DTYPES[dtype])
    expected = array.astype(np.float32)
    for part in (np.s_[:], np.s_[1:], np.s_[:, ::2], np.s_[0, 0]):
        piece = np.asarray(array[part])
        found = to_float32(piece)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected[part])
        out = np.full((2, *piece.shape), -1, np.float32)
        assert to_float32(piece, out[1, ...]).base is out
        np.testing.assert_array_equal(out[1], expected[part])


def test_to_float32_refuses_integers() -> None:
    with pytest.raises(CheckpointError) as error:
        to_float32(np.zeros(2, np.int8))
    one_line(error, "int8", "BF16")


def test_every_bfloat16_value_converts_exactly() -> None:
    array = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(to_float32(array), array.astype(np.float32))
