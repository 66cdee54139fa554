"""What `draft` asks for; and a small model of the same vocabulary that guesses for a larger one."""

from __future__ import annotations

from collections.abc import Sequence

from edgekv.errors import CheckpointError, ConfigError
from edgekv.kernels.memory import to_host
from edgekv.session.drafts import ROW_COST, DraftLength, Drafts, NGram
from edgekv.session.model import Model
from edgekv.session.opening import LoadedModel, load_model, open_model
from edgekv.session.options import LoadOptions
from edgekv.session.sampling import Sampler
from edgekv.session.sampling_params import SamplingParams
from edgekv.types import F32, TaskProgress

NONE, AUTO = "none", "auto"


class DraftModel(Drafts):
    """The next tokens by another model, which reads the same text into a dense cache of its own.

    A token is drawn as the sampler will draw it, with the same random numbers: where the two models find the same
    tokens likely, they draw the same one.

    vocab_size: tokens that both models know. cost: of one of its tokens, in passes of the model it guesses for.
    """

    def __init__(self, loaded: LoadedModel, vocab_size: int, cost: float) -> None:
        self.name = loaded.model.path.name
        self._loaded, self._vocab_size, self._cost = loaded, vocab_size, cost
        self._runner = loaded.new_runner()
        self._n_same = 0  # tokens that both conversations are known to begin with
        self._estimate = DraftLength(ROW_COST + cost)

    @property
    def nbytes(self) -> int:
        return self._runner.state.nbytes

    @property
    def weights_bytes(self) -> int:
        return self._runner.decoder.linear.weights_bytes

    def begin(self, tokens: Sequence[int]) -> None:
        self._n_same = 0
        self._estimate = DraftLength(ROW_COST + self._cost)
        if 0 < len(tokens) <= self._runner.ctx:
            self._logits(tokens)

    def propose(self, tokens: Sequence[int], most: int, sampler: Sampler | None) -> list[int]:
        runner = self._runner
        n = self._estimate.length(min(most, runner.ctx - len(tokens)))
        if not n:
            return []
        sampler = self._twin(sampler)
        logits = self._logits(tokens)
        guesses: list[int] = []
        while True:
            guesses.append(sampler.sample(to_host(logits)[: self._vocab_size], runner.tokens))
            runner.add(guesses[-1])
            if len(guesses) == n:
                return guesses
            logits = runner.next_logits()

    def learn(self, n_checked: int, n_right: int) -> None:
        self._estimate.learn(n_checked, n_right)

    def fork(self) -> DraftModel:
        return DraftModel(self._loaded, self._vocab_size, self._cost)

    def _logits(self, tokens: Sequence[int]) -> F32:
        """(vocab,) behind the tokens, of which those are read that it has not read yet."""
        state, same = self._runner.state, self._n_same
        while same < min(len(state.tokens), len(tokens) - 1) and state.tokens[same] == tokens[same]:
            same += 1
        state.rewind(same)
        logits: F32 = self._runner.append(tokens[same:], [])[0]
        self._n_same = len(tokens)
        return logits

    def _twin(self, sampler: Sampler | None) -> Sampler:
        """A sampler with the same settings that will draw the same random numbers."""
        twin = Sampler(sampler.params if sampler else SamplingParams(), self._vocab_size)
        if sampler:
            twin.load_state(sampler.state())
        return twin


def open_drafts(options: LoadOptions, loaded: LoadedModel, progress: TaskProgress | None = None) -> Drafts | None:
    """What ``draft`` asks for, for a session that is opened; None: nothing.

    Raises ConfigError (field draft) for a model of another vocabulary, and what `Session.load` raises for one that
    can't be loaded.
    """
    name = str(options.draft)
    carries = bool(loaded.model.config.recurrences)
    if name == NONE or (name == AUTO and (loaded.device != "cpu" or options.slots > 1 or carries)):
        return None
    require_way_back(name, loaded.model)
    if name in (NGram.name, AUTO):
        return NGram()
    accepted = [NONE, NGram.name, AUTO, "a smaller model of the same vocabulary"]
    try:
        model = open_model(options.draft, LoadOptions())
    except CheckpointError as error:
        if error.field != "model":
            raise
        raise ConfigError(
            f"draft={name!r} is no way to guess, and no model; accepted: {', '.join(accepted)}",
            field="draft",
            value=name,
            accepted=accepted,
        ) from error
    require_way_back(name, model)
    ctx = min(loaded.plan.ctx, model.config.max_positions)
    small = LoadOptions(kv="dense", ctx=ctx, device=loaded.device, threads=options.threads)
    plan = loaded.plan
    beside = {f"caches and scratch of {loaded.model.name}": sum(plan.parts().values()) - plan.parts()["weights"]}
    draft = load_model(small, model, progress=progress, beside=beside)
    require_same_vocabulary(loaded, draft)
    cost = draft.decoder.weights.token_bytes / loaded.decoder.weights.token_bytes
    return DraftModel(draft, min(model.config.vocab_size, loaded.model.config.vocab_size), cost)


def require_way_back(draft: str, model: Model) -> None:
    """ConfigError where wrong guesses can't be taken back from a model."""
    if model.config.recurrences:
        raise ConfigError(
            f"draft={draft!r}: layers of {model.config.model_type} carry a state, from which tokens can't be "
            f"taken back; use {NONE!r}",
            field="draft",
            value=draft,
            accepted=[NONE, AUTO],
        )


def require_same_vocabulary(loaded: LoadedModel, draft: LoadedModel) -> None:
    """ConfigError unless a token means the same to both models."""
    one, other = loaded.tokenizer, draft.tokenizer
    if one is None or other is None:
        same = loaded.model.config.vocab_size == draft.model.config.vocab_size
    else:
        same = one.vocab_size == other.vocab_size and all(
            one.piece(token) == other.piece(token) for token in range(one.vocab_size)
        )
    if not same:
        raise ConfigError(
            f"draft={draft.model.path.name!r}: its vocabulary is not that of {loaded.model.path.name}; give a "
            f"smaller model of the same family, {NGram.name!r} or {NONE!r}",
            field="draft",
            value=str(draft.model.path),
            accepted=[NONE, AUTO, NGram.name, "a model of the same vocabulary"],
        )
