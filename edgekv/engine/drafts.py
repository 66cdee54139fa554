"""Drafts: guesses the next tokens, where that pays, so that one pass of the decoder can check several."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from edgekv.errors import ConfigError
from edgekv.kvcache.choice import AUTO
from edgekv.models.config import ModelConfig

MAX_DRAFT_TOKENS = 4  # in one pass
ROW_COST = 0.2  # that a further row adds to a pass, in passes of one row: .05 to .25 on the machines measured
PRIOR = 0.6  # acceptance rate before any draft was checked
SMOOTHING = 0.2  # weight of the latest draft in the running acceptance rate
RECOVERY = 0.005  # of the way back to PRIOR that the rate takes whenever nothing is drafted
MAX_CANDIDATES = 256  # latest positions after the same token that are compared
MAX_RARE = 3  # positions at most, where a match of one token counts
MAX_MATCH = 8
NONE, NGRAM = "none", "ngram"
DRAFTS = NONE, NGRAM, AUTO


@dataclasses.dataclass
class DraftCounts:
    """Counts of one text's drafts.

    source: "ngram" or "none". passes: of the decoder, without the prompt's. proposed, accepted: tokens.
    """

    source: str
    passes: int = 0
    proposed: int = 0
    accepted: int = 0


class NGramDrafts:
    """Prompt lookup: guesses what followed the latest tokens where they stood before, in the prompt or the text.

    Of the latest positions after the same token, the one with the longest match is taken. A match of one token
    counts where that token is rare. Matches of 1, 2, 3, 4 to 7, and 8 tokens have a running acceptance rate each.
    """

    def __init__(self) -> None:
        self.begin(())

    def begin(self, tokens: Sequence[int]) -> None:
        """Begins a text after these tokens, and forgets what was learned before."""
        self._latest: dict[int, int] = {}  # token -> the latest position after it
        self._earlier: list[int] = []  # position -> the one before it after the same token, or 0
        self._rates = dict.fromkeys((1, 2, 3, 4, MAX_MATCH), PRIOR)  # acceptance rates, by the match's length
        self._matched = 1
        self._index(tokens)

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Returns at most ``limit`` tokens to follow ``tokens``; fewer, or none, where they would not pay."""
        self._index(tokens)
        position, length = self._longest_match(tokens)
        if not position:
            return []
        self._matched = max(known for known in self._rates if known <= length)
        n = self._best_length(limit)
        period = len(tokens) - position  # a repetition shorter than the draft goes on repeating
        return [tokens[position + i % period] for i in range(n)]

    def learn(self, n_proposed: int, n_accepted: int) -> None:
        """Learns that of the latest ``n_proposed`` drafts the first ``n_accepted`` were accepted."""
        rate = self._rates[self._matched]
        for _ in range(n_accepted):
            rate += SMOOTHING * (1 - rate)
        self._rates[self._matched] = rate if n_accepted == n_proposed else rate - SMOOTHING * rate

    def _best_length(self, limit: int) -> int:
        """Returns the number of drafts, 0 to ``limit``, that gives the most tokens for the time.

        k drafts give 1 + r + ... + r^k tokens for 1 + k * ROW_COST passes, r being the rate. No clock is read,
        so that the same text has the same passes on every run.
        """
        rate, expected, gains = self._rates[self._matched], 0.0, []
        for k in range(limit + 1):
            expected += rate**k
            gains.append(expected / (1 + k * ROW_COST))
        best = gains.index(max(gains))
        if not best:
            self._rates[self._matched] += RECOVERY * (PRIOR - rate)
        return best

    def _index(self, tokens: Sequence[int]) -> None:
        latest, earlier = self._latest, self._earlier
        for position in range(len(earlier), len(tokens)):
            before = tokens[position - 1] if position else -1
            earlier.append(latest.get(before, 0))
            latest[before] = position

    def _longest_match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Returns the position with the longest match of the tokens before it, and its length; 0, 0: none."""
        best = best_length = n_positions = 0
        position = self._latest.get(tokens[-1], 0) if tokens else 0
        while position and n_positions < MAX_CANDIDATES and best_length < MAX_MATCH:
            n_positions += 1
            length = 1
            while length < min(position, MAX_MATCH) and tokens[position - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > best_length:
                best, best_length = position, length
            position = self._earlier[position]
        return (0, 0) if best_length == 1 and n_positions > MAX_RARE else (best, best_length)


def open_drafts(draft: str, config: ModelConfig, device: str, slots: int) -> NGramDrafts | None:
    """Returns the source of drafts that ``draft``, one of `DRAFTS`, names, or None.

    Raises ConfigError (field draft) where wrong drafts can't be taken back from the model's layers.
    """
    carries = bool(config.recurrences)
    if draft == NONE or (draft == AUTO and (device != "cpu" or slots > 1 or carries)):
        return None
    if carries:
        what = f"layers of {config.model_type} carry a state, from which tokens can't be taken back"
        raise ConfigError(what, field="draft", value=draft, accepted=[NONE, AUTO])
    return NGramDrafts()
