"""H2O: the tokens that attracted most attention so far, and the latest ones."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from edgekv.kvcache.cache import Geometry
from edgekv.kvcache.knobs import Knobs, number, share_of_context
from edgekv.papers.evicting import LowestFirst


@dataclasses.dataclass(frozen=True)
class H2OKnobs(Knobs):
    """What `h2o` can be set to.

    budget: float, default 1024. Tokens kept: above 1 a number, up to 1 a fraction of the context.
    recent: float, default 0.5. Share of the budget that the latest tokens have, 0 to 1.
    """

    scheme: ClassVar[str] = "h2o"

    budget: float = share_of_context(1024.0)
    recent: float = number(0.5, 0, 1)


class H2O(LowestFirst):
    """Accumulated attention decides, per KV head: slots * (4 * head_dim + 8) bytes.

    H2O (Zhang et al. 2023), algorithm 1. A token's mass is the sum of the softmax weights it has received from
    all queries since it arrived, those of the prompt included, over the query heads of the group (the paper has
    no groups). The latest ``recent`` share of the budget stays. What H1B-KV's tables call SparseLLM is this at
    an eighth of dense's bytes: budget=0.125.
    """

    name = "h2o"
    paper = "H2O, FIER's baseline; H1B-KV's SparseLLM"
    summary = "the 512 tokens of most accumulated attention and the latest 512 in f16"
    tradeoff = "tokens that no query has needed yet; favours early tokens"
    Knobs = H2OKnobs
    decay = 1.0

    def __init__(self, geometry: Geometry, knobs: H2OKnobs) -> None:
        super().__init__(geometry, knobs)
        self.recent = max(1, round(knobs.recent * self.slots))
