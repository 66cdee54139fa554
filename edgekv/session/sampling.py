"""From logits to the next token id, and from a stream of text to the place where a stop string ends it."""

import math
import operator
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from edgekv.checks import Count, Natural, checked
from edgekv.errors import ConfigError, EdgeKVError
from edgekv.session.cuda_sampling import choose
from edgekv.session.logprobs import TokenLogprob, token_logprob
from edgekv.session.penalties import adjusted
from edgekv.session.sampling_params import SamplingParams

Stop = Annotated[str, Meta(min_length=1, description="a text that is not empty")]
Stops = Stop | Sequence[Stop]


class Sampler:
    """Chooses tokens by `params`. Same seed and logits, same tokens: each sampler owns its generator (PCG64).

    Filters run in the order of transformers: penalty, temperature, top-k, top-p, min-p. llama.cpp puts the
    temperature last, so its top-p and min-p see other probabilities; with transformers' order the settings
    published with a model mean what its authors measured.

    `seed` is the seed really used, also where `params.seed` is None. With `n_logprobs`, 0 or more, `logprobs` has
    an entry per sampled token: its log probability, and those of so many likeliest tokens. Raises ConfigError for
    a bias of a token that the vocabulary lacks.
    """

    @checked(params="sampling")
    def __init__(self, params: SamplingParams, vocab_size: Count, n_logprobs: Natural | None = None) -> None:
        unknown = [token for token in params.logit_bias or () if token >= vocab_size]
        if unknown:
            raise ConfigError(
                f"logit_bias has token {unknown[0]}: the model's ids run from 0 to {vocab_size - 1}",
                field="logit_bias",
                value=unknown[0],
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
        """The next token id for `logits` (vocab_size,) after `history`, the ids of prompt and output so far.

        masked: the logits with -inf where a constraint rules a token out; `logprobs` are those of `logits`. A tie
        goes to the lowest id, in greedy choice and at the edge of top-k and top-p. `logits` is not changed. Raises
        EdgeKVError for logits of another shape, or without a finite maximum.
        """
        if logits.shape != (self.vocab_size,):
            raise EdgeKVError(
                f"logits have shape {logits.shape}, not {(self.vocab_size,)}: "
                "the sampler was made for another vocabulary"
            )
        changed = adjusted(logits if masked is None else masked, self.params, history, self._counts)
        on_host = isinstance(changed, np.ndarray)
        token = self._choose(changed) if on_host else choose(changed, self.params, self._random())
        if self.params.counts:
            self._counts[token] += 1
        if self._n_logprobs is not None:
            self.logprobs.append(token_logprob(logits, token, self._n_logprobs))
        return token

    def _random(self) -> float:
        return self._rng.random() if self.params.temperature else 0.0

    def _choose(self, logits: NDArray[np.float32]) -> int:
        best = int(np.argmax(logits))  # NaN counts as the largest
        if not math.isfinite(logits[best]):
            raise EdgeKVError(
                f"the largest logit is {logits[best]}: "
                "the weights are damaged or a computation overflowed; check the model file"
            )
        if self.params.temperature == 0:
            return best
        ids, weights = self._candidates(logits, float(logits[best]))
        cumulative = np.cumsum(weights)
        chosen = int(np.searchsorted(cumulative, self._rng.random() * cumulative[-1], side="right"))
        return chosen if ids is None else int(ids[chosen])

    def settings(self) -> dict[str, Any]:
        """Every parameter by its name, for reports; seed is the one really used."""
        return self.params.as_dict() | {"seed": self.seed}

    def state(self) -> dict[str, Any]:
        """The random generator's state, for JSON; `load_state` continues the same series."""
        counts = {"counts": sorted(self._counts.items())} if self._counts else {}
        return {"seed": self.seed, "generator": self._rng.bit_generator.state, **counts}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state()`. Raises EdgeKVError where it is not one, and changes nothing then."""
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
        self, logits: NDArray[np.float32], largest: float
    ) -> tuple[NDArray[np.int64] | None, NDArray[np.float64]]:
        """Ids that pass the filters (None: all) and their weights, probabilities but for a common factor."""
        params, scaled = self.params, self._scaled
        np.subtract(logits, largest, out=scaled, dtype=np.float64)
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
            np.divide(scaled, params.temperature, out=scaled)
        ids = None
        if params.top_k is not None and params.top_k < self.vocab_size:
            ids = _largest_k(scaled, params.top_k)
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
    vocab_size: int, sampling: SamplingParams | Sampler | None, temperature: float | None, seed: int | None
) -> Sampler:
    """The sampler that the parameters of `Session.generate` ask for.

    Raises ConfigError (field sampling) for ``sampling`` together with ``temperature`` or ``seed``.
    """
    if sampling is None:
        sampling = SamplingParams(temperature=0.0 if temperature is None else temperature, seed=seed)
    elif temperature is not None or seed is not None:
        name = "seed" if temperature is None else "temperature"
        raise ConfigError(
            f"`sampling` and `{name}` are both given: leave one out, as `sampling` has a {name} of its own",
            field="sampling",
            value=sampling,
        )
    return sampling if isinstance(sampling, Sampler) else Sampler(sampling, vocab_size)


def continued(last: Sampler | None, params: SamplingParams) -> SamplingParams | Sampler:
    """The last text's sampler if it has these settings: its random numbers go on; else the settings."""
    return last if last is not None and last.params == params else params


def _largest_k(scores: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    """Ascending indices of the k largest scores, without a sort of them all."""
    border = scores[np.argpartition(scores, -k)[-k]]
    above = np.flatnonzero(scores > border)
    ties = np.flatnonzero(scores == border)[: k - above.size]
    return np.sort(np.concatenate((above, ties)))


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Indices of the fewest largest weights whose sum is at least top_p of the total, largest first."""
    total = weights.sum()
    # All weights below this floor add up to less than 1 - top_p, so none of them is needed or sorted.
    floor = (1 - top_p) * total / weights.size
    likely = np.flatnonzero(weights >= floor)
    order = likely[np.argsort(-weights[likely], kind="stable")]
    return order[: 1 + int(np.searchsorted(np.cumsum(weights[order]), top_p * total))]


class StopMatcher:
    """Finds stop strings in text that arrives in pieces, and holds back what could be the start of one.

    The stop string completed first ends the text, wherever the pieces are cut; of two completed by the same
    character, the longer one.
    """

    def __init__(self, stops: Stops) -> None:
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece; returns (text safe to print, whether a stop string has been met).

        The stop string itself and all that follows it are never returned.
        """
        if self.stopped:
            return "", True
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]], True
        safe = len(text) - self._possible_start(text)
        self._held = text[safe:]
        return text[:safe], False

    def flush(self) -> str:
        """The text still held back, once no more will come."""
        text, self._held = self._held, ""
        return text

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
