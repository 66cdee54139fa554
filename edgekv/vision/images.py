"""Reads image files as upright 8-bit RGB, and prepares the pixel values that a vision encoder was trained on.

Of several frames the first is used, of 16 bits the upper 8, of transparent parts the colours. Preparing follows
preprocessor_config.json (or processor_config.json under "image_processor") as transformers' CLIPImageProcessor
does, with Pillow: resize, crop the centre, rescale, normalise.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pathlib
import warnings
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np
from msgspec import Meta, Struct

from edgekv.checkpoint.checkpoint import read_config
from edgekv.checks import read_fields
from edgekv.errors import ConfigError, ImageError
from edgekv.files import read_regular, user_path
from edgekv.types import F32, U8

if TYPE_CHECKING:
    from PIL import Image

    ImageSource: TypeAlias = "str | os.PathLike[str] | Image.Image"
else:
    ImageSource = Any  # see `open_image`

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # no EPS: Pillow would run Ghostscript
MAX_PIXELS = 64_000_000
SMALLER = f"accepted: up to {MAX_PIXELS:,}: make it smaller first"
MAX_SIDE = 65_535  # as JPEG has it; Pillow takes memory for each row, too
ORIENTATION = 0x0112  # the EXIF tag
SETTINGS = ("preprocessor_config.json", "processor_config.json")
MAX_RESIZED = 1 << 24  # pixels, each of which takes 24 bytes while it is prepared
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
Side = Annotated[int, Meta(ge=1, le=1 << 14)]
Mean = Annotated[float, Meta(ge=-1e6, le=1e6)]
Deviation = Annotated[float, Meta(ge=1e-6, le=1e6)]
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")


def open_image(image: ImageSource) -> Image.Image:
    """Reads a file or a Pillow image as RGB, turned as its EXIF tag says.

    Raises ImageError for a file that is missing, damaged, no image, or of more than MAX_PIXELS pixels.
    """
    pil = require_pillow()
    if isinstance(image, (str, os.PathLike)):
        path = user_path(image)
        try:
            return decode_image(read_regular(path), str(path))
        except OSError as error:
            raise ImageError(f"{path}: can't be read ({error.strerror}); give an image file") from error
    if not isinstance(image, pil.Image.Image):
        raise ImageError(field="images", value=image, accepted=["an image's file, or an image of Pillow"])
    return _as_rgb(image, "the image")


def require_pillow() -> Any:
    """Imports the module PIL. Raises ImageError when it is not installed."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError:
        raise ImageError("images need Pillow, which is not installed: pip install 'edgekv[vision]'") from None
    return PIL


def decode_image(data: bytes, name: str) -> Image.Image:
    """Reads the bytes of an image file as `open_image` does. name: the image's in messages.

    Not from the file: its reader takes memory for as many bytes as a chunk says that it has.
    """
    pil = require_pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, of big or odd files: what matters is checked here
            with pil.Image.open(io.BytesIO(data), formats=FORMATS) as file:
                return _as_rgb(file, name)
    except (ImageError, MemoryError):
        raise
    except pil.UnidentifiedImageError:
        raise ImageError(f"{name}: is no image that can be read; accepted: {', '.join(FORMATS)}") from None
    except pil.Image.DecompressionBombError:
        raise ImageError(f"{name}: has more than {2 * pil.Image.MAX_IMAGE_PIXELS:,} pixels; {SMALLER}") from None
    except Exception as error:  # decoders raise whatever they stumble over
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise ImageError(f"{name}: can't be read whole ({reason}); save or copy it again") from error


def _as_rgb(image: Image.Image, name: str) -> Image.Image:
    width, height = image.size
    size = f"{name}: has {width} x {height} pixels"
    if not width or not height:
        raise ImageError(f"{size}; accepted: at least one")
    if width * height > MAX_PIXELS:
        raise ImageError(f"{size}; {SMALLER}")
    if max(width, height) > MAX_SIDE:
        raise ImageError(f"{size}; accepted: sides of up to {MAX_SIDE:,}: crop it first")
    image.load()
    if image.getexif().get(ORIENTATION, 1) != 1:
        image = require_pillow().ImageOps.exif_transpose(image)
    if image.mode in DEEP_MODES:
        pixels = np.asarray(image)
        if pixels.min() < 0 or pixels.max() > 0xFFFF:
            raise ImageError(f"{name}: has 32-bit pixels, of no known range; save it with 8 bits per channel")
        image = require_pillow().Image.fromarray((pixels >> 8).astype(np.uint8))
    if image.mode == "F":
        raise ImageError(f"{name}: has floating-point pixels, of no known range; save it with 8 bits per channel")
    return image if image.mode == "RGB" else image.convert("RGB")


class Edges(Struct):
    """A size in pixels: of the shortest edge, or height and width."""

    shortest_edge: Side | None = None
    height: Side | None = None
    width: Side | None = None


class ProcessorFile(Struct):
    """The fields of preprocessor_config.json, with CLIPImageProcessor's defaults.

    resample: Pillow's number of a filter: nearest, Lanczos, bilinear, bicubic, box, Hamming.
    """

    size: Side | Edges | None = None
    crop_size: Side | Edges | None = None
    do_resize: bool = True
    do_center_crop: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    do_pad: bool = False
    resample: Annotated[int, Meta(ge=0, le=5)] = 3
    rescale_factor: Annotated[float, Meta(gt=0, le=1e6)] = 1 / 255
    image_mean: tuple[Mean, Mean, Mean] = CLIP_MEAN
    image_std: tuple[Deviation, Deviation, Deviation] = CLIP_STD


@dataclasses.dataclass(frozen=True)
class Preprocess:
    """The steps that prepare an image: resize, crop, rescale, normalise; None leaves a step out.

    resize: (height, width), or the shortest edge. crop: (height, width).
    """

    resize: tuple[int, int] | int | None
    crop: tuple[int, int] | None
    resample: int
    rescale: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    @classmethod
    def read(cls, path: pathlib.Path) -> Preprocess:
        """Reads one of SETTINGS. Raises ConfigError when it is damaged, or for steps that are not supported."""
        raw = read_config(path)
        part = raw.get("image_processor", raw)
        try:
            if not isinstance(part, dict) or None in (part.get("image_mean", 0), part.get("image_std", 0)):
                raise ValueError("no image_processor with a mean and a deviation per channel")
            return cls._of(read_fields(part, ProcessorFile, path.name, "correct it"))
        except (ConfigError, ValueError) as error:
            raise ConfigError(
                f"{path}: is not what transformers' CLIPImageProcessor writes ({error}); copy the model's own"
            ) from error

    @classmethod
    def _of(cls, file: ProcessorFile) -> Preprocess:
        if file.do_pad:
            raise ValueError("do_pad true is not supported")
        size, crop = file.size or file.crop_size, file.crop_size or file.size
        return cls(
            resize=_size(size) if file.do_resize else None,
            crop=_pair(crop) if file.do_center_crop else None,
            resample=file.resample,
            rescale=file.rescale_factor if file.do_rescale else None,
            mean=file.image_mean if file.do_normalize else None,
            std=file.image_std if file.do_normalize else None,
        )

    @property
    def output(self) -> tuple[int, int] | None:
        """The (height, width) of prepared images; None: it depends on the image."""
        return self.crop or (self.resize if isinstance(self.resize, tuple) else None)

    def __call__(self, picture: Image.Image) -> F32:
        """Returns the pixel values (3, height, width) float32 of an image."""
        pixels = np.asarray(self._resized(picture)).transpose(2, 0, 1)
        if self.crop:
            pixels = centre(pixels, *self.crop)
        x = pixels.astype(np.float64) * self.rescale if self.rescale is not None else pixels
        values: F32 = x.astype(np.float32)
        if self.mean is not None:
            mean, std = (np.asarray(x, np.float32)[:, None, None] for x in (self.mean, self.std))
            values = (values - mean) / std
        return np.ascontiguousarray(values)

    def _resized(self, picture: Image.Image) -> Any:
        width, height = size = picture.size
        if isinstance(self.resize, int):
            scaled = int(self.resize * max(width, height) / min(width, height))
            size = (self.resize, scaled) if width <= height else (scaled, self.resize)
        elif self.resize is not None:
            size = (self.resize[1], self.resize[0])
        if size[0] * size[1] > MAX_RESIZED and (self.resize or not self.crop):
            what = f"has {width} x {height} pixels, and this model would see {size[0]} x {size[1]}"
            accepted = f"up to {MAX_RESIZED:,} of these: crop it, or make it smaller"
            raise ImageError(f"the image: {what}; accepted: {accepted}")
        if self.resize is None:
            return picture
        return picture.resize(size, require_pillow().Image.Resampling(self.resample))


def centre(pixels: U8, height: int, width: int) -> U8:
    """Returns the central (3, height, width) of pixels (3, h, w), padded with zeros where these are fewer."""
    h, w = pixels.shape[1:]
    if h < height or w < width:
        framed = np.zeros((3, max(h, height), max(w, width)), np.uint8)
        top, left = -((h - framed.shape[1]) // 2), -((w - framed.shape[2]) // 2)
        framed[:, top : top + h, left : left + w] = pixels
        pixels, (h, w) = framed, framed.shape[1:]
    top, left = (h - height) // 2, (w - width) // 2
    return pixels[:, top : top + height, left : left + width]


def _size(size: Side | Edges | None) -> tuple[int, int] | int:
    if isinstance(size, Edges) and size.shortest_edge is not None:
        return size.shortest_edge
    return _pair(size)


def _pair(size: Side | Edges | None) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    if size is None or size.height is None or size.width is None:
        raise ValueError("size and crop_size need a height and a width")
    return size.height, size.width
