"""The model of tools/adapt.py: edgekv's architectures computed by PyTorch, some rows of the weights trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgekv.checkpoint.source import Source
from edgekv.checkpoint.tensors import to_float32
from edgekv.decoder.rope_tables import LayerRopes
from edgekv.errors import ConfigError
from edgekv.models import architecture

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries (rows, n_heads, n, head_dim), already scaled, keys, values (rows, n_kv_heads, n, head_dim)) ->
attention of each query over the tokens up to its own, shaped as the queries."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TRAINED = {"v": "the values' projection", "qkv": "the queries', keys' and values' projections"}


class Weights:
    """A checkpoint on a device, by the architecture's names; a bfloat16 one stays that on a GPU, else float32."""

    def __init__(self, source: Source, device: str) -> None:
        self.source, self.device = source, device
        self.arch = architecture(source.config, source.tensors)
        if any(self.arch.config.layer_windows):
            raise ConfigError(f"{source.path}: has sliding windows, which tools/adapt.py can't train")
        for name, shape in self.arch.tensors().items():
            source.tensors.require(name, shape)
        half = device != "cpu" and self.stored_dtype(self.arch.tables()["embed"][0]) == torch.bfloat16
        self._linears = {name: self._read_linear(name, half) for name in self.arch.linears()}
        vectors, offset = self.arch.vectors().items(), self.arch.norm_offset
        self._vectors = {name: self._tensor(tensor) + offset for name, (tensor, _) in vectors}
        self._tables = {name: self._tensor(tensor) for name, (tensor, _) in self.arch.tables().items()}

    def stored_dtype(self, tensor: str) -> torch.dtype:
        """Of a checkpoint's tensor."""
        return DTYPES.get(self.source.tensors.info(tensor).dtype, torch.float32)

    def linear(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Weight (rows, columns) and bias (rows,) of a fused projection."""
        return self._linears[name]

    def vector(self, name: str) -> Tensor:
        return self._vectors[name]

    def embed(self, ids: Tensor) -> Tensor:
        """(rows, n, hidden) of ids (rows, n)."""
        x = self._tables["embed"][ids] * self.arch.config.embedding_scale
        return x + self._tables["positions"][: ids.shape[1]] if "positions" in self._tables else x

    def _read_linear(self, name: str, half: bool) -> tuple[Tensor, Tensor | None]:
        linear, tensors = self.arch.linears()[name], self.source.tensors
        parts = [to_float32(tensors.outputs(p.tensor, 0, p.rows, p.conv1d)) for p in linear.parts]
        weight = torch.from_numpy(np.concatenate(parts)).to(self.device)
        bias = torch.cat([self._tensor(tensor) for tensor in linear.biases]) if linear.biases else None
        return weight.bfloat16() if half else weight, bias

    def _tensor(self, tensor: str) -> Tensor:
        return torch.from_numpy(to_float32(self.source.tensors.array(tensor)).copy()).to(self.device)


class Trained(nn.Module):
    """Weights of which the last rows of every layer's fused projection of queries, keys and values are parameters.

    They are rounded to the checkpoint's own precision wherever they are used, as they will be in the adapter.
    """

    def __init__(self, base: Weights, trained: str) -> None:
        super().__init__()
        self.base, self.arch, config = base, base.arch, base.arch.config
        self._first = config.q_size + config.kv_size if trained == "v" else 0
        layers = [base.linear(f"{i}.qkv") for i in range(config.n_layers)]
        self.rows = nn.ParameterList(weight[self._first :].float().clone() for weight, _ in layers)
        self.biases = nn.ParameterList(bias[self._first :].clone() for _, bias in layers if bias is not None)

    def linear(self, name: str) -> tuple[Tensor, Tensor | None]:
        layer, _, kind = name.partition(".")
        return self._merged(int(layer)) if kind == "qkv" else self.base.linear(name)

    def vector(self, name: str) -> Tensor:
        return self.base.vector(name)

    def embed(self, ids: Tensor) -> Tensor:
        return self.base.embed(ids)

    @torch.no_grad()
    def changed(self) -> dict[str, Tensor]:
        """The checkpoint's tensors with the trained rows in place, under its names, shaped and typed as there."""
        tensors = {}
        for i in range(self.arch.config.n_layers):
            linear, end = self.arch.layer_linears(i)[f"{i}.qkv"], 0
            weight, bias = self._merged(i)
            for j, part in enumerate(linear.parts):
                begin, end = end, end + part.rows
                if end <= self._first:
                    continue
                rows = weight[begin:end]
                tensors[part.tensor] = rows.T if part.conv1d else rows
                if bias is not None:
                    tensors[linear.biases[j]] = bias[begin:end]
        return {name: tensor.to("cpu", self.base.stored_dtype(name)) for name, tensor in tensors.items()}

    def _merged(self, i: int) -> tuple[Tensor, Tensor | None]:
        linear = self.arch.layer_linears(i)[f"{i}.qkv"]
        weight, bias = self.base.linear(f"{i}.qkv")
        weight = self._with_rows(weight, self.rows[i], linear.parts[-1].tensor)
        return weight, None if bias is None else self._with_rows(bias, self.biases[i], linear.biases[-1])

    def _with_rows(self, frozen: Tensor, rows: Tensor, tensor: str) -> Tensor:
        return torch.cat([frozen[: self._first], rows.to(self.base.stored_dtype(tensor)).to(frozen.dtype)])


class TorchOps:
    """`edgekv.models.architecture.Ops` on tensors (rows, n, channels)."""

    def __init__(self, weights: Weights | Trained) -> None:
        self.weights = weights

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, *self.weights.linear(name))

    def add_linear(self, x: Tensor, y: Tensor, name: str) -> Tensor:
        return x + self.linear(y, name)

    def rms_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights.vector(name), eps)

    def layer_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        scale, shift = (self.weights.vector(f"{name}.{end}") for end in ("weight", "bias"))
        return F.layer_norm(x, x.shape[-1:], scale, shift, eps)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        return ACTIVATIONS[kind](x)

    def gated_linear(self, x: Tensor, name: str, kind: str) -> Tensor:
        gate, up = self.linear(x, name).chunk(2, dim=-1)
        return self.activation(gate, kind) * up

    def split(self, x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        return x.split(list(sizes), dim=-1)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim=-1)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return torch.tanh(x / cap) * cap


class Model:
    """A forward pass of weights with one way of attention."""

    def __init__(self, weights: Weights | Trained, attention: Attention) -> None:
        self.weights, self.attention = weights, attention
        self.arch, self.config = weights.arch, weights.arch.config
        self._ops: Any = TorchOps(weights)
        self._rotations: list[tuple[Tensor | None, ...]] = []  # each layer's, of the last length

    def states(self, ids: Tensor) -> list[Tensor]:
        """The residual stream (rows, n, hidden) after each layer, for ids (rows, n) from position 0 on."""
        x = self.weights.embed(ids)
        rotations = self._rotations_of(ids)
        states = []
        for i in range(self.config.n_layers):
            q, k, v = self._heads(i, self.arch.attention_in(self._ops, i, x), rotations[i])
            out = self.attention(i, q, k, v)  # (rows, n_heads, n, head_dim)
            x = self.arch.attention_out(self._ops, i, x, out.transpose(1, 2).flatten(2))
            states.append(x)
        return states

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """(n, vocab) float32 of the next tokens, from the last state (n, hidden)."""
        logits: Tensor = self.arch.head(self._ops, hidden)
        return logits.float().log_softmax(-1)

    def _rotations_of(self, ids: Tensor) -> list[tuple[Tensor | None, ...]]:
        n = ids.shape[1]
        if not self._rotations or len(self._rotations[0][0]) != n:
            rotations = LayerRopes(self.config.layer_ropes, n).at(0, n)
            self._rotations = [
                tuple(None if x is None else torch.from_numpy(x).to(ids.device) for x in rotation)
                for rotation in rotations
            ]
        return self._rotations

    def _heads(self, i: int, qkv: Tensor, rotation: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Float32 queries, keys and values of the fused projection's output: split, normed, rotated, scaled."""
        c = self.config
        heads = qkv.float().unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
        q, k, v = heads.split((c.n_heads, c.n_kv_heads, c.n_kv_heads), dim=1)
        if c.qk_norm:
            q, k = (self._ops.rms_norm(x, f"{i}.{name}", c.norm_eps) for x, name in ((q, "norm_q"), (k, "norm_k")))
        cos, sin, query_factors = rotation
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if query_factors is not None:
            q = q * query_factors
        return q * c.layer_scales[i], k, v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (rows, heads, n, head_dim) by the angles of its positions, (n, half of the rotated channels)."""
    half = cos.shape[1]
    x1, x2, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], dim=-1)
