"""Models that see: image files to embeddings in the place of tokens."""

from edgekv.vision.images import ImageSource, LoadedImage, picture
from edgekv.vision.model import Vision, copy_vision, require_vision
from edgekv.vision.prompt import check_places, place_images, require_placeholder

__all__ = [
    "ImageSource",
    "LoadedImage",
    "Vision",
    "check_places",
    "copy_vision",
    "picture",
    "place_images",
    "require_placeholder",
    "require_vision",
]
