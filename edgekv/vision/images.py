"""Image files as upright 8-bit RGB; what that changes beyond the file's own meaning is said."""

from __future__ import annotations

import dataclasses
import io
import os
import pathlib
import warnings
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from edgekv.errors import ImageError
from edgekv.files import read_regular, user_path

if TYPE_CHECKING:
    from PIL import Image

    ImageSource: TypeAlias = "str | os.PathLike[str] | Image.Image | Picture"
else:
    ImageSource = Any  # `picture` says what is accepted

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # no EPS: Pillow would run Ghostscript
MAX_PIXELS = 64_000_000
MAX_SIDE = 65_535  # as JPEG has it; Pillow takes memory for each row, too
ORIENTATION = 0x0112  # the EXIF tag
PLAIN_MODES = ("RGB", "L", "1", "P")
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")


@dataclasses.dataclass(frozen=True)
class Picture:
    """An RGB image, how messages call it, and what was changed to make it one, a line each."""

    rgb: Image.Image
    name: str
    notes: tuple[str, ...]


def picture(image: ImageSource) -> Picture:
    """A file's or a Pillow image's content as RGB, turned as its EXIF tag says.

    Raises ImageError for a file that is missing, damaged, no image, or of more than MAX_PIXELS pixels.
    """
    if isinstance(image, Picture):
        return image
    if isinstance(image, (str, os.PathLike)):
        return _from_file(user_path(image))
    if not isinstance(image, require_pillow().Image.Image):
        raise ImageError(f"images={image!r:.60}: accepted: an image's file, or an image of Pillow", field="images")
    return _as_rgb(image, "the image")


def require_pillow() -> Any:
    """The module PIL. ImageError when it is not installed."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError:
        raise ImageError("images need Pillow, which is not installed: pip install 'edgekv[vision]'") from None
    return PIL


def _from_file(path: pathlib.Path) -> Picture:
    require_pillow()
    try:
        return picture_of(read_regular(path), str(path))
    except OSError as error:
        raise ImageError(f"{path}: can't be read ({error.strerror}); give an image file") from error


def picture_of(data: bytes, name: str) -> Picture:
    """As `picture`, from the bytes of an image file; ``name``: what messages call it."""
    return _opened(io.BytesIO(data), name)


def _opened(source: io.BytesIO, name: str) -> Picture:
    """From memory: Pillow reads as many bytes as a chunk says, which a file's reader takes memory for."""
    pil = require_pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, of big or odd files: what matters is checked here
            with pil.Image.open(source, formats=FORMATS) as file:
                return _as_rgb(file, name)
    except (ImageError, MemoryError):
        raise
    except pil.UnidentifiedImageError:
        raise ImageError(f"{name}: is no image that can be read; accepted: {', '.join(FORMATS)}") from None
    except pil.Image.DecompressionBombError:
        raise _too_big(name, f"more than {2 * pil.Image.MAX_IMAGE_PIXELS:,}") from None
    except Exception as error:  # decoders raise whatever they stumble over
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise ImageError(f"{name}: can't be read whole ({reason}); save or copy it again") from error


def _too_big(name: object, pixels: str) -> ImageError:
    return ImageError(f"{name}: has {pixels} pixels; accepted: up to {MAX_PIXELS:,}: make it smaller first")


def _as_rgb(image: Image.Image, name: str) -> Picture:
    pil = require_pillow()
    width, height = image.size
    if not width or not height:
        raise ImageError(f"{name}: has {width} x {height} pixels; accepted: at least one")
    if width * height > MAX_PIXELS:
        raise _too_big(name, f"{width} x {height}")
    if max(width, height) > MAX_SIDE:
        raise ImageError(
            f"{name}: has {width} x {height} pixels; accepted: sides of up to {MAX_SIDE:,}: crop it first"
        )
    notes = []
    if getattr(image, "is_animated", False):  # to count them, Pillow reads them all
        notes.append("has several frames: the first is used")
    if any(";16" in str(tile[3]) for tile in getattr(image, "tile", ())) and image.mode not in DEEP_MODES:
        notes.append("has 16 bits per channel: the upper 8 are used")
    image.load()
    if image.getexif().get(ORIENTATION, 1) != 1:
        image = pil.ImageOps.exif_transpose(image)
    rgb, change = _converted(image, name)
    return Picture(rgb, name, tuple(f"{name} {note}" for note in (*notes, *change)))


def _converted(image: Image.Image, name: str) -> tuple[Image.Image, list[str]]:
    """As RGB, and what a reader must know of it."""
    if image.mode in DEEP_MODES:
        return _from_16_bits(image, name), ["has 16 bits per pixel: the upper 8 are used"]
    if image.mode == "F":
        raise ImageError(f"{name}: has floating-point pixels, of no known range; save it with 8 bits per channel")
    if image.has_transparency_data:
        alpha = (image if "A" in image.getbands() else image.convert("RGBA")).getchannel("A")
        return image.convert("RGB"), [] if alpha.getextrema()[0] == 255 else [
            "has transparent parts: their colours are used as they are"
        ]
    note = [] if image.mode in PLAIN_MODES else [f"is {image.mode}: converted to RGB without a colour profile"]
    return image if image.mode == "RGB" else image.convert("RGB"), note


def _from_16_bits(image: Image.Image, name: str) -> Image.Image:
    pixels = np.asarray(image)
    if pixels.min() < 0 or pixels.max() > 0xFFFF:
        raise ImageError(f"{name}: has 32-bit pixels, of no known range; save it with 8 bits per channel")
    grey = (pixels >> 8).astype(np.uint8)
    return require_pillow().Image.fromarray(grey).convert("RGB")
