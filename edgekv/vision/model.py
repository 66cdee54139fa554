"""What lies beside a decoder that sees: preprocessing, vision encoder and projector."""

from __future__ import annotations

import pathlib
import shutil
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import safetensors.numpy

from edgekv.checkpoint.tensor_set import TensorSet
from edgekv.checkpoint.tensors import TensorFile
from edgekv.errors import ImageError
from edgekv.linear.store import WeightStore
from edgekv.linear.weights import CheckpointWeights
from edgekv.machine import available_memory_bytes, require_memory
from edgekv.models.config import ModelConfig
from edgekv.vision import encoder
from edgekv.vision.encoder import Encoder
from edgekv.vision.images import ImageSource, Picture, picture
from edgekv.vision.preprocess import FILES, Preprocess
from edgekv.vision.prompt import Embeddings, ImagesReport, Prompt, check_places, place_images

PROJECTOR = "projector.safetensors"


class VisionModel(Protocol):
    """What is needed of an opened model; ``image_token`` stands for an image in a prompt, None: it sees none."""

    @property
    def path(self) -> pathlib.Path:
        """The folder or file that was opened."""

    @property
    def raw_config(self) -> dict[str, Any]:
        """Its config.json."""

    @property
    def config(self) -> ModelConfig:
        """The decoder's shape."""

    @property
    def image_token(self) -> int | None:
        """The token that stands for an image."""

    @property
    def weights(self) -> CheckpointWeights | WeightStore:
        """The checkpoint, or its weight store."""


class Vision:
    """Images to embeddings of one model. Raises an EdgeKVError when a part is missing or does not fit."""

    def __init__(self, model: VisionModel, threads: int) -> None:
        folder, self.image_token = require_vision(model)
        onnx = folder / encoder.FILE
        from edgekv.vision.projector import Projector, projector_weights  # onnx with it

        weights = projector_weights(_projector_tensors(model, folder), model.config.hidden_size)
        sizes = {"vision encoder": onnx.stat().st_size, "projector": sum(w.nbytes for w in weights.values())}
        require_memory(sizes, available_memory_bytes())
        self.preprocess = Preprocess.read(_settings(folder))
        self.encoder = Encoder(onnx, threads, self.preprocess.output)
        self.projector = Projector(weights, str(model.raw_config.get("projector_hidden_act", "gelu")), threads)

    def placed(
        self, prompt: Prompt, images: Sequence[ImageSource], bos: int | None
    ) -> tuple[Prompt, ImagesReport]:
        """The prompt with images in place of its image tokens; without any, they come first, after ``bos``.

        Raises ImageError when there are more or fewer images than image tokens, or one can't be read.
        """
        check_places(prompt, self.image_token, len(images))
        begin = time.perf_counter()
        pictures = [picture(image) for image in images]
        rows = [self(each) for each in pictures]
        seconds, notes = time.perf_counter() - begin, [note for each in pictures for note in each.notes]
        n_tokens = sum(len(each.rows) for each in rows)
        n_first = int(bos is not None and [*prompt[:1]] == [bos])
        placed = place_images(prompt, self.image_token, rows, n_first)
        return placed, ImagesReport(len(images), n_tokens, seconds, notes)

    def __call__(self, picture: Picture) -> Embeddings:
        """The image in the place of its tokens: rows (tokens, hidden_size)."""
        return Embeddings(self.projector(self.encoder(self.preprocess(picture))))


def require_vision(model: VisionModel) -> tuple[pathlib.Path, int]:
    """The folder with the model's vision parts, and its image token. ImageError when it takes no images."""
    if model.image_token is None:
        raise ImageError(
            f"{model.path}: takes no images, its model_type is {model.raw_config.get('model_type')}; leave "
            "`images` out, or give a folder of model_type llava with vision.onnx",
            field="images",
        )
    folder = _beside(model)
    for path in (folder / encoder.FILE, _settings(folder)):
        if not path.is_file():
            raise ImageError(f"{folder}: has no {path.name}, without which images can't be read; put it there")
    return folder, model.image_token


def _settings(folder: pathlib.Path) -> pathlib.Path:
    """How images are prepared: the file that is there, else the usual one."""
    paths = [folder / name for name in FILES]
    return next((path for path in paths if path.is_file()), paths[0])


def copy_vision(model: VisionModel, folder: pathlib.Path) -> None:
    """Puts what a model sees with into the folder of its weight store; nothing where it can't see."""
    place = _beside(model)
    if model.image_token is None or not (place / encoder.FILE).is_file():
        return
    for path in (*place.glob(f"{encoder.FILE}*"), _settings(place)):  # with external data of the graph
        shutil.copyfile(path, folder / path.name)
    tensors = _projector_tensors(model, place)
    from edgekv.vision.projector import PREFIXES, projector_weights

    weights = projector_weights(tensors, model.config.hidden_size)
    named = {PREFIXES[0] + name: np.ascontiguousarray(array) for name, array in weights.items()}
    safetensors.numpy.save_file(named, folder / PROJECTOR)


def _beside(model: VisionModel) -> pathlib.Path:
    return model.path if model.path.is_dir() else model.path.parent


def _projector_tensors(model: VisionModel, folder: pathlib.Path) -> TensorSet:
    """From a file of its own, or among the checkpoint's tensors."""
    if (folder / PROJECTOR).is_file():
        return TensorSet([TensorFile(folder / PROJECTOR)])
    if isinstance(model.weights, WeightStore):
        raise ImageError(f"{folder}: a store without {PROJECTOR} can't read images; quantize it again")
    return model.weights.source.tensors
