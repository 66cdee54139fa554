"""Sampling: chooses the next token id from logits, by settings, penalties and filters; log probabilities."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, TypedDict

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from edgekv.checks import Count, Natural, check_fields, checked, require_names
from edgekv.errors import ConfigError, EdgeKVError
from edgekv.kernels.arrays import to_host

ZERO_IS_NONE = ("top_k", "repetition_window")

Temperature = Annotated[float, Meta(ge=0, le=1e300, description="a number of 0 (greedy) or more")]
Share = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
Divisor = Annotated[float, Meta(ge=0.01, le=100, description="a number from 0.01 to 100; 1 is off")]
Penalty = Annotated[float, Meta(ge=-2, le=2, description="a number from -2 to 2; 0 is off")]
Seed = Annotated[int, Meta(ge=0, lt=1 << 128, description="a whole number of 0 or more")]
Token = Annotated[int, Meta(ge=0, lt=10**9)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Biases = Annotated[Mapping[Token, Bias], Meta(description="token ids, each with a number from -100 to 100")]


def _option(metavar: str, text: str) -> Meta:
    """Returns the metavar and the help of the field's option, for the command line."""
    return Meta(extra={"metavar": metavar, "help": text})


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. The defaults are temperature 0.7 and the filters of llama.cpp.

    temperature: divides the logits; 0 takes the most probable token and ignores top_k, top_p and min_p.
    top_k, top_p, min_p: the tokens that are kept: the k most probable; the fewest whose probability reaches top_p,
        one at least; those at least min_p times as probable as the most probable one. None (or 0), 1 and 0 are
        off.
    repetition_penalty: divides the positive and multiplies the negative logits of tokens seen (CTRL,
        arXiv:1909.05858, as in transformers); 1 is off. repetition_window: of so many last ones; None (or 0): all.
    frequency_penalty, presence_penalty: subtracted from a token's logit for each time that it was sampled, and
        once if it was, as OpenAI's; -2 to 2. logit_bias: by token id, added to its logit, -100 to 100.
    seed: of the random generator; None draws one from the operating system.

    Raises ConfigError, whose field is the parameter, where a value is outside its range.
    """

    temperature: Annotated[Temperature, _option("T", "0 is greedy")] = 0.7
    top_k: Annotated[Natural | None, _option("K", "keep the K likeliest tokens; 0 is off")] = 40
    top_p: Annotated[Share, _option("P", "keep the likeliest tokens that have P of the probability; 1 is off")] = (
        0.95
    )
    min_p: Annotated[Share, _option("P", "keep tokens at least P times as likely as the likeliest; 0 is off")] = (
        0.05
    )
    repetition_penalty: Annotated[
        Divisor, _option("R", "divides the logits of tokens in prompt and text; 1 is off")
    ] = 1.0
    repetition_window: Annotated[
        Natural | None, _option("N", "how many of the last tokens that counts; 0: all")
    ] = None
    seed: Annotated[Seed | None, _option("SEED", "of the sampler (default: drawn, and reported)")] = None
    frequency_penalty: Annotated[
        Penalty, _option("F", "subtracted for each time that a token was written, -2 to 2; 0 is off")
    ] = 0.0
    presence_penalty: Annotated[
        Penalty, _option("F", "subtracted once from tokens that were written, -2 to 2; 0 is off")
    ] = 0.0
    logit_bias: Annotated[
        Biases | None, _option("ID=BIAS", "added to the logit of the token with this id, -100 to 100 (repeatable)")
    ] = field(default=None, hash=False)

    def __new__(cls, *values: Any, **settings: Any) -> SamplingParams:
        require_names(settings, list(cls.__dataclass_fields__), cls.__name__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.logit_bias, Mapping):
            texts = re.compile(r"[0-9]{1,9}").fullmatch
            ids = [int(i) if isinstance(i, str) and texts(i) else i for i in self.logit_bias]
            object.__setattr__(self, "logit_bias", dict(zip(ids, self.logit_bias.values(), strict=True)))
        check_fields(self)
        for name in ZERO_IS_NONE:
            object.__setattr__(self, name, getattr(self, name) or None)

    def as_dict(self) -> dict[str, Any]:
        """Returns every setting by its name, as files and reports have it: 0 for a top_k that is None."""
        return asdict(self) | {name: getattr(self, name) or 0 for name in ZERO_IS_NONE}

    @property
    def counts(self) -> bool:
        """Whether it matters how often a token was sampled."""
        return bool(self.frequency_penalty or self.presence_penalty)


class Settings(TypedDict, total=False):
    """The fields of `SamplingParams` as arguments; a temperature of None is not given."""

    temperature: float | None
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    repetition_window: int | None
    seed: int | None
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None


def adjust_logits(logits: Any, params: SamplingParams, history: Sequence[int], chosen: Mapping[int, int]) -> Any:
    """Returns logits (vocab,) with penalties and biases applied; the argument is not changed.

    history: ids of prompt and output. chosen: how often each token was sampled. Logits of a device stay there.
    """
    repeats, counts = params.repetition_penalty != 1 and len(history) > 0, params.counts and bool(chosen)
    if not (repeats or counts or params.logit_bias):
        return logits
    logits = logits.copy()
    if repeats:
        latest = history if params.repetition_window is None else history[-params.repetition_window :]
        seen = np.asarray(np.unique(np.asarray(latest, np.int64)), like=logits)
        values, penalty = logits[seen], np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if counts:
        n = np.fromiter(chosen.values(), np.float32, len(chosen))
        _add(logits, list(chosen), -(params.frequency_penalty * n + params.presence_penalty))
    if params.logit_bias:
        _add(logits, list(params.logit_bias), list(params.logit_bias.values()))
    return logits


def _add(logits: Any, ids: Sequence[int], values: Any) -> None:
    index = np.asarray(np.asarray(ids, np.int64), like=logits)
    logits[index] = logits[index] + np.asarray(np.asarray(values, np.float32), like=logits)


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """The natural logarithms of a token's probability and, in ``top``, of the likeliest tokens' in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprob(logits: Any, token: int, n_top: int) -> TokenLogprob:
    """Returns the log probabilities of ``token`` and of the ``n_top`` likeliest, by logits (vocab,)."""
    x = logits.astype(np.float64)
    x -= np.max(x)
    x -= np.log(np.sum(np.exp(x)))
    ids = np.asarray([], np.int64, like=x) if n_top == 0 else _top_k(x, min(n_top, x.size))
    ids = ids[np.argsort(-x[ids], kind="stable")]
    top_ids, values = to_host(ids), to_host(x[np.concatenate([np.asarray([token], like=ids), ids])])
    top = zip(map(int, top_ids), map(float, values[1:]), strict=True)
    return TokenLogprob(token, float(values[0]), tuple(top))


def _require_finite(largest: float) -> None:
    if not math.isfinite(largest):
        raise EdgeKVError(
            f"the largest logit is {largest}: the weights are damaged or a computation overflowed; "
            "check the model file"
        )


def _from_device(logits: Any, n: int | None) -> tuple[NDArray[Any] | None, NDArray[Any]]:
    """Copies the n largest of logits (vocab,) from a device: ids (n,), ascending, and values (n,).

    Of equal logits those of lower ids. Ids are None where all logits are copied.
    """
    if n is None or n >= logits.size:
        return None, to_host(logits)
    if n == 1:
        best = np.argmax(logits).reshape(1)  # NaN counts as the largest
        found = to_host(np.concatenate((best.view(np.float32), logits[best])))
        return found[:2].view(np.int64), found[2:]
    ids = np.sort(np.argsort(-logits, kind="stable")[:n])
    parts = ids.astype(np.float64), logits[ids].astype(np.float64), np.max(logits).reshape(1).astype(np.float64)
    found = to_host(np.concatenate(parts))
    _require_finite(float(found[-1]))
    return found[:n], found[n:-1]


class Sampler:
    """Chooses tokens by `params`, with a random generator (PCG64) of its own: the same seed gives the same tokens.

    Filters run in the order of transformers: penalty, temperature, top-k, top-p, min-p. `seed` is the one in use,
    also where params has none. With `n_logprobs`, 0 or more, `logprobs` gets an entry per sampled token, with as
    many likeliest tokens. Raises ConfigError for a bias of a token that the vocabulary lacks.
    """

    @checked(params="sampling")
    def __init__(self, params: SamplingParams, vocab_size: Count, n_logprobs: Natural | None = None) -> None:
        unknown = [token for token in params.logit_bias or () if token >= vocab_size]
        if unknown:
            raise ConfigError(
                f"token {unknown[0]} is none of the model's",
                field="logit_bias",
                accepted=[f"ids from 0 to {vocab_size - 1}"],
            )
        self.params = params
        self.logprobs: list[TokenLogprob] = []
        self._n_logprobs = n_logprobs
        self._counts: Counter[int] = Counter()  # of sampled tokens, where it matters
        self.vocab_size = vocab_size
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        self._rng = np.random.Generator(np.random.PCG64(self.seed))
        self._scaled: NDArray[np.float64] = np.empty(vocab_size, np.float64)

    def sample(
        self, logits: NDArray[np.float32], history: Sequence[int] = (), masked: NDArray[np.float32] | None = None
    ) -> int:
        """Chooses the next token id by `logits` (vocab_size,). history: ids of prompt and output so far.

        masked: the logits with -inf where a constraint rules a token out; `logprobs` are those of `logits`. A tie
        goes to the lowest id. Raises EdgeKVError for logits of another shape, or without a finite maximum.
        """
        if logits.shape != (self.vocab_size,):
            raise EdgeKVError(f"logits have shape {logits.shape}: this sampler is for {self.vocab_size} tokens")
        changed = adjust_logits(logits if masked is None else masked, self.params, history, self._counts)
        token = self._choose(changed)
        if self.params.counts:
            self._counts[token] += 1
        if self._n_logprobs is not None:
            self.logprobs.append(token_logprob(logits, token, self._n_logprobs))
        return token

    def _choose(self, logits: Any) -> int:
        """Chooses an id by logits (vocab,) of the host or of a device."""
        ids = None
        if not isinstance(logits, np.ndarray):
            ids, logits = _from_device(logits, self.params.top_k if self.params.temperature else 1)
        chosen = int(np.argmax(logits))  # NaN counts as the largest
        _require_finite(float(logits[chosen]))
        if self.params.temperature:
            candidates, weights = self._candidates(logits, float(logits[chosen]))
            sums = np.cumsum(weights)
            chosen = int(np.searchsorted(sums, self._rng.random() * sums[-1], side="right"))
            chosen = chosen if candidates is None else int(candidates[chosen])
        return chosen if ids is None else int(ids[chosen])

    def settings(self) -> dict[str, Any]:
        """Returns every parameter by its name, for reports, with the seed in use."""
        return self.params.as_dict() | {"seed": self.seed}

    def state(self) -> dict[str, Any]:
        """Returns the random generator's state as JSON, from which `load_state` continues the series."""
        counts = {"counts": sorted(self._counts.items())} if self._counts else {}
        return {"seed": self.seed, "generator": self._rng.bit_generator.state, **counts}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues the series of a `state`. Raises EdgeKVError, and changes nothing, where it is none."""
        generator = np.random.PCG64()
        try:
            seed = int(state["seed"])
            generator.state = state["generator"]
            counts = Counter({operator.index(token): operator.index(n) for token, n in state.get("counts", ())})
            if any(not 0 <= token < self.vocab_size or n < 0 for token, n in counts.items()):
                raise ValueError(f"counts {counts!r:.60}")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise EdgeKVError(
                f"the saved sampler state is damaged ({error!r}): start a new session instead"
            ) from None
        self.seed, self._counts = seed, counts
        self._rng = np.random.Generator(generator)

    def _candidates(
        self, logits: NDArray[Any], largest: float
    ) -> tuple[NDArray[np.int64] | None, NDArray[np.float64]]:
        """Returns the ids that pass the filters (None: all), and their probabilities times a common factor."""
        params, scaled = self.params, self._scaled[: logits.size]
        np.subtract(logits, largest, out=scaled, dtype=np.float64)
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
            np.divide(scaled, params.temperature, out=scaled)
        ids = None
        if params.top_k is not None and params.top_k < logits.size:
            ids = _top_k(scaled, params.top_k)
            scaled = scaled[ids]
        weights = np.exp(scaled, out=scaled)
        if params.top_p < 1:
            kept = _nucleus(weights, params.top_p)
            ids, weights = kept if ids is None else ids[kept], weights[kept]
        if params.min_p > 0:
            kept = np.flatnonzero(weights >= params.min_p)  # the best token's weight is 1
            ids, weights = kept if ids is None else ids[kept], weights[kept]
        return ids, weights


def open_sampler(
    vocab_size: int,
    sampling: SamplingParams | Sampler | None,
    settings: Settings,
    defaults: SamplingParams,
) -> Sampler:
    """Makes the sampler for parameters of `Session.generate`; settings not given are those of ``defaults``.

    Raises ConfigError (field sampling) for ``sampling`` together with settings.
    """
    unset = [name for name in ("temperature", "seed") if settings.get(name) is None]
    given: dict[str, Any] = {name: value for name, value in settings.items() if name not in unset}
    if sampling is None:
        sampling = dataclasses.replace(defaults, **given)
    elif given:
        name = next(iter(given))
        problem = f"{name} is given beside it: leave one out, as SamplingParams have a {name} of their own"
        raise ConfigError(problem, field="sampling", value=sampling)
    return sampling if isinstance(sampling, Sampler) else Sampler(sampling, vocab_size)


def continue_sampler(last: Sampler | None, params: SamplingParams) -> SamplingParams | Sampler:
    """Returns the last text's sampler, whose random numbers go on, if it has these settings; else the settings."""
    return last if last is not None and last.params == params else params


def _top_k(scores: Any, k: int) -> Any:
    """Returns the ascending indices (k,) of the k largest scores (n,), of equals the lower ones."""
    border = scores[np.argpartition(scores, -k)[-k]]
    above = np.flatnonzero(scores > border)
    ties = np.flatnonzero(scores == border)[: k - above.size]
    return np.sort(np.concatenate((above, ties)))


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Returns the indices of the fewest largest weights (n,) whose sum is top_p of the total, largest first."""
    total = weights.sum()
    # All weights below this floor add up to less than 1 - top_p, so none of them is needed or sorted.
    floor = (1 - top_p) * total / weights.size
    likely = np.flatnonzero(weights >= floor)
    order = likely[np.argsort(-weights[likely], kind="stable")]
    return order[: 1 + int(np.searchsorted(np.cumsum(weights[order]), top_p * total))]
