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
from adapt_schemes import SCHEMES, exact_attention
from torch import Tensor

from edgekv.checkpoint.source import Source
from edgekv.errors import EdgeKVError
from edgekv.kvcache import CacheSpec

LOGIT_ROWS = 4096  # logits (rows, vocab) alive at once, of teacher and student
FIT_TOKENS = 1024  # of the prompt that an untrained scheme fits its setting on
VALIDATIONS = 10
WARMUP_STEPS = 20
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 + 0.5 * math.cos(math.pi * progress),
    "linear": lambda progress: 1 - progress,
}
"""The learning rate, as a share of its peak, by what is done of the training; WARMUP_STEPS lead up to it."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to learn.

    ``scope`` of the setting and which rows to ``train``: see SCOPES and TRAINED. ``hidden`` weighs the distance of
    the layers' states beside the KL. ``held_back`` windows are for validation. ``seconds`` of training, on which
    the schedule then ends too; 0: as long as the epochs take.
    """

    scope: str = "global"
    train: str = "v"
    epochs: int = 2
    batch: int = 4
    lr: float = 1e-4
    schedule: str = "cosine"
    hidden: float = 0.0
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
        ratio = self.perplexity / self.linear
        return f"KL {self.kl:.4f}, perplexity {self.perplexity:.3f}, {ratio:.4f} times dense's {self.linear:.3f}"


@dataclasses.dataclass(frozen=True)
class Result:
    """What an adapter holds, after how many steps it was so, and how good it was."""

    step: int
    quality: Quality
    tensors: dict[str, Tensor]


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
        self.teacher, self.student = Model(base, exact_attention), Model(self.trained, self.scheme)
        self.scheme.start(self._prompt())
        self.optimizer = torch.optim.AdamW([*self.trained.parameters(), self.scheme.value], weight_decay=0.0)
        self.n_steps = settings.epochs * -(-self.n_train // settings.batch)
        self.step, self.begin = 0, time.perf_counter()
        self.best = self.untrained = self.result()

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
            group["lr"] = self.rate
        with self._precision():
            with torch.no_grad():
                targets = self.teacher.states(ids)
            states = self.student.states(ids)
            distance = self.settings.hidden * hidden_distance(states, targets)
            kl, gradient = self._kl_and_gradient(states[-1], targets[-1])
        torch.autograd.backward([states[-1], distance], [gradient, torch.ones_like(distance)])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheme.clamp()
        self.step += 1
        return kl + distance.item()

    @torch.no_grad()
    def quality(self) -> Quality:
        """Of the student as it is now."""
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
        """Each epoch's windows in an order of its own, until the time is over."""
        rng = np.random.default_rng(self.settings.seed)
        for _ in range(self.settings.epochs):
            order = torch.from_numpy(rng.permutation(self.n_train)).to(self.device)
            for rows in order.split(self.settings.batch):
                if self.progress >= 1:
                    return
                yield self.windows[rows]

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
