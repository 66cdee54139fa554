"""Adapts a checkpoint to H1B-KV (IV-C): trains its temperature and the values' projection, no more.

    python tools/papers/adapt.py --model models/demo --text novels.txt.xz --kv h1b --out adapter.safetensors
    edgekv run --model models/demo --kv h1b --adapter adapter.safetensors

The student attends to what `h1b` or `sign_keys` stores of every token, its own included; its teacher is the same
checkpoint with exact attention, and the loss the KL between their next-token distributions, on windows of the text
(UTF-8, books separated by NUL). The adapter is the student with the least KL on windows held back from training.
Needs `.[torch]`, and a GPU for all but small models.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import lzma
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgekv import __version__
from edgekv.checkpoint.adapter import FORMAT, VERSION
from edgekv.checkpoint.checkpoint import Checkpoint, open_checkpoint
from edgekv.checkpoint.tensors import to_float32
from edgekv.engine.decoder import LayerRopes
from edgekv.errors import ConfigError, EdgeKVError
from edgekv.files import atomic_write
from edgekv.kernels import interface, numpy_kernels
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import Workspace
from edgekv.models import architecture
from edgekv.models.config import ModelConfig
from edgekv.papers.h1b.codec import SignSketch
from edgekv.text import load_tokenizer
from edgekv.text.tokenizer import Tokenizer
from edgekv.types import F32

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCHEMES = "h1b", "sign_keys"
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


class Weights:
    """A checkpoint on a device, by the architecture's names; a bfloat16 one stays that on a GPU, else float32."""

    def __init__(self, source: Checkpoint, device: str) -> None:
        self.source, self.device = source, device
        self.arch = architecture(source.config, source.tensors)
        if any(self.arch.config.layer_windows):
            raise ConfigError(f"{source.path}: has sliding windows, which this tool can't train")
        for name, shape in self.arch.tensors().items():
            source.tensors.require(name, shape)
        half = device != "cpu" and self.stored_dtype(self.arch.tables()["embed"][0]) == torch.bfloat16
        self._linears = {name: self._read_linear(name, half) for name in self.arch.linears()}
        vectors, offset = self.arch.vectors().items(), self.arch.norm_offset
        self._vectors = {name: self._tensor(tensor) + offset for name, (tensor, _) in vectors}
        self._tables = {name: self._tensor(tensor) for name, (tensor, _) in self.arch.tables().items()}

    def stored_dtype(self, tensor: str) -> torch.dtype:
        """Returns the dtype of a checkpoint's tensor."""
        return DTYPES.get(self.source.tensors[tensor].dtype, torch.float32)

    def linear(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Returns weight (rows, columns) and bias (rows,) of a fused projection."""
        return self._linears[name]

    def vector(self, name: str) -> Tensor:
        return self._vectors[name]

    def embed(self, ids: Tensor) -> Tensor:
        """Returns embeddings (rows, n, hidden) of ids (rows, n)."""
        x = self._tables["embed"][ids] * self.arch.config.embedding_scale
        return x + self._tables["positions"][: ids.shape[1]] if "positions" in self._tables else x

    def _read_linear(self, name: str, half: bool) -> tuple[Tensor, Tensor | None]:
        linear, tensors = self.arch.linears()[name], self.source.tensors
        parts = [to_float32(tensors[p.tensor].rows(0, p.rows, p.conv1d)) for p in linear.parts]
        weight = torch.from_numpy(np.concatenate(parts)).to(self.device)
        bias = torch.cat([self._tensor(tensor) for tensor in linear.biases]) if linear.biases else None
        return weight.bfloat16() if half else weight, bias

    def _tensor(self, tensor: str) -> Tensor:
        return torch.from_numpy(to_float32(self.source.tensors[tensor].read()).copy()).to(self.device)


class Trained(nn.Module):
    """Weights of which the values' rows of every layer's fused projection are parameters.

    They are rounded to the checkpoint's own precision wherever they are used, as they will be in the adapter.
    """

    def __init__(self, base: Weights) -> None:
        super().__init__()
        self.base, self.arch, config = base, base.arch, base.arch.config
        self._first = config.q_size + config.kv_size
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
        """Returns the checkpoint's tensors with the trained rows, under its names, shaped and typed as there."""
        tensors = {}
        for i in range(self.arch.config.n_layers):
            linear = self.arch.layer_linears(i)[f"{i}.qkv"]
            weight, bias = self._merged(i)
            part, begin = linear.parts[-1], len(weight) - linear.parts[-1].rows
            tensors[part.tensor] = weight[begin:].T if part.conv1d else weight[begin:]
            if bias is not None:
                tensors[linear.biases[-1]] = bias[begin:]
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
        """Returns the residual stream (rows, n, hidden) after each layer, for ids (rows, n) from position 0 on."""
        x = self.weights.embed(ids)
        rotations = self._rotations_of(ids)
        states = []
        for i in range(self.config.n_layers):
            q, k, v = self._heads(i, self.arch.pre_attention(self._ops, i, x), rotations[i])
            out = self.attention(i, q, k, v)  # (rows, n_heads, n, head_dim)
            x = self.arch.post_attention(self._ops, i, x, out.transpose(1, 2).flatten(2))
            states.append(x)
        return states

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Returns log-probabilities (n, vocab) float32 of the next tokens, from the last state (n, hidden)."""
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
        """Returns float32 queries, keys and values of the fused projection's output, as attention takes them."""
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
    """Rotates x (rows, heads, n, head_dim) by its positions' angles, (n, half of the rotated channels)."""
    half = cos.shape[1]
    x1, x2, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], dim=-1)


MAX_F16 = float(interface.MAX_F16)
SIGN_WIDTH = 1.0  # of the bell that stands for a sign's derivative, in standard deviations of the sketch


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Returns ``rounded`` with the gradient of x."""
    return x + (rounded - x).detach()


class Sign(torch.autograd.Function):
    """The signs +-1 of x, of about unit variance; the gradient is that of x blurred by Gaussian noise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.bfloat16())
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        bell = torch.exp(-0.5 * (x.float() / SIGN_WIDTH).square())
        return gradient * bell * (math.sqrt(2 / math.pi) / SIGN_WIDTH)


@torch.no_grad()
def rounded_int4(v: Tensor) -> Tensor:
    """Rounds as `kernels.encode_int4` stores: a scale and a zero point per token, 16 levels."""
    low, high = v.amin(-1, keepdim=True).clamp(max=0), v.amax(-1, keepdim=True).clamp(min=0)
    exact = ((high - low) / 15).clamp(max=MAX_F16)
    nearest = exact.half()
    up = (nearest.float() < exact).to(torch.int16)
    step = (nearest.view(torch.int16) + up).view(torch.float16).float()
    divisor = step.where(step > 0, 1.0)
    zero = (-low / divisor).round()
    return (((v / divisor).round() + zero).clamp(0, 15) - zero) * step


ALL = slice(None)
SCOPES = {"global": (0, 0), "layer": (ALL, 0), "head": (ALL, ALL)}
"""What of (layers, heads) has a value of its own."""

MIN_TAU = 1e-3


def shared(x: Tensor, group: int) -> Tensor:
    """Repeats keys or values (rows, n_kv_heads, ...) for each of the query heads that share them."""
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def exact_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attends as the dense cache does: to all tokens, without rounding."""
    group = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, shared(k, group), shared(v, group), is_causal=True, scale=1.0)


class BinarySketch(nn.Module):
    """The schemes `h1b` and `sign_keys` in all layers: signs of keys and queries under R, values in 4 bits."""

    tau: nn.Parameter  # (), (layers,) or (layers, heads)

    def __init__(self, spec: CacheSpec, config: ModelConfig, scope: str, device: str) -> None:
        super().__init__()
        self.spec, self.config, self.scope, self.device = spec, config, scope, device
        sketch = SignSketch(1, 0, config.head_dim, spec.config.sketch_bits, spec.config.seed)
        self.projection = torch.from_numpy(sketch.projection).to(device)

    def start(self, prompt: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Sets tau as without training. ``prompt``: each layer's queries, keys, values of one row."""
        self.tau = nn.Parameter(torch.from_numpy(self.untrained(prompt))[SCOPES[self.scope]].to(self.device))

    def clamp(self) -> None:
        """Keeps tau positive."""
        self.tau.data.clamp_(min=MIN_TAU)

    def __str__(self) -> str:
        low, high = self.tau.min().item(), self.tau.max().item()
        return f"tau {low:.4f}" + (f" to {high:.4f}" if high > low else "")

    def of_heads(self, layer: int) -> Tensor:
        """Returns the layer's tau, (1, 1, 1) or (heads, 1, 1)."""
        return (self.tau[layer] if self.tau.ndim else self.tau).reshape(-1, 1, 1)

    def untrained(self, prompt: list[tuple[Tensor, Tensor, Tensor]]) -> F32:
        """Fits tau as `edgekv.papers.h1b.H1B` does on a prompt."""
        spec = dataclasses.replace(self.spec, config=dataclasses.replace(self.spec.config, fit=self.scope))
        caches = spec.layers(self.config, prompt[0][0].shape[2])
        for cache, layer in zip(caches, prompt, strict=True):
            cache.allocate(numpy_kernels(), Workspace())
            cache.prefill(*(x[0].float().cpu().numpy() for x in layer))
        spec.scheme.finish_prefill(caches)
        return np.stack([cache.tau.ravel() for cache in caches])

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        head_dim = q.shape[-1]
        values = straight_through(v, v.half().float() if self.spec.config.f16_values else rounded_int4(v))
        operands = *self.codes(layer, q, k), shared(values, q.shape[1] // k.shape[1])
        width = max(x.shape[-1] for x in operands)  # a GPU's fused kernels want equal sizes
        padded = (F.pad(x, (0, width - x.shape[-1])) for x in operands)
        return F.scaled_dot_product_attention(*padded, is_causal=True, scale=1.0)[..., :head_dim]

    def codes(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Returns codes (rows, n_heads, n, bits) of queries, divided by bits and temperature, and of keys."""
        group, bits = q.shape[1] // k.shape[1], self.projection.shape[0]
        with torch.autocast(q.device.type, enabled=False):
            signs = [Sign.apply(F.normalize(x, dim=-1) @ self.projection.T) for x in (q, k)]
        return signs[0] / (bits * self.of_heads(layer)), shared(signs[1], group)


LOGIT_ROWS = 4096  # logits (rows, vocab) alive at once, of teacher and student
FIT_TOKENS = 1024  # of the prompt that an untrained scheme fits its setting on
VALIDATIONS = 10
WARMUP_STEPS = 20
LARGEST_GRADIENT = 1.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """The hyperparameters of learning.

    ``scope`` of the temperature: see SCOPES. ``held_back`` windows are for validation.
    """

    scope: str = "global"
    epochs: int = 2
    batch: int = 4
    lr: float = 1e-4
    held_back: int = 4
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Quality:
    """The student's quality on held-out windows: KL from the dense model, its perplexity, the dense model's."""

    kl: float
    perplexity: float
    dense: float

    def __str__(self) -> str:
        ratio = self.perplexity / self.dense
        return f"KL {self.kl:.4f}, perplexity {self.perplexity:.3f}, {ratio:.4f} times dense's {self.dense:.3f}"


@dataclasses.dataclass(frozen=True)
class Result:
    """An adapter's content, the number of steps to it, and its quality."""

    step: int
    quality: Quality
    tensors: dict[str, Tensor]


class Trainer:
    """A checkpoint as teacher and student; ``windows`` (windows, n) are token ids, the last ones held back."""

    def __init__(
        self, source: Checkpoint, spec: CacheSpec, windows: Tensor, settings: Settings, device: str = "cpu"
    ) -> None:
        self.n_train = len(windows) - settings.held_back
        if self.n_train < 1:
            raise EdgeKVError(
                f"the text fills {len(windows)} windows and {settings.held_back} are held back: give more text, a "
                "smaller --ctx or a smaller --held-back"
            )
        self.settings, self.device, self.windows = settings, device, windows.to(device)
        base = Weights(source, device)
        self.trained = Trained(base)
        self.scheme = BinarySketch(spec, base.arch.config, settings.scope, device)
        self.teacher, self.student = Model(base, exact_attention), Model(self.trained, self.scheme)
        prompt = self._prompt()
        self.scheme.start(prompt)
        self.parameters = [*self.trained.parameters(), self.scheme.tau]
        self.optimizer = torch.optim.AdamW(self.parameters, weight_decay=0.0)
        self.n_steps = settings.epochs * -(-self.n_train // settings.batch)
        self.step, self.begin = 0, time.perf_counter()
        self.best = self.untrained = self.result()
        self.begin = time.perf_counter()

    def train(self, report: Callable[[str], None]) -> Result:
        """Trains until the last epoch ends; returns the best by KL."""
        report(f"untrained: {self.untrained.quality}; {self.scheme}")
        losses: list[float] = []
        for ids in self._batches():
            due = math.floor(self.progress * VALIDATIONS) + 1
            losses.append(self.update(ids))
            if self.progress * VALIDATIONS < due:
                continue
            result = self.result()
            self.best = min(self.best, result, key=lambda r: r.quality.kl)
            loss, losses = sum(losses) / len(losses), []
            done = f"step {self.step} of {self.n_steps}, {time.perf_counter() - self.begin:.0f} s"
            report(f"{done}: loss {loss:.4f}; held back: {result.quality}; {self.scheme}")
        return self.best

    @property
    def progress(self) -> float:
        """Returns the share of all steps that are done, from 0 to 1."""
        return min(1.0, self.step / self.n_steps)

    @property
    def rate(self) -> float:
        """Returns the next step's learning rate."""
        warm = min(1.0, (self.step + 1) / WARMUP_STEPS)
        return self.settings.lr * warm * (0.5 + 0.5 * math.cos(math.pi * self.progress))

    def update(self, ids: Tensor) -> float:
        """Trains one step on ids (rows, n); returns the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        with self._precision():
            with torch.no_grad():
                targets = self.teacher.states(ids)
            states = self.student.states(ids)
            kl, gradient = self._kl_and_gradient(states[-1], targets[-1])
        states[-1].backward(gradient)
        torch.nn.utils.clip_grad_norm_(self.parameters, LARGEST_GRADIENT)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheme.clamp()
        self.step += 1
        return kl

    @torch.no_grad()
    def quality(self) -> Quality:
        """Measures the student as it is now, with signs."""
        sums = np.zeros(3)
        held_back = self.windows[self.n_train :]
        with self._precision():
            for ids in held_back:
                exact, own = (model.states(ids[None])[-1][0, :-1] for model in (self.teacher, self.student))
                for x, y, following in zip(*(t.split(LOGIT_ROWS) for t in (exact, own, ids[1:])), strict=True):
                    p, q = self.teacher.log_probabilities(x), self.student.log_probabilities(y)
                    losses = (F.nll_loss(log, following, reduction="sum") for log in (q, p))
                    sums += [value.item() for value in (divergence(p, q), *losses)]
        kl, own_loss, dense_loss = sums / (held_back.numel() - len(held_back))
        return Quality(float(kl), math.exp(own_loss), math.exp(dense_loss))

    def _kl_and_gradient(self, states: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        """Returns mean KL over all tokens, and its gradient with respect to states, some rows at a time."""
        flat, flat_targets = states.detach().flatten(0, 1), targets.flatten(0, 1)
        total, gradients = 0.0, []
        for x, target in zip(flat.split(LOGIT_ROWS), flat_targets.split(LOGIT_ROWS), strict=True):
            x = x.requires_grad_()
            with torch.no_grad():
                p = self.teacher.log_probabilities(target)
            kl = divergence(p, self.student.log_probabilities(x)) / len(flat)
            gradients.append(torch.autograd.grad(kl, x)[0])
            total += kl.item()
        return total, torch.cat(gradients).reshape(states.shape)

    def _batches(self) -> Iterator[Tensor]:
        """Yields each epoch's windows in an order of its own, after the first cut at other places."""
        rng = np.random.default_rng(self.settings.seed)
        windows, width = self.windows[: self.n_train], self.windows.shape[1]
        for _ in range(self.settings.epochs):
            order = torch.from_numpy(rng.permutation(len(windows))).to(self.device)
            for rows in order.split(self.settings.batch):
                if self.progress >= 1:
                    return
                yield windows[rows]
            if self.n_train > 1:
                start = int(rng.integers(width))
                flat = self.windows[: self.n_train].flatten()[start:]
                windows = flat[: len(flat) // width * width].reshape(-1, width)

    def _prompt(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Returns the dense model's queries, keys and values in each layer, for the first tokens."""
        prompt = []

        def record(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            prompt.append((q, k, v))
            return exact_attention(layer, q, k, v)

        with torch.no_grad(), self._precision():
            Model(self.teacher.weights, record).states(self.windows[:1, :FIT_TOKENS])
        return prompt

    def result(self) -> Result:
        tensors = {"tau": self.scheme.tau.detach().cpu().clone()} | self.trained.changed()
        return Result(self.step, self.quality(), tensors)

    def _precision(self) -> torch.autocast:
        """Runs matrix products in bfloat16 on a GPU."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device != "cpu")


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Returns KL(p || q) summed over the rows of log-probabilities (rows, vocab)."""
    return F.kl_div(q, p, reduction="sum", log_target=True)


def read_text(path: pathlib.Path) -> str:
    """Reads a UTF-8 text, plain or .xz."""
    try:
        return lzma.open(path, "rt", encoding="utf-8").read() if path.suffix == ".xz" else path.read_text("utf-8")
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise EdgeKVError(f"--text {path}: can't be read ({error}); give UTF-8 text, plain or .xz") from None


def read_windows(text: str, tokenizer: Tokenizer, ctx: int, limit: int, seed: int) -> Tensor:
    """Returns ids (windows, ctx) of the books in a random order, at most ``limit`` tokens of them; 0: all."""
    books = [book for book in text.split("\0") if book.strip()]
    ids: list[int] = []
    for i in np.random.default_rng(seed).permutation(len(books)):
        ids += tokenizer.encode(books[i])
        if limit and len(ids) >= limit:
            del ids[limit:]
            break
    n = len(ids) // ctx
    return torch.tensor(ids[: n * ctx]).reshape(n, ctx)


def write_adapter(path: pathlib.Path, base: str, spec: CacheSpec, best: Result, facts: dict[str, str]) -> None:
    """Writes the format that `edgekv.checkpoint.adapter` reads, whole or not at all."""
    metadata = {"format": FORMAT, "version": VERSION, "base": base, "scheme": spec.scheme.name, "kv": str(spec)}
    tensors = {name: tensor.contiguous() for name, tensor in best.tensors.items()}
    atomic_write(path, safetensors.torch.save(tensors, metadata | facts))


def provenance(trainer: Trainer, best: Result, text: str, name: str) -> dict[str, str]:
    """Returns how the adapter came to be, as text."""
    facts = {
        "settings": dataclasses.asdict(trainer.settings),
        "step": best.step,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "held_back": dataclasses.asdict(best.quality),
        "held_back_untrained": dataclasses.asdict(trainer.untrained.quality),
        "versions": {"edgekv": __version__, "torch": torch.__version__},
    }
    return {"text": name} | {key: json.dumps(value) for key, value in facts.items()}


def adapt(args: argparse.Namespace, settings: Settings) -> None:
    spec = CacheSpec.parse(args.kv)
    if spec.scheme.name not in SCHEMES:
        raise EdgeKVError(f"--kv {args.kv}: has nothing to train; accepted: {', '.join(SCHEMES)}")
    source = open_checkpoint(args.model)
    if source.tokenizer_folder is None:
        raise EdgeKVError(f"{args.model} has no tokenizer: copy one beside the weights")
    text = read_text(args.text)
    tokenizer = load_tokenizer(source.tokenizer_folder, config=source.config)
    windows = read_windows(text, tokenizer, args.ctx, args.tokens, settings.seed)
    print(f"{windows.shape[0]} windows of {windows.shape[1]} tokens", flush=True)
    trainer = Trainer(source, spec, windows, settings, DEVICE)
    best = trainer.train(lambda line: print(line, flush=True))
    write_adapter(args.out, source.identity, spec, best, provenance(trainer, best, text, args.text.name))
    print(f"{args.out}: step {best.step}; held back: {best.quality}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True, help="checkpoint folder with a tokenizer")
    parser.add_argument("--text", type=pathlib.Path, required=True, help="what to train on (.txt or .xz)")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the adapter to write")
    parser.add_argument("--kv", default="h1b", help=f"scheme and options: {', '.join(SCHEMES)} (default: h1b)")
    parser.add_argument("--ctx", type=int, default=8192, help="tokens per window (default: 8192)")
    parser.add_argument("--tokens", type=int, default=0, help="use so many of the text (default: all)")
    parser.add_argument("--scope", choices=SCOPES, default="global", help="what has a tau of its own")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="windows per step (default: 4)")
    parser.add_argument("--lr", type=float, default=1e-4, help="AdamW's learning rate (default: 1e-4)")
    parser.add_argument("--held-back", type=int, default=4, help="windows for validation (default: 4)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    names = {field.name for field in dataclasses.fields(Settings)}
    settings = Settings(**{name: value for name, value in vars(args).items() if name in names})
    try:
        adapt(args, settings)
    except (EdgeKVError, OSError) as error:
        print(f"adapt: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    if DEVICE == "cuda":
        torch.set_float32_matmul_precision("high")
    sys.exit(main())
