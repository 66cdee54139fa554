"""The part of `edgekv.kernels.contract` about a fixed number of slots per KV head, in which tokens come and go.

Shapes and token ranges are those of `attention`, beside this.

mass and positions (G, cap): what a slot's token weighs when
one must leave, and where in the text it stands.
"""

from typing import Protocol

import numpy as np

from edgekv.types import F32, I32, I64, U16


class EvictKernels(Protocol):
    """What a backend provides for caches that evict or demote tokens one by one."""

    def store_token(
        self, k: F32, v: F32, position: int, slots: I64, keys: U16, values: U16, positions: I32
    ) -> None:
        """Stores one token, k and v (G, D), in slot slots[g] of each head of keys and values (G, cap, D).

        Rounded as in `encode_f16`; positions gets its position there.
        """

    def add_attention(self, p: F32, mass: F32, n: int, keep: float) -> None:
        """mass[:, :n] = keep * mass[:, :n] + sum over the rows of p[:, :, :n]; p (G, M, S)."""

    def evict_lowest(self, mass: F32, positions: I32, n: int, visible: int, protected: int, slots: I64) -> None:
        """slots[g] = the one of head g's first n slots with the least mass, which becomes 0.

        The earliest position wins a tie. Positions below `visible` go before any mass, those from `protected` on
        after all; see `ranks`.
        """


def ranks(mass: F32, positions: I32, visible: int, protected: int) -> F32:
    """Numbers in whose order tokens leave, the least first: their mass (G, n), where it is above 0 and finite.

    NaN and what is negative count as 0, infinity as the largest float32. Positions (G, n) below ``visible`` have
    -1, those from ``protected`` on infinity.
    """
    rank: F32 = np.where(mass > 0, np.minimum(mass, np.finfo(np.float32).max), np.float32(0))
    rank[positions < visible], rank[positions >= protected] = -1, np.inf
    return rank
