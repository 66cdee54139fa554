"""Going back, and going on by replaying: which tokens a cache can take back, and when steps are all alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Rewinding:
    """The part of `LayerState` about tokens that are taken back or replayed. A scheme may say more than this.

    Callers rewind with `rewind`, take drafts back with `advance`, and record steps on a GPU while `is_steady`.
    """

    n_seen: int

    def restart(self, n: int) -> int:
        """After how many tokens computing is best taken up again when all but the first ``n`` are forgotten.

        At most n, which is below `n_seen`. Less where the last of them are to be computed once more.
        """
        return n

    def mark(self, n: int) -> None:
        """The first ``n`` tokens, `n_seen` or more, are what a rewind is likely to leave.

        Most can go back there anyway.
        """
        return

    def truncate(self, n: int, again: int = 0) -> int:
        """Forgets all but the first ``n`` tokens (at most `n_seen`); returns how many it could keep.

        Schemes that can't rewind to the very token keep fewer, and the session computes the rest again. The
        ``again`` tokens that follow will be those that followed before: what is stored of them may be used.
        """
        self.n_seen = n
        return n

    def tentative_tokens(self) -> int:
        """How many of the next tokens, appended by one `attend`, can be taken back as if they had never come.

        `advance` with a negative count does that. 0 where a token has a say in what is kept of others.
        """
        return 0

    def advance(self, n: int) -> None:
        """Counts n tokens that a replayed step appends, where `is_steady` holds; n < 0 takes the latest back.

        What is taken back are tokens within `tentative_tokens`, or counted ones.
        """
        self.n_seen += n

    def is_steady(self) -> bool:
        """Whether the next token is only appended and read before `tidy`: nothing is chosen or laid out anew.

        Steps of such tokens differ in nothing but counters, so that one can be replayed for another; and so does
        what `tidy` does when it is due.
        """
        return False

    def tidy_is_due(self) -> bool:
        """Whether `tidy` would do something, where `is_steady` holds of the token before."""
        return False


class CanRewind(Protocol):
    """What `rewind` needs of a cache."""

    n_seen: int

    def restart(self, n: int) -> int:
        """As `Rewinding.restart`."""

    def truncate(self, n: int, again: int = 0) -> int:
        """As `Rewinding.truncate`."""


def rewind(caches: Sequence[CanRewind], n: int) -> int:
    """Makes every layer forget all but the first ``n`` tokens; returns how many all of them still hold.

    Those from there to the n-th, if any, come again.
    """
    start = min([n, *(cache.n_seen if cache.n_seen <= n else cache.restart(n) for cache in caches)])
    while True:
        kept = min(cache.truncate(start, n - start) for cache in caches)
        if kept == start:
            return start
        start = kept
