"""Errors a user can act on: one line naming the value, what is accepted and what to do. The CLI exits with 2."""


class EdgeKVError(Exception):
    """Base of every error that edgekv raises on purpose."""


class CheckpointError(EdgeKVError):
    """A model file is missing, damaged, or does not hold what its config promises."""


class ConfigError(EdgeKVError):
    """A config.json or a setting is missing, contradictory or unsupported."""


class TokenizerError(EdgeKVError):
    """No usable tokenizer was found, or a tokenizer file is damaged."""


class CacheError(EdgeKVError):
    """A KV scheme is unknown, its knobs are wrong, or an operation is impossible for it."""


class ContextError(EdgeKVError):
    """A prompt or a context length does not fit the model or the session."""


class ImageError(EdgeKVError):
    """An image can't be read, or the model can't see it."""


class SessionError(EdgeKVError):
    """A session file is missing, damaged, foreign, or belongs to another model or scheme."""


class MemoryBudgetError(EdgeKVError):
    """The asked weights, cache and scratch do not fit this machine's memory."""


class PowerError(EdgeKVError):
    """Power can't be measured as asked: no sensor, no permission, or a log that can't be used."""
