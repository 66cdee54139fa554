"""The vision-language model of models/scenes in PyTorch: a ViT, a projector of two layers, and a small Llama.

`save` writes LLaVA's layout: config.json, model.safetensors (Llama and projector), vision.onnx (ViT),
preprocessor_config.json and the tokenizer. Needs `.[visual-train]`.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from edgekv.linear.runtime import ort

CONFIG: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "torch_dtype": "bfloat16",
    "image_token_index": 3,
    "image_seq_length": 256,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "tie_word_embeddings": True,
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 192,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "image_size": 128,
        "patch_size": 8,
    },
    "text_config": {
        "model_type": "llama",
        "vocab_size": 576,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
PREPROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "do_resize": True,
    "size": {"height": 128, "width": 128},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 128, "width": 128},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
TOKENIZER_CONFIG = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False}


def normalised(pictures: Tensor) -> Tensor:
    """(n, 3, height, width) float32 pixel values of uint8 pictures (n, height, width, 3)."""
    return pictures.permute(0, 3, 1, 2).float() / 127.5 - 1


class Block(nn.Module):
    """A pre-norm transformer layer without a mask."""

    def __init__(self, width: int, inner: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, tokens, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, tokens, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class VisionTower(nn.Module):
    """Pixel values (n, 3, height, width) to features (n, tokens, width): one token per patch, no class token."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, patch = config["hidden_size"], config["patch_size"]
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((config["image_size"] // patch) ** 2, width))
        shape = width, config["intermediate_size"], config["num_attention_heads"]
        self.blocks = nn.ModuleList(Block(*shape) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.LayerNorm(width)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Projector(nn.Module):
    def __init__(self, d_vision: int, hidden: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(d_vision, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1(x)))


class SceneModel(nn.Module):
    """The three parts; `embed` puts a picture's features in the place of its image tokens."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, vision, text = config, config["vision_config"], config["text_config"]
        self.vision_tower = VisionTower(vision)
        self.multi_modal_projector = Projector(vision["hidden_size"], text["hidden_size"])
        self.language_model = LlamaForCausalLM(LlamaConfig(**text))

    def embed(self, ids: Tensor, features: Tensor) -> Tensor:
        """(rows, length, hidden) of ids with 256 image tokens per picture and the pictures' vision features."""
        x = self.language_model.model.embed_tokens(ids)
        seen = (ids == self.config["image_token_index"])[..., None]
        return x.masked_scatter(seen, self.multi_modal_projector(features).to(x.dtype))

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        """(rows, length, hidden): the last layer's output, normalised."""
        x = self.embed(ids, features)
        return self.language_model.model(inputs_embeds=x, use_cache=False).last_hidden_state


def save(model: SceneModel, tokenizer: bytes, out: pathlib.Path) -> None:
    """The model in bf16, its vision tower in f16, and what stands beside them, into the folder ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name.startswith(("language_model.", "multi_modal_projector.")) and "lm_head" not in name  # tied
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for name, content in (
        ("config", model.config),
        ("preprocessor_config", PREPROCESSOR),
        ("tokenizer_config", TOKENIZER_CONFIG),
    ):
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    (out / "tokenizer.model").write_bytes(tokenizer)
    export(model.vision_tower, out / "vision.onnx")


def rounded(model: SceneModel) -> SceneModel:
    """The model, its weights rounded in place as `save` stores them."""
    for name, tensor in model.state_dict().items():
        kind = torch.float16 if name.startswith("vision_tower.") else torch.bfloat16
        tensor.copy_(tensor.to(kind))
    return model


def export(tower: VisionTower, path: pathlib.Path) -> None:
    """vision.onnx: pixel_values [n, 3, height, width] to features [n, tokens, width], float32, weights in f16."""
    side = int(len(tower.positions) ** 0.5) * tower.patches.stride[0]
    device = tower.positions.device
    program = torch.onnx.export(
        tower.cpu().float().eval(),
        (torch.zeros(2, 3, side, side),),
        input_names=["pixel_values"],
        output_names=["features"],
        dynamic_shapes={"pixel_values": {0: torch.export.Dim("n", min=1, max=64)}},
        opset_version=18,
        dynamo=True,
        verbose=False,
    )
    tower.to(device)
    path.write_bytes(in_half(program.model_proto).SerializeToString())
    require_agreement(tower, path, side)


@torch.no_grad()
def require_agreement(tower: VisionTower, path: pathlib.Path, side: int) -> None:
    """ValueError unless onnxruntime gives what the tower gives, within 1e-4. Its weights must fit in f16."""
    pixels = torch.rand(3, 3, side, side) * 2 - 1
    expected = tower(pixels.to(tower.positions.device)).cpu().numpy()
    features = ort.InferenceSession(path).run(None, {"pixel_values": pixels.numpy()})[0]
    if (error := np.abs(features - expected).max()) > 1e-4:
        raise ValueError(f"{path}: features differ by {error:.2g}; round the tower's weights to f16 first")


def in_half(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model, its float32 weights of two or more elements stored as float16 and cast where they are used."""
    kept, casts = [], []
    for tensor in proto.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype != np.float32 or array.size < 2:
            kept.append(tensor)
            continue
        kept.append(numpy_helper.from_array(array.astype(np.float16), f"{tensor.name}.f16"))
        casts.append(helper.make_node("Cast", [f"{tensor.name}.f16"], [tensor.name], to=onnx.TensorProto.FLOAT))
    nodes = [*casts, *proto.graph.node]
    for field, items in (("initializer", kept), ("node", nodes)):
        proto.graph.ClearField(field)
        getattr(proto.graph, field).extend(items)
    proto.graph.ClearField("value_info")
    onnx.checker.check_model(proto)
    return proto
