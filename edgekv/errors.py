"""Errors a user can act on: one line naming the value, what is accepted and what to do. The CLI exits with 2.

Messages name a parameter as `name=value`, or as `name` in backticks where no value follows: the command line
writes its option instead.
"""

from collections.abc import Iterable


class EdgeKVError(Exception):
    """Base of every error that edgekv raises on purpose.

    field: the parameter that is to blame, as `edgekv.LoadOptions` or a function has it ("ctx", "kv_budget"), or
    None. value: what it was given. accepted: what it takes, a name or a phrase each; empty where the message says
    it all.
    """

    def __init__(
        self, message: str, *, field: str | None = None, value: object = None, accepted: Iterable[str] = ()
    ) -> None:
        super().__init__(message)
        self.field, self.value, self.accepted = field, value, tuple(accepted)


class CheckpointError(EdgeKVError):
    """A model file is missing, damaged, or does not hold what its config promises."""


class ConfigError(EdgeKVError):
    """A config.json or a setting is missing, contradictory or unsupported."""


class TokenizerError(EdgeKVError):
    """No usable tokenizer was found, or a tokenizer file is damaged."""


class CacheError(EdgeKVError):
    """A KV scheme is unknown, its options are wrong, or an operation is impossible for it."""


class ContextError(EdgeKVError):
    """A prompt or a context length does not fit the model or the session."""


class ImageError(EdgeKVError):
    """An image can't be read, or the model can't see it."""


class SessionError(EdgeKVError):
    """A session can't go on: its file is damaged, or of another model or scheme; it is in use or closed."""


class MemoryBudgetError(EdgeKVError):
    """The asked weights, cache and scratch do not fit this machine's memory."""


class PowerError(EdgeKVError):
    """Power can't be measured as asked: no sensor, no permission, or a log that can't be used."""


def unknown(error: type[EdgeKVError], field: str, value: object, accepted: Iterable[str]) -> EdgeKVError:
    """An ``error`` that says which names a parameter takes."""
    names = tuple(accepted)
    message = f"{field}={value!r} is unknown; accepted: {', '.join(names)}"
    return error(message, field=field, value=value, accepted=names)
