"""Bits by need: a model's heads measured once, on a text that ships with edgekv, and remembered."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from edgekv.cache_folder import Memo
from edgekv.checkpoint.shipped import shipped
from edgekv.decoder.decoder import Decoder
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.by_need import FIT_TOKENS, LEAST_FIT_TOKENS, HeadNoise, NoiseProbe
from edgekv.kvcache.planes import PlanesKnobs
from edgekv.kvcache.recurrent import open_layers
from edgekv.machine import blas_threads
from edgekv.session.model import Model
from edgekv.tokenizer import Tokenizer
from edgekv.types import TaskProgress

TEXT = "demo/prose.txt"
TASK = "bits by need (once per model)"
FORMAT = 3


def give_heads_bits(
    spec: CacheSpec,
    model: Model,
    weights: str,
    decoder: Decoder,
    tokenizer: Tokenizer | None,
    progress: TaskProgress | None = None,
) -> CacheSpec:
    """The scheme with the bits of every head in its knobs, where these are to be given out by need.

    Measured on the first `FIT_TOKENS` of `TEXT`, once for each model, adapter and format of ``weights``. Without
    a tokenizer, with too few positions or without the text the scheme stays as it is: heads then have bits by
    their order alone.
    """
    knobs = spec.knobs
    if not (isinstance(knobs, PlanesKnobs) and knobs.wants_fit):
        return spec
    windows = [model.config.layer_windows[i] for i in model.config.attending]
    memo = Memo(f"bits/{model.adapted_identity}-{weights}.json", FORMAT)
    noise = _noise(memo.read())
    if noise is None:
        tokens = _tokens(model, tokenizer)
        if len(tokens) < LEAST_FIT_TOKENS:
            return spec
        noise = measure(decoder, tokens, progress)
        memo.keep({name: array.tolist() for name, array in vars(noise).items()})
    return dataclasses.replace(spec, knobs=knobs.with_bits(noise, windows, model.config.head_dim))


def measure(decoder: Decoder, tokens: list[int], progress: TaskProgress | None = None) -> HeadNoise:
    """What each head's noise does, as the decoder reads the tokens."""
    probes = open_layers(CacheSpec(NoiseProbe, None), decoder.config, len(tokens))
    for probe in probes:
        probe.allocate(decoder.kernels, decoder.workspace)
    layers = None if progress is None else lambda done, total: progress(TASK, done, total)
    with blas_threads(decoder.threads):
        decoder.prefill(decoder.embed(tokens, 0), probes, layers)
    layers_noise = [probe.noise for probe in probes if isinstance(probe, NoiseProbe)]
    return HeadNoise(*map(np.stack, zip(*layers_noise, strict=True)))


def _tokens(model: Model, tokenizer: Tokenizer | None) -> list[int]:
    """The text's first ones, as many as the fit reads and the model can."""
    path = shipped(TEXT)
    if tokenizer is None or path is None:
        return []
    text = path.read_text(encoding="utf-8")[: 16 * FIT_TOKENS]
    return list(tokenizer.encode(text))[: min(FIT_TOKENS, model.config.max_positions)]


def _noise(remembered: dict[str, Any] | None) -> HeadNoise | None:
    return None if remembered is None else HeadNoise(**{name: np.array(rows) for name, rows in remembered.items()})
