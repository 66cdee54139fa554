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


class MemoryBudgetError(EdgeKVError):
    """The asked weights, cache and scratch do not fit this machine's memory."""
