"""vision.onnx: pixel values to features, by onnxruntime."""

from __future__ import annotations

import pathlib

import numpy as np

from edgekv.errors import CheckpointError
from edgekv.linear.onnx import session_options
from edgekv.linear.runtime import ort
from edgekv.types import F32

FILE = "vision.onnx"
INPUT = "pixel_values"


class Encoder:
    """The vision tower as it was exported, one image at a time. Raises CheckpointError for another file."""

    def __init__(self, path: pathlib.Path, threads: int, size: tuple[int, int] | None) -> None:
        """size: (height, width) of the pixel values that are to come, where it is known."""
        self.path = path
        try:
            self._session = ort.InferenceSession(
                str(path), session_options(threads), providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime raises its own unrelated exception types
            detail = str(error).splitlines()[0]
            raise CheckpointError(f"{path}: onnxruntime can't open it ({detail}); export it again") from error
        inputs = self._session.get_inputs()
        found = [(each.name, each.type, len(each.shape)) for each in inputs]
        if found != [(INPUT, "tensor(float)", 4)]:
            raise CheckpointError(
                f"{path}: has the inputs {found}; accepted: {INPUT}, float32, [n, 3, height, width]: export it so"
            )
        wanted = inputs[0].shape[2:]
        if size and any(isinstance(side, int) and side != given for side, given in zip(wanted, size, strict=True)):
            raise CheckpointError(
                f"{path}: takes images of {wanted}, preprocessor_config.json makes them {list(size)}; give the "
                "two that belong together"
            )

    def __call__(self, pixels: F32) -> F32:
        """(tokens, d_vision) float32 features of pixel values (3, height, width)."""
        try:
            features = self._session.run(None, {INPUT: pixels[None]})[0]
        except Exception as error:
            detail = str(error).splitlines()[0]
            raise CheckpointError(f"{self.path}: onnxruntime can't run it ({detail}); export it again") from error
        if features.ndim != 3 or len(features) != 1 or features.dtype != np.float32:
            raise CheckpointError(
                f"{self.path}: gives {features.dtype} {features.shape} for one image; accepted: float32 "
                "[1, tokens, d_vision]: export it so"
            )
        result: F32 = features[0]
        return result
