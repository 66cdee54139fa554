"""The training of tools/adapt.py: a student that attends through a KV scheme learns from the dense model it is."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from adapt_model import Model, Trained, Weights
from adapt_schemes import SCHEMES, BinarySketch, exact_attention, shared
from torch import Tensor

from edgekv.checkpoint.source import Source
from edgekv.errors import EdgeKVError
from edgekv.kvcache import CacheSpec

LOGIT_ROWS = 4096  # logits (rows, vocab) alive at once, of teacher and student
FIT_TOKENS = 1024  # of the prompt that an untrained scheme fits its setting on
VALIDATIONS = 10
WARMUP_STEPS = 20
SETTING_RATE = 0.1  # the temperature's, where soft signs start it near its place
PROJECTION_RATE = 3.0  # R's learning rate over that of the rows: its elements are larger
HARDNESS = (0.5, 8.0)  # of soft signs, from the first step to the last of the annealing
ATTENTION_ROWS = 128  # queries of each window whose attention is compared with the exact one
LARGEST_GRADIENT = 1.0
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 + 0.5 * math.cos(math.pi * progress),
    "linear": lambda progress: 1 - progress,
}
"""The learning rate, as a share of its peak, by what is done of the training; WARMUP_STEPS lead up to it."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to learn.

    ``scope`` of the setting and which rows to ``train``: see SCOPES and TRAINED; with ``projection`` h1b's R too,
    one for each layer, and a centre of each head's keys. ``anneal``: for so much of the training h1b's signs are
    soft, ever less. ``hidden`` weighs the distance of the layers' states beside the KL, ``attention`` the KL of
    each head's probabilities to the exact ones, which falls to 0 by the end. ``held_back`` windows are for
    validation. ``seconds`` of training, on which the schedule then ends too; 0: as long as the epochs take.
    """

    scope: str = "global"
    train: str = "v"
    epochs: int = 2
    batch: int = 4
    lr: float = 1e-4
    schedule: str = "cosine"
    projection: bool = False
    anneal: float = 0.0
    hidden: float = 0.0
    attention: float = 0.0
    held_back: int = 4
    seconds: float = 0.0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Quality:
    """Of the student on the windows held back: KL from the dense model, perplexity, and the dense model's."""

    kl: float
    perplexity: float
    dense: float

    def __str__(self) -> str:
        ratio = self.perplexity / self.dense
        return f"KL {self.kl:.4f}, perplexity {self.perplexity:.3f}, {ratio:.4f} times dense's {self.dense:.3f}"


@dataclasses.dataclass(frozen=True)
class Result:
    """What an adapter holds, after how many steps it was so, and how good it was."""

    step: int
    quality: Quality
    tensors: dict[str, Tensor]


class Compared:
    """Attention of teacher and student whose probabilities, for some queries, are compared layer by layer.

    `start` draws the queries; then `exact` and `packed` are attentions (`adapt_model.Attention`) that record.
    """

    def __init__(self, scheme: BinarySketch) -> None:
        self.scheme = scheme
        self._rows: Tensor | None = None
        self._exact: list[Tensor] = []
        self._losses: list[Tensor] = []

    def start(self, n: int, device: str) -> None:
        self._rows = torch.randint(n, (min(n, ATTENTION_ROWS),), device=device)
        self._exact, self._losses = [], []

    def stop(self) -> None:
        self._rows = None

    def exact(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._rows is not None:
            self._exact.append(self._log_probabilities(q, shared(k, q.shape[1] // k.shape[1])))
        return exact_attention(layer, q, k, v)

    def packed(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._rows is not None:
            queries, keys = self.scheme.codes(layer, q, k)
            p, own = self._exact[layer], self._log_probabilities(queries, keys)
            self._losses.append((p.exp() * (p - own)).sum(-1).mean())
        return self.scheme(layer, q, k, v)

    def mean(self) -> Tensor:
        """Of the KL over layers, heads and queries."""
        return torch.stack(self._losses).mean()

    def _log_probabilities(self, q: Tensor, k: Tensor) -> Tensor:
        """(rows, heads, queries, n), finite where a query does not look."""
        with torch.autocast(q.device.type, enabled=False):
            scores = q[:, :, self._rows].float() @ k.float().transpose(2, 3)
        later = torch.arange(k.shape[2], device=k.device) > self._rows[:, None]
        return scores.masked_fill(later, -1e4).log_softmax(-1)


class Trainer:
    """A checkpoint as teacher and student; ``windows`` (windows, n) are token ids, the last ones held back."""

    def __init__(
        self, source: Source, spec: CacheSpec, windows: Tensor, settings: Settings, device: str = "cpu"
    ) -> None:
        self.n_train = len(windows) - settings.held_back
        if self.n_train < 1:
            raise EdgeKVError(
                f"the text fills {len(windows)} windows and {settings.held_back} are held back: give more text, a "
                "smaller --ctx or a smaller --held-back"
            )
        self.settings, self.device, self.windows = settings, device, windows.to(device)
        base = Weights(source, device)
        self.trained = Trained(base, settings.train)
        self.scheme = SCHEMES[spec.scheme.name](spec, base.arch.config, settings.scope, device)
        self.compared = Compared(self.scheme) if isinstance(self.scheme, BinarySketch) else None
        if self.compared is None and (settings.projection or settings.anneal or settings.attention):
            raise EdgeKVError(
                f"{spec}: projection, anneal and attention are for h1b and sign_keys: leave them out"
            )
        self.teacher, self.student = Model(base, exact_attention), Model(self.trained, self.scheme)
        if self.compared is not None and settings.attention:
            self.teacher, self.student = (
                Model(base, self.compared.exact),
                Model(self.trained, self.compared.packed),
            )
        prompt = self._prompt()
        self.scheme.start(prompt)
        groups = [
            {"params": list(self.trained.parameters()), "share": 1.0},
            {"params": [self.scheme.value], "share": SETTING_RATE if settings.anneal else 1.0},
        ]
        if settings.projection:
            groups.append({"params": self.scheme.train_projection(prompt), "share": PROJECTION_RATE})
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        self.n_steps = settings.epochs * -(-self.n_train // settings.batch)
        self.step, self.begin = 0, time.perf_counter()
        self.best = self.untrained = self.result()
        if settings.anneal:
            self.scheme.start_soft(prompt)
        self.begin = time.perf_counter()

    def train(self, report: Callable[[str], None]) -> Result:
        """Until the last epoch or the time ends; returns the best by KL."""
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
        """From 0 to 1: of the steps or of the time, whichever is further."""
        limit = self.settings.seconds or math.inf
        return min(1.0, max(self.step / self.n_steps, (time.perf_counter() - self.begin) / limit))

    @property
    def rate(self) -> float:
        """The next step's learning rate."""
        warm = min(1.0, (self.step + 1) / WARMUP_STEPS)
        return self.settings.lr * warm * SCHEDULES[self.settings.schedule](self.progress)

    def update(self, ids: Tensor) -> float:
        """One step on ids (rows, n); returns the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * group["share"]
        self._harden()
        if self.compared is not None and self.settings.attention:
            self.compared.start(ids.shape[1], self.device)
        with self._precision():
            with torch.no_grad():
                targets = self.teacher.states(ids)
            states = self.student.states(ids)
            distance = self.settings.hidden * hidden_distance(states, targets)
            if self.compared is not None and self.settings.attention:
                distance = distance + self.settings.attention * (1 - self.progress) * self.compared.mean()
            kl, gradient = self._kl_and_gradient(states[-1], targets[-1])
        torch.autograd.backward([states[-1], distance], [gradient, torch.ones_like(distance)])
        parameters = [x for group in self.optimizer.param_groups for x in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, LARGEST_GRADIENT)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheme.clamp()
        self.step += 1
        return kl + distance.item()

    def _harden(self) -> None:
        """The hardness of soft signs by what is done of the training."""
        if self.settings.anneal:
            share, (first, last) = self.progress / self.settings.anneal, HARDNESS
            self.scheme.hardness = first * (last / first) ** share if share < 1 else 0.0

    @torch.no_grad()
    def quality(self) -> Quality:
        """Of the student as it is now, with signs."""
        if self.settings.anneal:
            self.scheme.hardness = 0.0
        if self.compared is not None:
            self.compared.stop()
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
        """Mean KL over all tokens, and its gradient with respect to states, some rows of logits at a time."""
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
        """Each epoch's windows in an order of its own, after the first cut at other places, until time is over."""
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
        """The dense model's queries, keys and values in each layer, for the first tokens."""
        prompt = []

        def record(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            prompt.append((q, k, v))
            return exact_attention(layer, q, k, v)

        with torch.no_grad(), self._precision():
            Model(self.teacher.weights, record).states(self.windows[:1, :FIT_TOKENS])
        return prompt

    def result(self) -> Result:
        tensors = {self.scheme.setting: self.scheme.value.detach().cpu().clone()} | self.trained.changed()
        if self.settings.projection:
            tensors["projection"] = self.scheme.projections.detach().cpu().clone()
            tensors["centre"] = self.scheme.centres.detach().cpu().clone()
        return Result(self.step, self.quality(), tensors)

    def _precision(self) -> torch.autocast:
        """Matrix products in bfloat16 on a GPU."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device != "cpu")


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) summed over the rows of log-probabilities (rows, vocab)."""
    return F.kl_div(q, p, reduction="sum", log_target=True)


def hidden_distance(states: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Squared distance over squared length of the target, averaged over layers."""
    pairs = zip(states, targets, strict=True)
    return torch.stack([(x - y).square().mean() / y.square().mean() for x, y in pairs]).mean()
