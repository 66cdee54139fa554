"""An image to the pixel values that the vision encoder was trained on, as preprocessor_config.json says.

Or as processor_config.json does under "image_processor". Like transformers' CLIPImageProcessor, with Pillow:
resize, crop the centre, rescale, normalise.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.checkpoint.source import read_config
from edgekv.errors import ConfigError, ImageError
from edgekv.vision.images import MAX_PIXELS, Picture, require_pillow

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
BICUBIC = 3
FILES = ("preprocessor_config.json", "processor_config.json")
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


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
        try:
            return cls._of(raw.get("image_processor", raw))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}: is not what transformers' CLIPImageProcessor writes ({error!r}); copy the model's own"
            ) from error

    @classmethod
    def _of(cls, raw: Mapping[str, Any]) -> Preprocess:
        if raw.get("do_pad"):
            raise ValueError("do_pad true is not supported")
        normalised = raw.get("do_normalize", True)
        return cls(
            resize=_size(raw.get("size", raw.get("crop_size"))) if raw.get("do_resize", True) else None,
            crop=_pair(raw.get("crop_size", raw.get("size"))) if raw.get("do_center_crop", True) else None,
            resample=_filter(raw.get("resample", BICUBIC)),
            rescale=float(raw.get("rescale_factor", 1 / 255)) if raw.get("do_rescale", True) else None,
            mean=_channels(raw.get("image_mean", CLIP_MEAN)) if normalised else None,
            std=_channels(raw.get("image_std", CLIP_STD)) if normalised else None,
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
        if self.resize is None:
            return picture.rgb
        width, height = picture.rgb.size
        if isinstance(self.resize, int):
            scaled = int(self.resize * max(width, height) / min(width, height))
            size = (self.resize, scaled) if width <= height else (scaled, self.resize)
        else:
            size = (self.resize[1], self.resize[0])
        if size[0] * size[1] > MAX_PIXELS:
            raise ImageError(
                f"{picture.name}: {width} x {height} pixels are too narrow for this model, which would see "
                f"{size[0]} x {size[1]}; crop it"
            )
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


def _size(size: Any) -> tuple[int, int] | int:
    if isinstance(size, dict) and "shortest_edge" in size:
        return _positive(size["shortest_edge"])
    return _pair(size)


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, int):
        return _positive(size), _positive(size)
    return _positive(size["height"]), _positive(size["width"])


def _positive(n: Any) -> int:
    if not 1 <= int(n) <= 1 << 14:
        raise ValueError(f"a size of {n} pixels")
    return int(n)


def _filter(number: Any) -> int:
    """As Pillow numbers them: nearest, Lanczos, bilinear, bicubic, box, Hamming."""
    if number not in range(6):
        raise ValueError(f"resample {number!r}")
    return int(number)


def _channels(values: Any) -> tuple[float, ...]:
    if len(values) != 3:
        raise ValueError(f"{len(values)} values for 3 channels")
    return tuple(float(value) for value in values)
