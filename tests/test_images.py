"""Image files: what is read, converted and refused; preprocessing as transformers does it."""

from __future__ import annotations

import json
import os
import pathlib
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import vision_cases as cases

from edgekv.errors import ConfigError, ImageError
from edgekv.vision.images import Preprocess, picture

PIL = pytest.importorskip("PIL", reason="needs Pillow: pip install 'edgekv[vision]'")
from PIL import GifImagePlugin, Image  # noqa: E402

RGB = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
GREY16 = (np.arange(5 * 7, dtype=np.uint16) * 1801).reshape(5, 7)


def png(width: int, height: int, bits: int = 8, colour: int = 2, data: bytes = b"") -> bytes:
    """A PNG by hand: Pillow writes none of these."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    )


def rgb16_png() -> bytes:
    rows = (RGB.astype(">u2") * 256 + 77).astype(">u2")
    return png(7, 5, 16, data=b"".join(b"\0" + row.tobytes() for row in rows))


def write(path: pathlib.Path, content: bytes | Callable[[pathlib.Path], object]) -> pathlib.Path:
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    return path


def test_rgb_is_read_as_it_is(tmp_path: pathlib.Path) -> None:
    for path in (tmp_path / f"a.{suffix}" for suffix in ("png", "bmp", "tiff", "ppm", "webp")):
        Image.fromarray(RGB).save(path, lossless=True)
        read = picture(path)
        np.testing.assert_array_equal(np.asarray(read.rgb), RGB)
        assert (read.rgb.mode, read.notes, read.name) == ("RGB", (), str(path))
        assert picture(read) is read
    read = picture(Image.fromarray(RGB).convert("L"))
    assert (read.rgb.mode, read.rgb.size, read.notes) == ("RGB", (7, 5), ())


def test_photos_are_turned_upright(tmp_path: pathlib.Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    Image.fromarray(RGB).save(tmp_path / "a.png", exif=exif)
    np.testing.assert_array_equal(np.asarray(picture(tmp_path / "a.png").rgb), np.rot90(RGB, -1))


def animated(path: pathlib.Path) -> None:
    frames = [Image.fromarray(np.full((5, 7, 3), 60 * i, np.uint8)) for i in range(3)]
    frames[1].save(path, save_all=True, append_images=[frames[0], frames[2]], loop=0, format="GIF")


def test_frames_are_not_counted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file with a million Pillow would read them all."""
    animated(tmp_path / "a.gif")
    monkeypatch.setattr(GifImagePlugin.GifImageFile, "n_frames", property(lambda image: pytest.fail("counted")))
    assert len(picture(tmp_path / "a.gif").notes) == 1


def transparent(path: pathlib.Path) -> None:
    Image.fromarray(np.dstack([RGB, np.full((5, 7), 9, np.uint8)])).save(path)


def palette(path: pathlib.Path) -> None:
    Image.fromarray(RGB).convert("P").save(path, transparency=0)


@pytest.mark.parametrize(
    ("name", "content", "note", "expected"),
    [
        ("a.gif", animated, "has several frames: the first is used", np.full((5, 7, 3), 60, np.uint8)),
        ("a.jpg", lambda path: Image.new("CMYK", (7, 5)).save(path), "is CMYK: converted to RGB", None),
        ("a.png", lambda path: Image.fromarray(GREY16).save(path), "has 16 bits per pixel", GREY16 >> 8),
        ("a.tiff", lambda path: Image.fromarray(GREY16).save(path), "has 16 bits per pixel", GREY16 >> 8),
        ("a.png", rgb16_png(), "has 16 bits per channel: the upper 8 are used", RGB),
        ("a.png", transparent, "has transparent parts", RGB),
        ("a.png", palette, "has transparent parts", None),
    ],
    ids=["animated", "cmyk", "grey16 png", "grey16 tiff", "rgb16", "transparent", "palette"],
)
def test_conversions_are_said(
    name: str,
    content: bytes | Callable[[pathlib.Path], object],
    note: str,
    expected: np.ndarray | None,
    tmp_path: pathlib.Path,
) -> None:
    read = picture(write(tmp_path / name, content))
    (said,) = read.notes
    assert said.startswith(f"{tmp_path / name} {note}")
    assert (read.rgb.mode, read.rgb.size) == ("RGB", (7, 5))
    if expected is not None:
        expected = expected if expected.ndim == 3 else expected[:, :, None].repeat(3, 2)
        np.testing.assert_array_equal(np.asarray(read.rgb), expected)


def cut_off(path: pathlib.Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (60, 60, 3), np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:4000])


def flipped(path: pathlib.Path) -> None:
    cut_off(path)
    data = bytearray(path.read_bytes())
    data[300:340] = bytes(40)
    path.write_bytes(data)


BAD = {
    "text": (b"this is no image", "is no image that can be read; accepted: PNG, JPEG"),
    "empty": (b"", "is no image that can be read"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no image that can be read"),
    "cut off": (cut_off, "can't be read whole"),
    "damaged": (flipped, "can't be read whole"),
    "no data": (png(9, 9), "can't be read whole"),
    "no pixels": (png(0, 5), "no image that can be read|at least one"),
    "big": (png(10_000, 10_000), r"has 10000 x 10000 pixels; accepted: up to 64,000,000: make it smaller"),
    "high": (png(1, 60_000_000), r"has 1 x 60000000 pixels; accepted: sides of up to 65,535: crop it first"),
    "broad": (png(65_536, 1), r"has 65536 x 1 pixels; accepted: sides of up to 65,535: crop it first"),
    "bomb": (png(60_000, 60_000), r"has more than [0-9,]+ pixels; accepted: up to 64,000,000"),
    "float": (lambda path: Image.fromarray(RGB[..., 0] * np.float32(0.1)).save(path, "TIFF"), "floating-point"),
    "deep": (lambda path: Image.fromarray(RGB[..., 0] * np.int32(9999)).save(path, "TIFF"), "32-bit pixels"),
    "missing": (lambda path: None, "No such file"),
    "folder": (lambda path: path.mkdir(), "not a regular file"),
    "pipe": (os.mkfifo, "not a regular file"),
}


def test_bad_files_are_refused_in_one_line(tmp_path: pathlib.Path) -> None:
    for name, (content, message) in BAD.items():
        path = write(tmp_path / f"{name}.png", content)
        with pytest.raises(ImageError, match=message) as error:
            picture(path)
        assert str(error.value).startswith(f"{path}: ")
        assert "\n" not in str(error.value)


# Preprocessing

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "vision.npz")


def read_settings(folder: pathlib.Path, settings: object) -> Preprocess:
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(settings))
    return Preprocess.read(path)


@pytest.mark.parametrize("name", cases.PREPROCESS)
def test_values_are_transformers(name: str, tmp_path: pathlib.Path) -> None:
    preprocess = read_settings(tmp_path, cases.PREPROCESS[name])
    for i, size in enumerate(cases.SIZES):
        values, expected = preprocess(picture(Image.fromarray(cases.pixels(*size)))), GOLDEN[f"{name}/{i}"]
        assert (values.dtype, values.shape) == (np.float32, expected.shape)
        assert preprocess.output == expected.shape[1:]
        np.testing.assert_allclose(values, expected, atol=1e-6)


def test_the_output_may_depend_on_the_image(tmp_path: pathlib.Path) -> None:
    preprocess = read_settings(tmp_path, {"size": {"shortest_edge": 10}, "do_center_crop": False})
    assert preprocess.output is None
    assert preprocess(picture(Image.new("RGB", (40, 20)))).shape == (3, 10, 20)


def test_other_configs_are_refused(tmp_path: pathlib.Path) -> None:
    for settings in (
        {},
        {"size": {"longest_edge": 30}},
        {"size": 30, "crop_size": 0},
        {"size": "large"},
        {"size": 30, "image_mean": [0.5]},
        {"size": 30, "image_std": None},
        {"size": 30, "do_pad": True},
        {"size": 1 << 20},
        {"size": 30, "resample": 6},
        {"size": 10**400},
        {"size": 30, "image_std": [0, 1, 1]},
        {"size": 30, "image_mean": [float("nan")] * 3},
        {"image_processor": []},
    ):
        with pytest.raises(ConfigError, match=r"preprocessor_config.json: is not what .*; copy the model's own"):
            read_settings(tmp_path, settings)


def test_a_strip_would_become_too_long(tmp_path: pathlib.Path) -> None:
    preprocess = read_settings(tmp_path, {"size": {"shortest_edge": 336}, "crop_size": 336})
    with pytest.raises(
        ImageError, match=r"the image: has 30000 x 1 pixels, .* would see 10080000 x 336; accepted: up to"
    ):
        preprocess(picture(Image.new("RGB", (30_000, 1))))
    whole = read_settings(tmp_path, {"do_resize": False, "do_center_crop": False})
    with pytest.raises(ImageError, match="would see 5000 x 5000"):
        whole(picture(Image.new("RGB", (5000, 5000))))
