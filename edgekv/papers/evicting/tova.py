"""TOVA: whatever the latest query attended to least goes."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from edgekv.kvcache.knobs import Knobs, flag, share_of_context
from edgekv.papers.evicting import LowestFirst
from edgekv.types import F32


@dataclasses.dataclass(frozen=True)
class TovaKnobs(Knobs):
    """What `tova` can be set to.

    budget: float, default 1024. Tokens kept: above 1 a number, up to 1 a fraction of the context.
    per_head: bool, default False. Whether each KV head chooses its own tokens instead of the layer.
    """

    scheme: ClassVar[str] = "tova"

    budget: float = share_of_context(1024.0)
    per_head: bool = flag(False)


class Tova(LowestFirst):
    """The weights of the latest query alone decide: slots * (4 * head_dim + 8) bytes per KV head.

    TOVA (Oren et al. 2024, "Transformers are multi-state RNNs"). As in the paper the weights are averaged over
    all heads of the layer, so that all keep the same tokens; ``per_head`` averages over a KV head's own group
    (measured on llama-40m at 256 tokens: perplexity x1.073 in place of x1.052).
    """

    name = "tova"
    paper = "TOVA, FIER's baseline"
    summary = "the 1,024 tokens that outlived each query's choice of the least attended one, in f16"
    tradeoff = "tokens that a single query has no use for"
    Knobs = TovaKnobs
    decay = 0.0

    def _observe(self, q: F32, p: F32) -> None:
        super()._observe(q, p)
        if self.evicts:
            self._share(self.arrays["mass"][:, : self.n_used])

    def _admit(self, keys: F32, values: F32, mass: F32) -> None:
        self._share(mass)
        super()._admit(keys, values, mass)

    def _share(self, mass: F32) -> None:
        if not self.knobs.per_head:
            mass[:] = mass.sum(axis=0)
