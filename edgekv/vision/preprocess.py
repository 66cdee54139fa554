"""An image to the pixel values that the vision encoder was trained on, as preprocessor_config.json says.

Or as processor_config.json does under "image_processor". Like transformers' CLIPImageProcessor, with Pillow:
resize, crop the centre, rescale, normalise.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from edgekv.checkpoint.source import read_config
from edgekv.errors import ConfigError, ImageError
from edgekv.schema import read
from edgekv.types import F32, U8
from edgekv.vision.images import Picture, require_pillow

FILES = ("preprocessor_config.json", "processor_config.json")
MAX_SEEN = 1 << 24  # pixels, each of which takes 24 bytes on the way
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


Side = Annotated[int, Meta(ge=1, le=1 << 14)]
Channels = tuple[
    Annotated[float, Meta(ge=-1e6, le=1e6)],
    Annotated[float, Meta(ge=-1e6, le=1e6)],
    Annotated[float, Meta(ge=-1e6, le=1e6)],
]
Deviation = Annotated[float, Meta(ge=1e-6, le=1e6)]


class Edges(Struct):
    """A size in pixels: of the shortest edge, or of both."""

    shortest_edge: Side | None = None
    height: Side | None = None
    width: Side | None = None


class ProcessorFile(Struct):
    """What preprocessor_config.json may hold, with CLIPImageProcessor's defaults.

    resample is Pillow's number: nearest, Lanczos, bilinear, bicubic, box, Hamming.
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
    image_mean: Channels = CLIP_MEAN
    image_std: tuple[Deviation, Deviation, Deviation] = CLIP_STD


@dataclasses.dataclass(frozen=True)
class Preprocess:
    """Sizes are (height, width); ``resize`` may be one number, the shortest edge's; None leaves the step out."""

    resize: tuple[int, int] | int | None
    crop: tuple[int, int] | None
    resample: int
    rescale: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    @classmethod
    def read(cls, path: pathlib.Path) -> Preprocess:
        """One of FILES. Raises ConfigError when it is damaged or asks for something else."""
        raw = read_config(path)
        own = raw.get("image_processor", raw)
        try:
            if not isinstance(own, dict) or None in (own.get("image_mean", 0), own.get("image_std", 0)):
                raise ValueError("no image_processor with a mean and a deviation per channel")
            return cls._of(read(own, ProcessorFile, path.name, "correct it"))
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
        """(height, width) of what comes out; None: it depends on the image."""
        return self.crop or (self.resize if isinstance(self.resize, tuple) else None)

    def __call__(self, picture: Picture) -> F32:
        """(3, height, width) float32."""
        pixels = np.asarray(self._resized(picture)).transpose(2, 0, 1)
        if self.crop:
            pixels = centre(pixels, *self.crop)
        x = pixels.astype(np.float64) * self.rescale if self.rescale is not None else pixels
        values: F32 = x.astype(np.float32)
        if self.mean is not None:
            mean, std = (np.asarray(each, np.float32)[:, None, None] for each in (self.mean, self.std))
            values = (values - mean) / std
        return np.ascontiguousarray(values)

    def _resized(self, picture: Picture) -> Any:
        width, height = size = picture.rgb.size
        if isinstance(self.resize, int):
            scaled = int(self.resize * max(width, height) / min(width, height))
            size = (self.resize, scaled) if width <= height else (scaled, self.resize)
        elif self.resize is not None:
            size = (self.resize[1], self.resize[0])
        if size[0] * size[1] > MAX_SEEN and (self.resize or not self.crop):
            raise ImageError(
                f"{picture.name}: has {width} x {height} pixels, and this model would see {size[0]} x {size[1]}; "
                f"accepted: up to {MAX_SEEN:,} of these: crop it, or make it smaller"
            )
        if self.resize is None:
            return picture.rgb
        return picture.rgb.resize(size, require_pillow().Image.Resampling(self.resample))


def centre(pixels: U8, height: int, width: int) -> U8:
    """The central (3, height, width) of pixels (3, h, w), which are padded with zeros where they are fewer."""
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
