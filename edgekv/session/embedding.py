"""A text as one vector: the mean of its tokens' last hidden states."""

from __future__ import annotations

import numpy as np

from edgekv.decoder.decoder import Decoder
from edgekv.errors import ContextError
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.choice import DEFAULT
from edgekv.linear.reference import NumpyOps
from edgekv.session.caches import open_caches
from edgekv.types import F32


def embed(decoder: Decoder, ids: list[int], ctx: int) -> F32:
    """(hidden_size,) float32 of length 1, of the 1 to ``ctx`` token ids of a text; nothing is kept.

    As sentence embeddings are made from decoders that were not trained for it (mean pooling over the states behind
    the final norm): texts can be compared by their inner product, within one model. Raises ContextError for fewer
    ids, or more.
    """
    if not 1 <= len(ids) <= ctx:
        raise ContextError(
            f"the text has {len(ids)} tokens; accepted: 1 to ctx={ctx}",
            field="text",
            value=len(ids),
            accepted=[f"1 to {ctx} tokens"],
        )
    caches = open_caches(decoder, CacheSpec.parse(DEFAULT), len(ids))
    hidden = decoder.prefill(decoder.embed(ids, 0), caches)
    weights = decoder.weights
    states: F32 = np.asarray(weights.arch.final_norm(NumpyOps(weights), hidden), np.float32)
    mean = states.mean(axis=0)
    vector: F32 = mean / np.linalg.norm(mean)
    return vector
