"""CPU time of a token in each family's shape, beside a Llama of the same sizes and bytes, in turns.

usage: python tools/family_speed.py [SHAPE ...]      (default: one of each family)

Random int4 weights, 4 layers, a vocabulary of 32,000, 500 tokens in a dense cache, one thread; the mean of the
fastest 6 of 30 steps by the thread's own clock, which other processes disturb less than the wall's.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from edgekv.checkpoint.shapes import load_shape
from edgekv.decoder.cpu import CpuDecoder
from edgekv.kernels import numba_kernels
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.layer_state import LayerState
from edgekv.linear.formats import WEIGHTS
from edgekv.linear.packed import PackedLinear
from edgekv.linear.random import random_store
from edgekv.machine import blas_threads
from edgekv.models import architecture
from edgekv.models.architecture import Architecture
from edgekv.session.caches import open_caches
from edgekv.types import Threads

SHAPES = (
    *("gemma2-2b", "gemma3-1b", "phi3-mini-4k", "smollm3-3b", "olmo2-1b", "granite3.3-2b", "ministral3-3b"),
    *("lfm2-1.2b", "qwen3.5-0.8b", "qwen3.5-2b", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b"),
)
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
MORE_SIZES = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "max_position_embeddings")
DEPTH, STEPS, FASTEST = 500, 30, 6


def opened(config: dict[str, Any]) -> tuple[CpuDecoder, list[LayerState]]:
    """A decoder of random weights and caches that hold DEPTH tokens."""
    store = random_store(config, WEIGHTS["int4"])
    decoder = CpuDecoder(store, PackedLinear(store, Threads(1, 1)), numba_kernels(1), DEPTH + STEPS, 1)
    caches = open_caches(decoder, CacheSpec.parse("dense"), DEPTH + STEPS)
    with blas_threads(1):
        decoder.prefill(decoder.embed([1] * DEPTH, 0), caches)
    return decoder, caches


def llama_like(config: dict[str, Any]) -> dict[str, Any]:
    """A Llama of the same sizes; where its layers have fewer weights or more, with as much wider an MLP.

    Of experts those count that a token goes through.
    """
    own = architecture(config)
    c = own.config
    sizes = {key: config[key] for key in (*SIZES, *MORE_SIZES) if key in config}
    llama = sizes | {"model_type": "llama", "intermediate_size": c.intermediate_size}
    llama["tie_word_embeddings"] = c.tied_embeddings
    more = _active(own) - _active(architecture(llama))
    llama["intermediate_size"] += round(more / (3 * c.hidden_size * c.n_layers))
    return llama


def _active(arch: Architecture) -> int:
    """Weights of linear layers that a token is multiplied with."""
    return sum(
        linear.n_elements // max(1, linear.n_experts) * (arch.active_experts if linear.n_experts else 1)
        for linear in arch.linears().values()
    )


def with_few_experts(config: dict[str, Any]) -> dict[str, Any]:
    """At most three times as many as a token goes through: the others are not read, but take room."""
    experts = architecture(config).config.experts
    few = min(experts.count, 3 * experts.per_token) if experts else 0
    return config | {key: few for key in ("num_experts", "num_local_experts") if key in config}


def main() -> None:
    for name in sys.argv[1:] or SHAPES:
        config = with_few_experts(load_shape(name, 4) | {"vocab_size": 32000})
        models, times = [opened(each) for each in (config, llama_like(config))], np.empty((2, STEPS))
        for step in range(STEPS):
            for k, (decoder, caches) in enumerate(models):
                with blas_threads(1):
                    begin = time.thread_time()
                    decoder.step(1, caches)
                    times[k, step] = 1e3 * (time.thread_time() - begin)
        own, plain = np.sort(times, axis=1)[:, :FASTEST].mean(axis=1)
        print(f"| `{name}` | {own:.1f} ms | {plain:.1f} ms | x{own / plain:.2f} |", flush=True)


if __name__ == "__main__":
    main()
