"""The projector: features of the vision encoder to embeddings of the decoder, two linear layers."""

from __future__ import annotations

from edgekv.checkpoint.tensor_set import TensorSet
from edgekv.checkpoint.tensors import to_float32
from edgekv.errors import CheckpointError
from edgekv.linear.onnx import session_options
from edgekv.linear.runtime import ort
from edgekv.models.config import activation
from edgekv.types import F32

PREFIXES = ("multi_modal_projector.", "model.multi_modal_projector.")
LAYERS = ("linear_1", "linear_2")


class Projector:
    """linear_2(activation(linear_1(x))), with biases where the checkpoint has them, by onnxruntime."""

    def __init__(self, weights: dict[str, F32], kind: str, threads: int) -> None:
        """weights: as `projector_weights` reads them; kind: config.json's projector_hidden_act."""
        self.d_vision = weights["linear_1.weight"].shape[1]
        self._session = ort.InferenceSession(
            _graph(weights, activation(kind)), session_options(threads), providers=["CPUExecutionProvider"]
        )

    def __call__(self, features: F32) -> F32:
        """(tokens, hidden_size) of features (tokens, d_vision)."""
        if features.shape[1] != self.d_vision:
            raise CheckpointError(
                f"vision.onnx gives {features.shape[1]} features per token, the projector takes {self.d_vision}; "
                "give the two that belong together"
            )
        rows: F32 = self._session.run(None, {"x": features})[0]
        return rows


def projector_weights(tensors: TensorSet, hidden_size: int) -> dict[str, F32]:
    """The projector's tensors as float32, without their prefix. CheckpointError: they are absent or don't fit."""
    prefix = next((p for p in PREFIXES if f"{p}linear_1.weight" in tensors), PREFIXES[0])
    names = [f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias")]
    shapes = {name: tensors.info(prefix + name).shape for name in names if _is_needed(prefix + name, tensors)}
    inner, out = shapes["linear_1.weight"][0], hidden_size
    expected = {"linear_1.bias": (inner,), "linear_2.weight": (out, inner), "linear_2.bias": (out,)}
    for name in shapes.keys() & expected.keys():
        tensors.require(prefix + name, expected[name])
    return {name: to_float32(tensors.array(prefix + name)) for name in shapes}


def _is_needed(name: str, tensors: TensorSet) -> bool:
    return name.endswith(".weight") or name in tensors


def _graph(weights: dict[str, F32], kind: str) -> bytes:
    from onnx import TensorProto, helper, numpy_helper  # takes its time to import

    from edgekv.linear.graph import ACTIVATIONS, MICROSOFT, OPSET

    op, domain, attributes = ACTIVATIONS[kind]
    inputs = {layer: [n for n in (f"{layer}.weight", f"{layer}.bias") if n in weights] for layer in LAYERS}
    nodes = [
        helper.make_node("Gemm", ["x", *inputs["linear_1"]], ["inner"], transB=1),
        helper.make_node(op, ["inner"], ["activated"], domain=domain, **attributes),
        helper.make_node("Gemm", ["activated", *inputs["linear_2"]], ["y"], transB=1),
    ]
    hidden, d_vision = weights["linear_2.weight"].shape[0], weights["linear_1.weight"].shape[1]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "projector",
        [value("x", TensorProto.FLOAT, ["n", d_vision])],
        [value("y", TensorProto.FLOAT, ["n", hidden])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
    proto = helper.make_model(graph, opset_imports=opsets)
    proto.ir_version = 9
    data: bytes = proto.SerializeToString()
    return data
