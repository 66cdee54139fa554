"""Records an architecture's blocks as ONNX graphs whose float32 weights stay outside, in a store's file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnx import ModelProto, TensorProto, helper

from edgekv.linear.experts import graph_width
from edgekv.linear.formats import ITEM_BYTES, Specs
from edgekv.models.architecture import Architecture, Ops

OPSET, MICROSOFT = 18, "com.microsoft"
ONNX_TYPES = {"F32": TensorProto.FLOAT}
ACTIVATIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "silu": ("QuickGelu", MICROSOFT, {"alpha": 1.0}),  # x * sigmoid(alpha x)
    "gelu_tanh": ("FastGelu", MICROSOFT, {}),
    "gelu": ("Gelu", MICROSOFT, {}),
    "relu": ("Relu", "", {}),
    "sigmoid": ("Sigmoid", "", {}),
}


class GraphOps(Ops):
    """Operators that append nodes; activations are value names.

    ``offsets`` maps each tensor of ``specs`` to its byte position in the file ``location``.
    """

    def __init__(self, arch: Architecture, specs: Specs, offsets: Mapping[str, int], location: str) -> None:
        self.arch, self.specs, self.offsets, self.location = arch, specs, offsets, location
        self.linears = arch.linears()
        self.nodes: list[Any] = []
        self.initializers: dict[str, TensorProto] = {}

    def _node(
        self, op: str, inputs: list[str], domain: str = "", outputs: int = 1, **attributes: Any
    ) -> list[str]:
        names = [f"v{len(self.nodes)}_{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, domain=domain, **attributes))
        return names

    def _weight(self, name: str) -> str:
        dtype, shape = self.specs[name]
        tensor = TensorProto(name=name, data_type=ONNX_TYPES[dtype], dims=shape)
        tensor.data_location = TensorProto.EXTERNAL
        length = ITEM_BYTES[dtype] * math.prod(shape)
        for key, value in (("location", self.location), ("offset", self.offsets[name]), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        self.initializers[name] = tensor
        return name

    def _constant(self, name: str, kind: int, values: Sequence[float]) -> str:
        self.initializers[name] = helper.make_tensor(name, kind, [len(values)], values)
        return name

    def linear(self, x: str, name: str) -> str:
        linear = self.linears[name]
        bias = [self._weight(f"{name}.bias")] if linear.biases else []
        return self._node("Gemm", [x, self._weight(f"{name}.weight"), *bias], transB=1)[0]

    def add_linear(self, x: str, y: str, name: str) -> str:
        return self._node("Add", [x, self.linear(y, name)])[0]

    def rms_norm(self, x: str, name: str, eps: float) -> str:
        return self._node("SimplifiedLayerNormalization", [x, self._weight(name)], epsilon=eps, axis=-1)[0]

    def layer_norm(self, x: str, name: str, eps: float) -> str:
        inputs = [x, self._weight(f"{name}.weight"), self._weight(f"{name}.bias")]
        return self._node("LayerNormalization", inputs, epsilon=eps, axis=-1)[0]

    def activation(self, x: str, kind: str) -> str:
        op, domain, attributes = ACTIVATIONS[kind]
        return self._node(op, [x], domain, **attributes)[0]

    def gated_linear(self, x: str, name: str, kind: str) -> str:
        gate, up = self.split(self.linear(x, name), (self.linears[name].rows // 2,) * 2)
        return self.mul(self.activation(gate, kind), up)

    def split(self, x: str, sizes: Sequence[int]) -> list[str]:
        lengths = self._constant(f"sizes{len(self.nodes)}", TensorProto.INT64, sizes)
        return self._node("Split", [x, lengths], outputs=len(sizes), axis=-1)

    def join(self, parts: Sequence[str]) -> str:
        return self._node("Concat", list(parts), axis=-1)[0]

    def add(self, a: str, b: str) -> str:
        return self._node("Add", [a, b])[0]

    def mul(self, a: str, b: str) -> str:
        return self._node("Mul", [a, b])[0]

    def scale(self, x: str, factor: float) -> str:
        return self.mul(x, self._constant(f"factor{len(self.nodes)}", TensorProto.FLOAT, [factor]))

    def soft_cap(self, x: str, cap: float) -> str:
        return self.scale(self._node("Tanh", [self.scale(x, 1 / cap)])[0], cap)

    def add_experts(self, x: str, y: str, i: int) -> str:
        """What follows is no graph (`edgekv.linear.experts`): x, y and the router's logits, side by side."""
        return self.join((x, y, self.linear(y, f"{i}.router")))

    def model(self, inputs: Mapping[str, int], result: str, width: int) -> bytes:
        """The recorded graph, serialised: float32 inputs name -> (n, width), one output ``y`` (n, width)."""
        self.nodes.append(helper.make_node("Identity", [result], ["y"]))
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            self.nodes,
            "block",
            [value(name, TensorProto.FLOAT, ["n", size]) for name, size in inputs.items()],
            [value("y", TensorProto.FLOAT, ["n", width])],
            list(self.initializers.values()),
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        proto: ModelProto = helper.make_model(graph, opset_imports=opsets)
        proto.ir_version = 9
        data: bytes = proto.SerializeToString()
        return data


def block_graphs(arch: Architecture, specs: Specs, offsets: Mapping[str, int], location: str) -> dict[str, bytes]:
    """file name -> serialised graph of every block: ``{i}.in.onnx``, ``{i}.out.onnx``, ``head.onnx``."""
    c = arch.config
    hidden = c.hidden_size

    def record(block: Callable[[GraphOps], str], inputs: Mapping[str, int], width: int) -> bytes:
        ops = GraphOps(arch, specs, offsets, location)
        return ops.model(inputs, block(ops), width)

    def attention_in(i: int) -> bytes:
        return record(lambda ops: arch.attention_in(ops, i, "x"), {"x": hidden}, arch.widths(i)[0])

    def attention_out(i: int) -> bytes:
        inputs = {"x": hidden, "attention": arch.widths(i)[1]}
        return record(lambda ops: arch.attention_out(ops, i, "x", "attention"), inputs, graph_width(c, i))

    graphs = {f"{i}.in.onnx": attention_in(i) for i in range(c.n_layers)}
    graphs |= {f"{i}.out.onnx": attention_out(i) for i in range(c.n_layers)}
    graphs["head.onnx"] = record(lambda ops: arch.head(ops, "x"), {"x": hidden}, c.vocab_size)
    return graphs
