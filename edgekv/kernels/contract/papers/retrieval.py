"""Reading only some tokens: indexes of keys, and tokens side by side.

Shapes and token ranges are those of `attention`, beside this.
"""

from typing import Protocol

from edgekv.types import I64, U16, U32


class RetrievalKernels(Protocol):
    """What a backend provides for caches that read a choice of their tokens."""

    def gather_tokens(self, store: U16, tokens: I64, out: U16) -> None:
        """out[g, i] (G, K, D) = store[g, tokens[g, i]] of store (G, cap, D), for the tokens (G, n <= K)."""

    def encode_fier(self, keys: U16, group: int, minmax: bool, signs: U32, levels: U16, b0: int, b1: int) -> None:
        """Indexes groups b0..b1 of `group` tokens (a multiple of 32) of keys (G, cap, D) float16 bits.

        levels (G, groups, 2, D), float16 bits: per group and channel a centre and a step. They are the mean and
        the mean absolute deviation from it, each added up in the order of the tokens, or with `minmax` the middle
        and half the range. signs (G, words, D): bit i of word w of channel d says whether token 32 * w + i is at
        or above the (rounded) centre, so that it is taken as centre + step, else as centre - step: FIER,
        equation 5 and algorithm 1.
        """

    def encode_pages(self, keys: U16, page: int, bounds: U16, b0: int, b1: int) -> None:
        """bounds[:, b] (G, pages, 2 * D) = the largest, then the smallest key of page b0 <= b < b1, per channel.

        keys (G, cap, D) and bounds are float16 bits. A page's score for a query q is the sum over channels of
        the larger product (Quest): that of max(q, 0) beside min(q, 0) with its bounds.
        """
