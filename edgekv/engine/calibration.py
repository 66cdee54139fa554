"""Calibration: rounds a model's weights with a text, for `edgekv quantize --calibrate`, in bits by need.

A layer's need is how far the model's predictions move (KL, on part of the text) if this layer alone gets the
noise of 3-bit rounding (`add_noise`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from functools import partial

import numpy as np

from edgekv.engine.cpu import CpuBackend
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import open_tokenizer
from edgekv.engine.model import Model
from edgekv.errors import ConfigError, EdgeKVError
from edgekv.kernels import numba_kernels
from edgekv.kernels.weight_codes import ROTATED_INPUTS
from edgekv.machine import all_cores, blas_threads
from edgekv.text import Tokenizer
from edgekv.types import F32, I64, TaskProgress
from edgekv.weights import gaussian
from edgekv.weights.checkpoint_weights import CheckpointWeights
from edgekv.weights.formats import ROUTER, ModelFormat, allocate_layer_bits, mean_bits
from edgekv.weights.rounding import STREAMED, CalibratingOps, StreamingOps
from edgekv.weights.store import Write

VERSION = 6  # of the rounding: another one makes other weights
WINDOW = 2048  # tokens of a window
MAX_TOKENS, MIN_TOKENS = 32768, 4096  # of all windows
MAX_WORK = 6144 * 1_000_000_000  # tokens times weights, so that a large model takes minutes, too
NEED_WINDOW, NEED_TOKENS = 1024, (256, 4096)  # tokens of a window, and least and most of all windows
NEED_WORK = 8_000 * 1_000_000_000  # tokens times weights, over all passes
NEED_BITS = 3
LOGITS = 1 << 24  # float32 that KL is computed of
CHARACTERS = 16  # of the text for each token of a window: more than any tokenizer takes


class Calibration:
    """The rounding of a checkpoint with a text, as `choose` has chosen it; a `Rounding` of weights/store.py.

    weights: the checkpoint's, with an identity that depends on the text and the bits. note: for store.json.
    """

    def __init__(self, weights: CheckpointWeights, form: ModelFormat, windows: I64) -> None:
        """windows: token ids (m, n) of the text."""
        self.form, self._windows = form, windows
        digest = hashlib.sha256(windows.tobytes()).hexdigest()[:16]
        self.note = f"{windows.size} tokens {digest}"
        formats = ",".join(form.of(name).name for name in weights.arch.linears())
        facts = f"{weights.source.identity}+calibrated {VERSION} {digest} {formats}"
        identity = hashlib.sha256(facts.encode()).hexdigest()[:16]
        source = dataclasses.replace(weights.source, identify=lambda progress: identity)
        self.weights = CheckpointWeights(source, weights.arch)

    @classmethod
    def choose(cls, model: Model, weights: str, text: str, progress: TaskProgress) -> Calibration:
        """Chooses windows of the text and, for a name such as q3.6, each layer's bits, which takes minutes.

        weights: the format's name. Raises ConfigError (fields calibrate, weights) for weights that it can't round,
        or too short a text.
        """
        config, mean = model.config, mean_bits(weights)
        form = ModelFormat("q4") if mean else model.weight_format(weights)
        if not any(piece.form.rotated for name in model.arch.linears() for piece in form.of(name).pieces):
            problem = f"--calibrate works with q2 to q5 only; --weights {weights} gives {form.name} here"
            raise _refusal(problem, "choose {weights:q4}, or leave {calibrate} out")
        if not isinstance(model.weights, CheckpointWeights):
            raise _refusal(f"{model.path} is a store, rounded already", "give the original checkpoint")
        if any(config.layer_recurrences):
            problem = f"models with recurrent layers ({config.model_type}) can't be rounded with a text"
            raise _refusal(problem, "leave {calibrate} out")
        if model.adapter:
            raise _refusal(f"--calibrate does not go with the adapter {model.adapter.path}; give one of them")
        n, elements = min(WINDOW, config.max_positions), sum(a.n_elements for a in model.arch.linears().values())
        most = min(MAX_TOKENS, max(MIN_TOKENS, MAX_WORK // elements))
        chosen = encode_windows(open_tokenizer(model), text, n, max(1, most // n))
        if not len(chosen):
            raise _refusal(f"the text has fewer than {n} tokens, one window; give up to {most} tokens")
        return cls(model.weights, format_by_need(model.weights, chosen, mean, progress) if mean else form, chosen)

    def __call__(self, form: ModelFormat, write: Write) -> None:
        """Rounds the weights and writes them, layer by layer, while both models read all windows."""
        n = self._windows.shape[1]
        decoder = open_decoder(CalibratingOps(self.weights, form, write), n)
        try:
            with blas_threads(decoder.threads):
                x = embedded(decoder, self._windows)
                decoder.head(decoder.read_together(np.concatenate([x, x]), n))
        except EdgeKVError:  # of activations that are not finite: where weights aren't, it is not the text
            self.weights.require_finite()
            raise


def open_decoder(ops: StreamingOps, n: int) -> Decoder:
    """Opens a decoder for windows of n tokens."""
    return Decoder(CpuBackend(ops.weights, ops, numba_kernels(), all_cores()), n)


def format_by_need(weights: CheckpointWeights, windows: I64, mean: float, progress: TaskProgress) -> ModelFormat:
    """Returns the format with more bits where layers need them, ``mean`` in all; windows: token ids (m, n)."""
    linears, needs = weights.arch.linears(), measure_needs(weights, windows, progress)
    bits = allocate_layer_bits(needs, {name: linears[name].n_elements for name in needs}, mean)
    return ModelFormat(f"q{mean}", tuple((name, f"q{bits[name]}" if name in bits else "f32") for name in linears))


def measure_needs(weights: CheckpointWeights, windows: I64, progress: TaskProgress) -> dict[str, float]:
    """Returns the needs of all linear layers but routers; windows: token ids (m, n)."""
    sizes = {k: linear.n_elements for k, linear in weights.arch.linears().items() if not k.endswith(ROUTER)}
    ops, needs, (least, most) = StreamingOps(weights), dict[str, float](), NEED_TOKENS
    n_tokens = min(most, max(least, 2 * NEED_WORK // (len(sizes) * sum(sizes.values()))))
    n, decoder = min(NEED_WINDOW, n_tokens, windows.shape[1]), open_decoder(ops, windows.shape[1])

    def with_noise(name: str, compute: Callable[[], F32]) -> F32:
        progress("measuring what needs bits", list(sizes).index(name), len(sizes))
        add_noise(matrix := weights.matrix(name), NEED_BITS)
        with ops.using(name, matrix):
            return compute()

    with blas_threads(decoder.threads):
        inputs = [embedded(decoder, spread(windows, n_tokens // n)[:, :n])]
        for i in range(decoder.config.n_layers):
            inputs.append(decoder.read_together(inputs[i], n, i, i + 1))
        rows = slice(None, None, -(-len(inputs[0]) * decoder.config.vocab_size // LOGITS))
        exact = log_softmax(decoder.head(inputs[-1][rows]))
        for i, x in enumerate(inputs[:-1]):
            names = [name for name in sizes if name.startswith(f"{i}.")]
            layer = partial(decoder.read_together, x, n, i, i + 1)
            changed = np.concatenate([with_noise(name, layer) for name in names])
            last = decoder.read_together(changed, n, i + 1)  # of all together: each matrix is read once
            logits = decoder.head(np.concatenate([out[rows] for out in np.split(last, len(names))]))
            needs |= zip(names, map(partial(_divergence, exact), np.split(logits, len(names))), strict=True)
        return needs | {"head": _divergence(exact, with_noise("head", lambda: decoder.head(inputs[-1][rows])))}


def embedded(decoder: Decoder, windows: I64) -> F32:
    """Returns the embeddings (m * n, hidden) of token ids (m, n)."""
    return np.concatenate([decoder.embed(window, 0) for window in windows])


def add_noise(matrix: F32, bits: int) -> None:
    """Adds noise with the statistics of `gaussian.quantize`'s error to weights (rows, columns), in less time.

    The best rounding leaves a mean squared error of E w^2, uncorrelated with the rounded weights. So these
    are (1 - E) w plus uniform noise of variance E (1 - E) w^2, where w^2 is the mean of a block.
    """
    columns, error, rng = matrix.shape[1], gaussian.SQUARED_ERRORS[bits], np.random.default_rng(0)
    for rows in np.array_split(matrix, -(-matrix.size // STREAMED)):
        squares = np.add.reduceat(np.square(rows), np.arange(0, columns, ROTATED_INPUTS), axis=1)
        widths = np.sqrt(squares * np.float32(12 * error * (1 - error) / ROTATED_INPUTS))
        noise = rng.random(rows.shape, np.float32) - np.float32(0.5)
        noise *= np.repeat(widths, ROTATED_INPUTS, axis=1)[:, :columns]
        rows *= np.float32(1 - error)
        rows += noise


def log_softmax(logits: F32) -> F32:
    """Replaces logits (n, vocab) by their log-probabilities."""
    logits -= logits.max(1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
    return logits


def _divergence(exact: F32, logits: F32) -> float:
    """Returns the sum of the KL of logits (n, vocab), which it changes, to exact log-probabilities; 0 to inf."""
    divergence = float(np.einsum("ij,ij->", np.exp(exact), exact - log_softmax(logits)))
    return math.inf if math.isnan(divergence) else max(0.0, divergence)


def _refusal(problem: str, advice: str = "or leave {calibrate} out") -> ConfigError:
    return ConfigError(problem, field="calibrate", advice=advice)


def encode_windows(tokenizer: Tokenizer, text: str, n: int, most: int) -> I64:
    """Returns token ids (m, n) of up to ``most`` windows of n tokens, spread over the text if it is long.

    Each begins with the token with which the model's prompts begin, if there is one.
    """
    if len(text) <= most * CHARACTERS * n:
        tokens = tokenizer.encode(text)
        rows = [tokens[a : a + n] for a in range(0, len(tokens) - n + 1, n)]
    else:
        starts = [i * len(text) // most for i in range(most)]
        encoded = [tokenizer.encode(text[start : start + CHARACTERS * n]) for start in starts]
        rows = [tokens[:n] for tokens in encoded if len(tokens) >= n]
    found = spread(np.array(rows, np.int64).reshape(len(rows), n), most)
    if len(found) and found[0, 0] == tokenizer.bos_id:
        found[:, 0] = found[0, 0]
    return found


def spread(windows: I64, most: int) -> I64:
    """Returns up to ``most`` of the windows (m, n), evenly spaced."""
    n = min(most, len(windows))
    return windows[np.arange(n) * len(windows) // max(1, n)]
