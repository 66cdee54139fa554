"""The KV schemes of tools/adapt.py: attention over what a scheme stores of all tokens, differentiable."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from adapt_rounding import (
    Sign,
    half,
    rounded_f16,
    rounded_gauss,
    rounded_int4,
    rounded_means,
    rounded_queries,
    soft_sign,
    straight_through,
)
from torch import Tensor, nn

from edgekv.kernels import numpy_kernels
from edgekv.kernels.contract.planes import CENTRE
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.codecs import WORD
from edgekv.kvcache.geometry import Workspace
from edgekv.kvcache.papers.codec_h1b import SignSketch
from edgekv.kvcache.planes import KEY_SCALES
from edgekv.kvcache.rotation import Rotation
from edgekv.models.config import ModelConfig
from edgekv.types import F32

ALL = slice(None)
SCOPES = {"global": (0, 0), "layer": (ALL, 0), "head": (ALL, ALL)}
"""What of (layers, heads) has a value of its own."""

QUERY_BLOCK = 1024  # of onebit: bounds a mask
LEAST_SETTING = 1e-3


def shared(x: Tensor, group: int) -> Tensor:
    """Keys or values (rows, n_kv_heads, ...) once for each of the query heads that share them."""
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def mean_length(x: Tensor) -> Tensor:
    """Root mean square over each head's tokens of the length of x (rows, heads, n, head_dim): (1, heads, 1, 1)."""
    return x.detach().square().sum(-1, keepdim=True).mean((0, 2), keepdim=True).sqrt()


def exact_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The dense cache's: all tokens, no rounding."""
    group = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, shared(k, group), shared(v, group), is_causal=True, scale=1.0)


class Scheme(nn.Module, abc.ABC):
    """A KV scheme's attention in all layers; its ``setting``, one of an adapter's SETTINGS, is trained."""

    setting: ClassVar[str]
    value: nn.Parameter  # (), (layers,) or (layers, heads)

    def __init__(self, spec: CacheSpec, config: ModelConfig, scope: str, device: str) -> None:
        super().__init__()
        self.spec, self.config, self.scope, self.device = spec, config, scope, device

    def start(self, prompt: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Sets what the scheme has without training. ``prompt``: each layer's queries, keys, values of one row."""
        value = torch.from_numpy(self.untrained(prompt))[SCOPES[self.scope]]
        self.value = nn.Parameter(value.to(self.device))

    @abc.abstractmethod
    def untrained(self, prompt: list[tuple[Tensor, Tensor, Tensor]]) -> F32:
        """The setting (layers, heads) without training."""

    @abc.abstractmethod
    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `adapt_model.Attention`."""

    def clamp(self) -> None:
        """Keeps the setting positive."""
        self.value.data.clamp_(min=LEAST_SETTING)

    def __str__(self) -> str:
        low, high = self.value.min().item(), self.value.max().item()
        return f"{self.setting} {low:.4f}" + (f" to {high:.4f}" if high > low else "")

    def of_heads(self, layer: int) -> Tensor:
        """The layer's setting, (1, 1, 1) or (heads, 1, 1)."""
        return (self.value[layer] if self.value.ndim else self.value).reshape(-1, 1, 1)


class BinarySketch(Scheme):
    """`h1b` and `sign_keys`: signs of keys and queries under R, a temperature, values in four bits or f16.

    With ``hardness`` the signs are soft (`soft_sign`), and keys and queries keep their lengths: at a small one the
    scores are the exact ones. ``projections`` and ``centres``: see `train_projection`.
    """

    setting = "tau"

    def __init__(self, spec: CacheSpec, config: ModelConfig, scope: str, device: str) -> None:
        super().__init__(spec, config, scope, device)
        sketch = SignSketch(1, 0, config.head_dim, spec.knobs.sketch_bits, spec.knobs.seed)
        self.projection = torch.from_numpy(sketch.projection).to(device)
        self.projections: nn.Parameter | None = None
        self.centres: nn.Parameter | None = None
        self.hardness = 0.0  # 0: signs

    def train_projection(self, prompt: list[tuple[Tensor, Tensor, Tensor]]) -> list[nn.Parameter]:
        """R (layers, bits, head_dim) and the keys' centres (layers, n_kv_heads, head_dim) become parameters.

        At first R is the fixed one with its columns made orthogonal, and a centre the mean of the prompt's keys:
        what all keys share moves no exact score against another, but it sets all their signs alike.
        """
        bits, head_dim = self.projection.shape
        start = torch.linalg.qr(self.projection)[0] * bits**0.5 if bits >= head_dim else self.projection
        self.projections = nn.Parameter(start.repeat(self.config.n_layers, 1, 1))
        self.centres = nn.Parameter(torch.stack([k[0].float().mean(1) for _, k, _ in prompt]))
        return [self.projections, self.centres]

    def untrained(self, prompt: list[tuple[Tensor, Tensor, Tensor]]) -> F32:
        """As `edgekv.kvcache.papers.h1b.H1B` fits it on a prompt."""
        spec = dataclasses.replace(self.spec, knobs=dataclasses.replace(self.spec.knobs, fit=self.scope))
        caches = spec.layers(self.config, prompt[0][0].shape[2])
        for cache, layer in zip(caches, prompt, strict=True):
            cache.allocate(numpy_kernels(), Workspace())
            cache.prefill(*(x[0].float().cpu().numpy() for x in layer))
        spec.scheme.finish_prefill(caches)
        return np.stack([cache.tau.ravel() for cache in caches])

    def start_soft(self, prompt: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        """The temperature with which soft signs of hardness near 0 give the exact scores."""
        centred = [(q, self._centred(i, k)) for i, (q, k, _) in enumerate(prompt)]
        lengths = [[mean_length(x)[0, :, 0, 0] for x in layer] for layer in centred]
        each = torch.stack([1 / (q * shared(k[None], len(q) // len(k))[0]) for q, k in lengths])
        axes = {"global": (0, 1), "layer": (1,), "head": ()}[self.scope]
        self.value.data.copy_(each.log().mean(axes).exp() if axes else each)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        head_dim = q.shape[-1]
        values = straight_through(v, rounded_f16(v) if self.spec.knobs.f16_values else rounded_int4(v))
        operands = *self.codes(layer, q, k), shared(values, q.shape[1] // k.shape[1])
        width = max(x.shape[-1] for x in operands)  # a GPU's fused kernels want equal sizes
        padded = (F.pad(x, (0, width - x.shape[-1])) for x in operands)
        return F.scaled_dot_product_attention(*padded, is_causal=True, scale=1.0)[..., :head_dim]

    def codes(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Of queries, divided by bits and temperature, and of keys: (rows, n_heads, n, bits) each."""
        group, bits = q.shape[1] // k.shape[1], self.projection.shape[0]
        return self._signs(layer, q) / (bits * self.of_heads(layer)), shared(
            self._signs(layer, self._centred(layer, k)), group
        )

    def _centred(self, layer: int, k: Tensor) -> Tensor:
        return k if self.centres is None else k - self.centres[layer, :, None]

    def _signs(self, layer: int, x: Tensor) -> Tensor:
        projection = self.projection if self.projections is None else self.projections[layer]
        with torch.autocast(x.device.type, enabled=False):
            if self.hardness:
                return soft_sign(x / mean_length(x) @ projection.T, self.hardness)
            return Sign.apply(F.normalize(x, dim=-1) @ projection.T)


class CentredPlanes(Scheme):
    """`onebit`, but for the 8-bit weights in its sums of values.

    With queries (P q, P q rounded), packed keys (centre, key_scale * f * sign), exact keys (P k, 0), one product
    gives the scores of all.
    """

    setting = "key_scale"

    def __init__(self, spec: CacheSpec, config: ModelConfig, scope: str, device: str) -> None:
        super().__init__(spec, config, scope, device)
        d, seed = config.head_dim, spec.knobs.seed
        self.key_rotation = rotation_matrix(Rotation(d, -(-d // WORD) * WORD, seed)).to(device)
        self.value_rotation = rotation_matrix(Rotation(d, d, seed)).to(device)

    def untrained(self, prompt: list[tuple[Tensor, Tensor, Tensor]]) -> F32:
        key_scale = self.spec.knobs.key_scale or KEY_SCALES[1]
        return np.full((self.config.n_layers, self.config.n_kv_heads), key_scale, np.float32)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):  # 16 bits would lose what the centres keep
            return self._attend(layer, q, straight_through(k, rounded_f16(k)), straight_through(v, rounded_f16(v)))

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, group, sink = q.shape[2], q.shape[1] // k.shape[1], self.spec.knobs.sink
        middle = slice(sink, sink + self._n_packed(n - 1))
        rotated = q @ self.key_rotation.T
        whole = straight_through(rotated, rounded_queries(rotated))
        queries = torch.cat([rotated, whole], dim=-1)
        exact_keys = F.pad(k @ self.key_rotation.T, (0, rotated.shape[-1]))
        packed_keys = self._packed_keys(layer, k[:, :, middle])
        packed_values = self._packed_values(v[:, :, middle])
        out = []
        for a in range(0, n, QUERY_BLOCK):
            t = torch.arange(a, min(a + QUERY_BLOCK, n), device=q.device)
            exact, n_packed, mask = self._visible(t)
            keys = torch.cat([exact_keys[:, :, exact], packed_keys[:, :, :n_packed]], dim=2)
            values = torch.cat([v[:, :, exact], packed_values[:, :, :n_packed]], dim=2)
            operands = queries[:, :, t], shared(keys, group), shared(values, group)
            out.append(F.scaled_dot_product_attention(*operands, attn_mask=mask, scale=1.0))
        return torch.cat(out, dim=2)

    def _n_packed(self, t: int) -> int:
        """Tokens that are packed when token t attends: those beyond the window, in whole blocks."""
        return max(0, t - self.spec.knobs.sink - self.spec.knobs.residual_length) // WORD * WORD

    def _visible(self, t: Tensor) -> tuple[Tensor, int, Tensor]:
        """For the queries of tokens t: which tokens some see exactly, how many packed ones, and who sees what."""
        sink, (first, last) = self.spec.knobs.sink, (int(t[0]), int(t[-1]))
        every = torch.arange(last + 1, device=t.device)
        exact = every[(every < sink) | (every >= sink + self._n_packed(first))]
        n_packed = self._n_packed(last)
        packed_at = torch.tensor([[self._n_packed(i)] for i in t.tolist()], device=t.device)
        sees_exact = ((exact < sink) | (exact >= sink + packed_at)) & (exact <= t[:, None])
        return exact, n_packed, torch.cat([sees_exact, every[:n_packed] < packed_at], dim=1)

    def _packed_keys(self, layer: int, k: Tensor) -> Tensor:
        """(rows, n_kv_heads, n, 2 * width) of n tokens in whole blocks."""
        rotated = k @ self.key_rotation.T
        with torch.no_grad():
            centre = rounded_means(rotated, WORD)
            centre = centre + rounded_means(rotated - centre, CENTRE)
            rest = rotated - centre
            magnitude = rest.abs().sum(-1, keepdim=True)
            scale = half(rest.square().sum(-1, keepdim=True) / magnitude.where(magnitude > 0, 1.0))
            signs = torch.where(rest >= 0, scale, -scale)
        return torch.cat([straight_through(rotated, centre), self.of_heads(layer) * signs], dim=-1)

    def _packed_values(self, v: Tensor) -> Tensor:
        rotated = v @ self.value_rotation.T
        return straight_through(rotated, rounded_gauss(rotated, self.spec.knobs.v_bits)) @ self.value_rotation


SCHEMES: dict[str, type[Scheme]] = {"h1b": BinarySketch, "sign_keys": BinarySketch, "onebit": CentredPlanes}


def rotation_matrix(rotation: Rotation) -> Tensor:
    """P (width, head_dim)."""
    identity = np.eye(rotation.head_dim, dtype=np.float32)[None]
    return torch.from_numpy(rotation.forward(identity, numpy_kernels())[0].T.copy())
