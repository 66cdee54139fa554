"""1-bit sketched keys and f16 values: what H1B-KV compares against as Loki."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from edgekv.papers.h1b import H1B, SketchKnobs


@dataclasses.dataclass(frozen=True)
class SignKeysKnobs(SketchKnobs):
    """Those of `SketchKnobs`."""

    scheme: ClassVar[str] = "sign_keys"


class SignKeys(H1B):
    """H1B-KV's sketched keys, values in f16: sketch_bits/8 + 2 * head_dim bytes per token and KV head.

    The baseline "Loki (1-bit Key)" of H1B-KV's Tables I and II, and ``h1b:keys_only=1`` under its name there; tau
    as in `H1B`. The published Loki (arXiv 2406.02542) is something else: it ranks tokens by the leading principal
    components of the keys and attends to the top k, and quantises nothing.
    """

    name = "sign_keys"
    aliases = ("loki1",)
    paper = "H1B-KV's 1-bit-key baseline"
    summary = "1-bit Gaussian sketches of keys and queries, f16 values (the published Loki is PCA top-k)"
    tradeoff = "as h1b, untuned, perplexity about 4 times dense's; the values' bytes"
    Knobs = SignKeysKnobs
