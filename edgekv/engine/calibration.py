"""Calibration: rounds a model's weights with a text, for `edgekv quantize --calibrate`."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from edgekv.engine.cpu import CpuBackend
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import open_tokenizer
from edgekv.engine.model import Model
from edgekv.errors import ConfigError
from edgekv.kernels import numba_kernels
from edgekv.machine import all_cores, blas_threads
from edgekv.text import Tokenizer
from edgekv.types import I64
from edgekv.weights.checkpoint_weights import CheckpointWeights
from edgekv.weights.formats import WeightFormat
from edgekv.weights.rounding import CalibratingOps
from edgekv.weights.store import Write

VERSION = 3  # of the rounding: another one makes other weights
WINDOW = 2048  # tokens of a window
MAX_TOKENS, MIN_TOKENS = 32768, 4096  # of all windows
MAX_WORK = 6144 * 1_000_000_000  # tokens times weights, so that a large model takes minutes, too
CHARACTERS = 16  # of the text for each token of a window: more than any tokenizer takes


class Calibration:
    """The rounding of a checkpoint with a text; an instance is a `Rounding` of weights/store.py.

    weights: the checkpoint's, with an identity that depends on the text. note: for store.json.
    """

    def __init__(self, model: Model, form: WeightFormat, text: str) -> None:
        """Raises ConfigError (field calibrate) for weights that it can't round, or too short a text."""
        config = model.config
        if not any(form.of(name).rotated for name in model.arch.linears()):
            advice = "choose {weights:q4}, or leave {calibrate} out"
            raise _refusal(f"these are to be {form.name}", advice)
        if not isinstance(model.weights, CheckpointWeights):
            raise _refusal(f"{model.path} is a store, rounded already; give the original checkpoint")
        if any(config.layer_recurrences) or config.experts is not None:
            raise _refusal(f"{config.model_type} has layers that carry a state, or experts; leave it out")
        if model.adapter:
            raise _refusal(f"{model.adapter.path} was trained for another cache; give one of them")
        n, elements = min(WINDOW, config.max_positions), sum(a.n_elements for a in model.arch.linears().values())
        most = min(MAX_TOKENS, max(MIN_TOKENS, MAX_WORK // elements))
        self._windows = windows(open_tokenizer(model), text, n, max(1, most // n))
        if not len(self._windows):
            raise _refusal(f"the text has fewer than {n} tokens, one window; give up to {most} tokens")
        digest = hashlib.sha256(self._windows.tobytes()).hexdigest()[:16]
        self.note = f"{self._windows.size} tokens {digest}"
        identity = hashlib.sha256(f"{model.identity}+calibrated {VERSION} {digest}".encode()).hexdigest()[:16]
        self.weights = CheckpointWeights(
            dataclasses.replace(model.weights.source, identify=lambda progress: identity), model.arch
        )

    def __call__(self, form: WeightFormat, write: Write) -> None:
        """Rounds the weights and writes them, layer by layer, with all windows read exactly and rounded."""
        ops = CalibratingOps(self.weights, form, write)
        n = self._windows.shape[1]
        decoder = Decoder(CpuBackend(self.weights, ops, numba_kernels(), all_cores()), n)
        with blas_threads(decoder.threads):
            x = np.concatenate([decoder.embed(window, 0) for window in self._windows])
            decoder.head(decoder.read_together(np.concatenate([x, x]), n))


def _refusal(reason: str, advice: str = "or leave {calibrate} out") -> ConfigError:
    what = "a text rounds a checkpoint's dense layers to q2 to q5, and is read with a plain cache"
    return ConfigError(f"{what}: {reason}", field="calibrate", advice=advice)


def windows(tokenizer: Tokenizer, text: str, n: int, most: int) -> I64:
    """Returns token ids (m, n) of up to ``most`` windows of n tokens, of a long text from all over it."""
    if len(text) <= most * CHARACTERS * n:
        tokens = tokenizer.encode(text)
        rows = [tokens[a : a + n] for a in range(0, len(tokens) - n + 1, n)]
        rows = rows[:: max(1, len(rows) // most)][:most]
    else:
        starts = [i * len(text) // most for i in range(most)]
        encoded = [tokenizer.encode(text[start : start + CHARACTERS * n]) for start in starts]
        rows = [tokens[:n] for tokens in encoded if len(tokens) >= n]
    return np.array(rows, np.int64).reshape(len(rows), n)
