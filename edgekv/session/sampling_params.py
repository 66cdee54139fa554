"""How the next token is chosen: the settings, checked."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from edgekv.checks import Natural, check_fields

ZERO_IS_NONE = ("top_k", "repetition_window")

Temperature = Annotated[float, Meta(ge=0, le=1e300, description="a number of 0 (greedy) or more")]
Share = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
Divisor = Annotated[float, Meta(ge=0.01, le=100, description="a number from 0.01 to 100; 1 is off")]
Penalty = Annotated[float, Meta(ge=-2, le=2, description="a number from -2 to 2; 0 is off")]
Seed = Annotated[int, Meta(ge=0, lt=1 << 128, description="a whole number of 0 or more")]
Token = Annotated[int, Meta(ge=0, lt=10**9)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Biases = Annotated[Mapping[Token, Bias], Meta(description="token ids, each with a number from -100 to 100")]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen: greedy unless a temperature is set; the filters' defaults are llama.cpp's.

    temperature: divides the logits; 0 takes the most probable token and ignores top_k, top_p and min_p.
    top_k: keep the k most probable tokens; None keeps all.
    top_p: keep the smallest set of most probable tokens whose probability reaches top_p, one at least; 1 is off.
    min_p: keep tokens at least min_p times as probable as the most probable one; 0 is off.
    repetition_penalty: divides the positive and multiplies the negative logits of tokens already seen
        (CTRL, arXiv:1909.05858, as in transformers), 0.01 to 100; 1 is off.
    repetition_window: how many of the last tokens of prompt and output count as seen; None is all of them.
    frequency_penalty: subtracted from a token's logit for each time that it was sampled, as OpenAI's; -2 to 2.
    presence_penalty: subtracted once from the logit of a token that was sampled, as OpenAI's; -2 to 2.
    logit_bias: token id to what is added to its logit, -100 to 100; in JSON the ids are texts.
    seed: of the random generator; None draws one from the operating system.

    0 for top_k or repetition_window, as llama.cpp has it, is None. Raises ConfigError, whose field is the
    parameter, where a value is outside its range.
    """

    temperature: Temperature = 0.0
    top_k: Natural | None = 40
    top_p: Share = 0.95
    min_p: Share = 0.05
    repetition_penalty: Divisor = 1.0
    repetition_window: Natural | None = None
    seed: Seed | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: Biases | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if isinstance(self.logit_bias, Mapping):
            texts = re.compile(r"[0-9]{1,9}").fullmatch
            ids = [int(i) if isinstance(i, str) and texts(i) else i for i in self.logit_bias]
            object.__setattr__(self, "logit_bias", dict(zip(ids, self.logit_bias.values(), strict=True)))
        check_fields(self)
        for name in ZERO_IS_NONE:
            object.__setattr__(self, name, getattr(self, name) or None)

    def as_dict(self) -> dict[str, Any]:
        """Every setting by its name, as files and reports have it: 0 where top_k or repetition_window is None."""
        return asdict(self) | {name: getattr(self, name) or 0 for name in ZERO_IS_NONE}

    @property
    def counts(self) -> bool:
        """Whether it matters how often a token was sampled."""
        return bool(self.frequency_penalty or self.presence_penalty)
