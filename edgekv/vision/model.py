"""Vision: the encoder in vision.onnx, the projector beside it, and images in prompts.

onnxruntime is imported here alone, and without its telemetry: wheels from 1.31 on send events over the network,
and keep a device id and a database under ~/.cache, unless the variable is set before the library is loaded.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import safetensors.numpy

from edgekv.checkpoint.tensors import Tensors, to_float32
from edgekv.errors import CheckpointError, ImageError
from edgekv.machine import available_memory_bytes, require_memory
from edgekv.models.config import ModelConfig, activation
from edgekv.text.template import PLACEHOLDER
from edgekv.types import F32
from edgekv.vision.images import SETTINGS, ImageSource, Preprocess, open_image
from edgekv.weights.checkpoint_weights import CheckpointWeights
from edgekv.weights.ops import ACTIVATIONS
from edgekv.weights.store import WeightStore

PROJECTOR = "projector.safetensors"
ENCODER = "vision.onnx"
INPUT = "pixel_values"
MAX_SECONDS = 300.0  # for one image
TOGETHER = "give the two that belong together"
PREFIXES = ("multi_modal_projector.", "model.multi_modal_projector.")
LAYERS = ("linear_1", "linear_2")
VISUAL = "visual"


class VisionModel(Protocol):
    """The part of an opened model that `Vision` uses. image_token: stands for an image in a prompt, or None."""

    @property
    def path(self) -> pathlib.Path: ...
    @property
    def raw_config(self) -> dict[str, Any]: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def image_token(self) -> int | None: ...
    @property
    def weights(self) -> CheckpointWeights | WeightStore: ...


@dataclasses.dataclass(frozen=True)
class Embeddings:
    """A piece of a prompt: embeddings rows (n, hidden_size) float32 in place of n tokens.

    modality: "visual" ones are marked as images in the caches (`KVCache.mark_images`), others are text.
    """

    rows: F32
    modality: str = VISUAL


Prompt = Sequence[int | Embeddings]


@dataclasses.dataclass
class ImagesReport:
    """The number of images in a prompt, their tokens, and the seconds of reading them."""

    n: int
    tokens: int
    seconds: float


class Vision:
    """Turns images into a model's embeddings. Raises an EdgeKVError when a part is missing or does not fit."""

    def __init__(self, model: VisionModel, threads: int) -> None:
        folder, self.image_token = require_vision(model)
        onnx = folder / ENCODER
        weights = projector_weights(_projector_tensors(model, folder), model.config.hidden_size)
        sizes = {"vision encoder": onnx.stat().st_size, "projector": sum(w.nbytes for w in weights.values())}
        require_memory(sizes, available_memory_bytes())
        self.preprocess = Preprocess.read(_settings(folder))
        self.encoder = Encoder(onnx, threads, self.preprocess.output)
        self.projector = Projector(weights, str(model.raw_config.get("projector_hidden_act", "gelu")))

    def place_images(
        self, prompt: Prompt, images: Sequence[ImageSource], bos: int | None
    ) -> tuple[Prompt, ImagesReport]:
        """Puts images in place of a prompt's image tokens; without any, they come first, after ``bos``.

        Raises ImageError when there are more or fewer images than image tokens, or one can't be read.
        """
        check_places(prompt, self.image_token, len(images))
        begin = time.perf_counter()
        rows = [self(open_image(image)) for image in images]
        seconds = time.perf_counter() - begin
        n_tokens = sum(len(embedded.rows) for embedded in rows)
        n_first = int(bos is not None and [*prompt[:1]] == [bos])
        placed = place_images(prompt, self.image_token, rows, n_first)
        return placed, ImagesReport(len(images), n_tokens, seconds)

    def __call__(self, picture: Any) -> Embeddings:
        """Returns the embeddings, rows (tokens, hidden_size), of an image of `open_image`."""
        return Embeddings(self.projector(self.encoder(self.preprocess(picture))))


def require_vision(model: VisionModel) -> tuple[pathlib.Path, int]:
    """Returns the folder of the vision parts, and the image token. Raises ImageError where the model has none."""
    if model.image_token is None:
        raise ImageError(
            f"{model.path}: takes no images, its model_type is {model.raw_config.get('model_type')}",
            field="images",
            advice="leave {images} out, or take a model that does, such as scenes",
        )
    folder = _folder_of(model)
    for path in (folder / ENCODER, _settings(folder)):
        if not path.is_file():
            raise ImageError(f"{folder}: has no {path.name}, without which images can't be read; put it there")
    return folder, model.image_token


def _settings(folder: pathlib.Path) -> pathlib.Path:
    """Returns the path of the preprocessor's settings: one that exists, else the usual one."""
    return next((folder / name for name in SETTINGS if (folder / name).is_file()), folder / SETTINGS[0])


def copy_vision(model: VisionModel, folder: pathlib.Path) -> None:
    """Copies a model's vision parts, if any, into the folder of its weight store."""
    source = _folder_of(model)
    if model.image_token is None or not (source / ENCODER).is_file():
        return
    for path in (*source.glob(f"{ENCODER}*"), _settings(source)):  # with external data of the graph
        shutil.copyfile(path, folder / path.name)
    tensors = _projector_tensors(model, source)
    weights = projector_weights(tensors, model.config.hidden_size)
    named = {PREFIXES[0] + name: np.ascontiguousarray(array) for name, array in weights.items()}
    safetensors.numpy.save_file(named, folder / PROJECTOR)


def _folder_of(model: VisionModel) -> pathlib.Path:
    return model.path if model.path.is_dir() else model.path.parent


def _projector_tensors(model: VisionModel, folder: pathlib.Path) -> Tensors:
    """Opens the tensors of the projector: those of its own file, else the checkpoint's."""
    if (folder / PROJECTOR).is_file():
        return Tensors.open(folder / PROJECTOR)
    if isinstance(model.weights, WeightStore):
        raise ImageError(f"{folder}: a store without {PROJECTOR} can't read images; quantize it again")
    return model.weights.source.tensors


def onnxruntime() -> Any:
    """Imports the module onnxruntime. Raises ImageError when it is not installed."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    try:
        import onnxruntime as ort
    except ImportError:
        raise ImageError("images need onnxruntime, which is not installed: pip install 'edgekv[vision]'") from None
    ort.disable_telemetry_events()  # in case the program had imported it before
    return ort


class Encoder:
    """Runs the exported vision tower, one image at a time. Raises CheckpointError for a file that is none.

    size: (height, width) of the images, where it is known.
    """

    def __init__(self, path: pathlib.Path, threads: int, size: tuple[int, int] | None) -> None:
        self.path, ort = path, onnxruntime()
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
        options.enable_cpu_mem_arena = False  # it would keep the tower's scratch
        # The session owns a pool: spinning workers would take the cores from the kernels.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises its own unrelated exception types
            detail = str(error).splitlines()[0]
            raise CheckpointError(f"{path}: onnxruntime can't open it ({detail}); export it again") from error
        inputs = self._session.get_inputs()
        signature = [(x.name, x.type, len(x.shape)) for x in inputs]
        if signature != [(INPUT, "tensor(float)", 4)]:
            accepted = f"{INPUT}, float32, [n, 3, height, width]"
            raise CheckpointError(f"{path}: has the inputs {signature}; accepted: {accepted}: export it so")
        wanted = inputs[0].shape[2:]
        if size and any(isinstance(side, int) and side != given for side, given in zip(wanted, size, strict=True)):
            what = f"takes images of {wanted}, preprocessor_config.json makes them {list(size)}"
            raise CheckpointError(f"{path}: {what}; {TOGETHER}")

    def __call__(self, pixels: F32) -> F32:
        """Returns features (tokens, d_vision) float32 of pixel values (3, height, width)."""
        limit = onnxruntime().RunOptions()
        timer = threading.Timer(MAX_SECONDS, setattr, (limit, "terminate", True))  # a graph may loop for ever
        timer.daemon = True
        timer.start()
        try:
            features = self._session.run(None, {INPUT: pixels[None]}, limit)[0]
        except Exception as error:
            detail = str(error).splitlines()[0]
            raise CheckpointError(f"{self.path}: onnxruntime can't run it ({detail}); export it again") from error
        finally:
            timer.cancel()
        if features.ndim != 3 or len(features) != 1 or features.dtype != np.float32:
            what = f"{self.path}: gives {features.dtype} {features.shape} for one image"
            raise CheckpointError(f"{what}; accepted: float32 [1, tokens, d_vision]: export it so")
        result: F32 = features[0]
        return result


class Projector:
    """Computes linear_2(activation(linear_1(x))), with biases where the checkpoint has them.

    weights: of `projector_weights`. kind: projector_hidden_act of config.json.
    """

    def __init__(self, weights: dict[str, F32], kind: str) -> None:
        self.d_vision = weights["linear_1.weight"].shape[1]
        self._weights, self._activation = weights, ACTIVATIONS[activation(kind)]

    def __call__(self, features: F32) -> F32:
        """Returns embeddings (tokens, hidden_size) of features (tokens, d_vision)."""
        if features.shape[1] != self.d_vision:
            what = f"vision.onnx gives {features.shape[1]} features per token, the projector takes {self.d_vision}"
            raise CheckpointError(f"{what}; {TOGETHER}")
        return self._linear("linear_2", self._activation(self._linear("linear_1", features)))

    def _linear(self, name: str, x: F32) -> F32:
        y: F32 = x @ self._weights[f"{name}.weight"].T
        return y + self._weights[f"{name}.bias"] if f"{name}.bias" in self._weights else y


def projector_weights(tensors: Tensors, hidden_size: int) -> dict[str, F32]:
    """Reads the projector's weights (rows, columns) and biases. Raises CheckpointError if they don't fit."""
    prefix = next((p for p in PREFIXES if f"{p}linear_1.weight" in tensors), PREFIXES[0])
    names = [f"{layer}.weight" for layer in LAYERS]
    names += [bias for layer in LAYERS if prefix + (bias := f"{layer}.bias") in tensors]
    shapes = {name: tensors[prefix + name].shape for name in names}
    inner, out = shapes["linear_1.weight"][0], hidden_size
    expected = {"linear_1.bias": (inner,), "linear_2.weight": (out, inner), "linear_2.bias": (out,)}
    for name in shapes.keys() & expected.keys():
        tensors.require(prefix + name, expected[name])
    return {name: to_float32(tensors[prefix + name].read()) for name in shapes}


# Images in prompts


def check_places(prompt: Prompt, image_token: int, n_images: int) -> None:
    """Raises ImageError unless the prompt has a placeholder for each image, or none at all."""
    n_places = sum(piece == image_token for piece in prompt if not isinstance(piece, Embeddings))
    if n_places and n_places != n_images:
        raise ImageError(
            f"the prompt has {n_places} image placeholder(s), token {image_token}, for {n_images} image(s): give "
            "one for each, or write none, and the images come first"
        )


def require_places(prompt: Prompt, image_token: int, n_images: int) -> None:
    """Raises ImageError unless the prompt that a chat template wrote has a placeholder for each image."""
    if image_token not in prompt:
        raise ImageError(
            f"the chat template writes no image token {image_token} for the {n_images} image(s) of these messages",
            advice="give one that keeps <image> with {chat_template}",
        )
    check_places(prompt, image_token, n_images)


def require_placeholder(prompt: str | Prompt, pieces: Prompt, image_token: int | None) -> None:
    """Raises ImageError where a prompt has `<image>` that the tokenizer did not read as the image token."""
    if isinstance(prompt, str) and PLACEHOLDER in prompt and image_token not in pieces:
        raise ImageError(
            f"the tokenizer does not read {PLACEHOLDER} as the model's image token {image_token}: add it to "
            f"tokenizer.json, or leave {PLACEHOLDER} out of the prompt, and the images come first"
        )


def place_images(prompt: Prompt, image_token: int, images: Sequence[Embeddings], n_first: int) -> Prompt:
    """Puts an image at each placeholder of a prompt; without any, all come after its first ``n_first`` pieces."""
    positions = [i for i, piece in enumerate(prompt) if not isinstance(piece, Embeddings) and piece == image_token]
    if not positions:
        return [*prompt[:n_first], *images, *prompt[n_first:]]
    images_at = dict(zip(positions, images, strict=True))
    return [images_at.get(i, piece) for i, piece in enumerate(prompt)]
