"""Tokens guessed ahead, so that one pass of the decoder can check several: what guesses, and whether it pays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from edgekv.errors import ConfigError
from edgekv.models.config import ModelConfig

MOST = 4  # tokens guessed at a time
ROW_COST = 0.2  # what a further row adds to a pass, in passes of one row: .05 to .25 on the machines measured
PRIOR = 0.6  # share of guesses taken to be right before any was checked
RATE = 0.2  # weight of the latest guess in the running share
RECOVERY = 0.005  # of the way back to PRIOR that the share takes whenever nothing is guessed
CANDIDATES = 256  # latest places behind the same token that are looked at
RARE = 3  # a token that stood before in at most so many places is a match by itself
LONGEST_MATCH = 8
NONE, NGRAM, AUTO = "none", "ngram", "auto"


@dataclasses.dataclass
class DraftCounts:
    """What became of one text's drafts.

    source: what guessed. passes: of the decoder, without the prompt's. proposed, accepted: tokens.
    """

    source: str
    passes: int = 0
    proposed: int = 0
    accepted: int = 0


class NGramDrafts:
    """Guesses what followed where the latest tokens stood before, in the prompt or in the text: prompt lookup.

    Of the latest places behind the same token, the one with the longest match is taken. A match of one token
    counts where that is rare. Matches of 1, 2, 3, 4 to 7, and 8 tokens have a running share of right guesses each.
    """

    name = NGRAM

    def __init__(self) -> None:
        self.begin(())

    def begin(self, tokens: Sequence[int]) -> None:
        """Begins a text behind these tokens: forgets what was learned before."""
        self._latest: dict[int, int] = {}  # token -> the latest place behind it
        self._earlier: list[int] = []  # place -> the one before it behind the same token, or 0
        self._shares = dict.fromkeys((1, 2, 3, 4, LONGEST_MATCH), PRIOR)  # of right guesses, by the match's length
        self._matched = 1
        self._index(tokens)

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most ``most`` tokens to follow ``tokens``; fewer, or none, where they would not pay."""
        self._index(tokens)
        place, length = self._longest_match(tokens)
        if not place:
            return []
        self._matched = max(known for known in self._shares if known <= length)
        n = self._worthwhile(most)
        period = len(tokens) - place  # a repetition shorter than the draft goes on repeating
        return [tokens[place + i % period] for i in range(n)]

    def learn(self, n_checked: int, n_right: int) -> None:
        """Takes in what became of the latest guesses: of ``n_checked`` the first ``n_right`` were right."""
        share = self._shares[self._matched]
        for _ in range(n_right):
            share += RATE * (1 - share)
        self._shares[self._matched] = share if n_right == n_checked else share - RATE * share

    def _worthwhile(self, most: int) -> int:
        """The number of guesses, 0 to ``most``, with the most tokens for the time.

        k guesses give 1 + s + ... + s^k tokens for 1 + k * ROW_COST passes, s being the share. No clock is read,
        so that the same text has the same passes on every run.
        """
        share, expected, gains = self._shares[self._matched], 0.0, []
        for k in range(most + 1):
            expected += share**k
            gains.append(expected / (1 + k * ROW_COST))
        best = gains.index(max(gains))
        if not best:
            self._shares[self._matched] += RECOVERY * (PRIOR - share)
        return best

    def _index(self, tokens: Sequence[int]) -> None:
        latest, earlier = self._latest, self._earlier
        for place in range(len(earlier), len(tokens)):
            before = tokens[place - 1] if place else -1
            earlier.append(latest.get(before, 0))
            latest[before] = place

    def _longest_match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The place whose tokens before it are most like the end of the text, and how many are; 0, 0: none."""
        best = best_length = n_places = 0
        place = self._latest.get(tokens[-1], 0) if tokens else 0
        while place and n_places < CANDIDATES and best_length < LONGEST_MATCH:
            n_places += 1
            length = 1
            while length < min(place, LONGEST_MATCH) and tokens[place - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            place = self._earlier[place]
        return (0, 0) if best_length == 1 and n_places > RARE else (best, best_length)


def open_drafts(draft: str, config: ModelConfig, device: str, slots: int) -> NGramDrafts | None:
    """What ``draft`` asks for; None: nothing is guessed.

    Raises ConfigError (field draft) for another word than "none", "ngram" and "auto", and where wrong guesses
    can't be taken back from the model's layers.
    """
    if draft not in (NONE, NGRAM, AUTO):
        raise ConfigError("unknown", field="draft", value=draft, accepted=(NONE, NGRAM, AUTO))
    carries = bool(config.recurrences)
    if draft == NONE or (draft == AUTO and (device != "cpu" or slots > 1 or carries)):
        return None
    if carries:
        raise ConfigError(
            f"layers of {config.model_type} carry a state, from which tokens can't be taken back",
            field="draft",
            value=draft,
            accepted=[NONE, AUTO],
        )
    return NGramDrafts()
