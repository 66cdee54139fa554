"""A tiny random LLaVA folder, and images, which tools/golden/vision.py runs through transformers too."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import golden_cases
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from edgekv.models import architecture
from edgekv.types import F32, U8

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

IMAGE_TOKEN, SIDE, PATCH, D_VISION = 95, 24, 6, 20
N_TOKENS = (SIDE // PATCH) ** 2  # per image
TEXT = golden_cases.LLAMA | {"num_key_value_heads": 2, "max_position_embeddings": 256}
HIDDEN = TEXT["hidden_size"]
CONFIG: dict[str, Any] = {
    "model_type": "llava",
    "text_config": TEXT | {"bos_token_id": 1},
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": D_VISION, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": SIDE, "patch_size": PATCH,
    },
    "image_token_index": IMAGE_TOKEN, "projector_hidden_act": "gelu", "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}  # fmt: skip
PREPROCESS: dict[str, dict[str, Any]] = {
    "llava-1.5": {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}, "resample": 3},
    "square": {
        "size": {"height": 20, "width": 30}, "do_center_crop": False, "resample": 2,
        "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4], "rescale_factor": 1 / 128,
    },
    "padded": {"size": {"shortest_edge": 11}, "crop_size": {"height": 17, "width": 32}, "resample": 3},
    "plain": {"do_resize": False, "crop_size": {"height": 30, "width": 13}, "do_normalize": False},
}  # fmt: skip
SIZES = ((50, 41), (23, 90), (24, 24), (7, 5))  # height, width
PROMPT = (1, 17, 4, IMAGE_TOKEN, 9, IMAGE_TOKEN, 33, 34, 60)


def pixels(height: int, width: int) -> U8:
    """Draws a random image of smooth and of sharp parts."""
    rng = np.random.default_rng(1000 * height + width)
    coarse = rng.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3))
    smooth = coarse.repeat(4, 0).repeat(4, 1)[:height, :width]
    return np.clip(smooth + rng.integers(-20, 20, smooth.shape), 0, 255).astype(np.uint8)


def draw(name: str, *shape: int) -> F32:
    rng = np.random.default_rng(list(name.encode()))
    return (0.3 * rng.standard_normal(shape)).astype(np.float32)


def projector() -> dict[str, F32]:
    return {
        "linear_1.weight": draw("w1", HIDDEN, D_VISION),
        "linear_1.bias": draw("b1", HIDDEN),
        "linear_2.weight": draw("w2", HIDDEN, HIDDEN),
        "linear_2.bias": draw("b2", HIDDEN),
    }


def patches() -> tuple[F32, F32]:
    """Returns weight and bias of the convolution that is the whole vision encoder."""
    return draw("patch", D_VISION, 3, PATCH, PATCH), draw("patch bias", D_VISION)


def tensors() -> dict[str, F32]:
    """Returns the decoder's tensors, by the names of an ordinary Llama."""
    shapes = architecture(TEXT).tensors()
    return {name: golden_cases.draw("llava", name, shape) for name, shape in shapes.items()}


def vision_onnx(
    height: int | str = SIDE, width: int | str = SIDE, name: str = "pixel_values", endless: bool = False
) -> bytes:
    weight, bias = patches()
    initializers = [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(bias, "bias")]
    initializers.append(numpy_helper.from_array(np.array([0, D_VISION, -1]), "shape"))
    nodes = [
        helper.make_node("Conv", [name, "weight", "bias"], ["maps"], strides=[PATCH, PATCH]),
        helper.make_node("Reshape", ["maps", "shape"], ["flat"]),
        helper.make_node("Transpose", ["flat"], ["features"], perm=[0, 2, 1]),
    ]
    value = helper.make_tensor_value_info
    if endless:
        nodes[-1].output[0] = "first"
        initializers += [numpy_helper.from_array(np.array(n), name) for n, name in ((1 << 60, "n"), (True, "on"))]
        shape = ["n", "tokens", D_VISION]
        body = helper.make_graph(
            [helper.make_node("Identity", ["on_in"], ["on_out"]), helper.make_node("Neg", ["x"], ["y"])],
            "body",
            [value("i", TensorProto.INT64, []), value("on_in", TensorProto.BOOL, []), value("x", 1, shape)],
            [value("on_out", TensorProto.BOOL, []), value("y", 1, shape)],
        )
        nodes.append(helper.make_node("Loop", ["n", "on", "first"], ["features"], body=body))
    graph = helper.make_graph(
        nodes,
        "vision",
        [value(name, TensorProto.FLOAT, ["n", 3, height, width])],
        [value("features", TensorProto.FLOAT, ["n", "tokens", D_VISION])],
        initializers,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    proto.ir_version = 9
    onnx.checker.check_model(proto)
    return bytes(proto.SerializeToString())


def tokenizer() -> tokenizers.Tokenizer:
    """Returns a tokenizer with a word per id, w3 to w94, and bos, eos and <image> at their places."""
    names = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, IMAGE_TOKEN))]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({n: i for i, n in enumerate(names)}, "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.add_special_tokens(["<image>"])
    return made


def write_model(folder: pathlib.Path, *, newer: bool = False, apart: bool = False) -> pathlib.Path:
    """Writes a LLaVA folder; ``newer``: later tensor names; ``apart``: the projector in its own file."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {}
    for name, array in tensors().items():
        if newer:
            name = name if name == "lm_head.weight" else "model.language_model." + name.removeprefix("model.")
        else:
            name = "language_model." + name
        named[name] = array
    prefix = "model.multi_modal_projector." if newer else "multi_modal_projector."
    projected = {prefix + name: array for name, array in projector().items()}
    if apart:
        save_file(projected, folder / "projector.safetensors")
    else:
        named |= projected
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESS["llava-1.5"]))
    (folder / "vision.onnx").write_bytes(vision_onnx())
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder
