"""How the next token is chosen: the settings, checked."""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from edgekv.errors import ConfigError

ZERO_IS_NONE = ("top_k", "repetition_window")


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen: greedy unless a temperature is set; the filters' defaults are llama.cpp's.

    temperature: divides the logits; 0 takes the most probable token and ignores top_k, top_p and min_p.
    top_k: keep the k most probable tokens; None keeps all.
    top_p: keep the smallest set of most probable tokens whose probability reaches top_p; 1 is off.
    min_p: keep tokens at least min_p times as probable as the most probable one; 0 is off.
    repetition_penalty: divides the positive and multiplies the negative logits of tokens already seen
        (CTRL, arXiv:1909.05858, as in transformers); 1 is off.
    repetition_window: how many of the last tokens of prompt and output count as seen; None is all of them.
    frequency_penalty: subtracted from a token's logit for each time that it was sampled, as OpenAI's; -2 to 2.
    presence_penalty: subtracted once from the logit of a token that was sampled, as OpenAI's; -2 to 2.
    logit_bias: token id to what is added to its logit, -100 to 100; in JSON the ids are texts.
    seed: of the random generator; None draws one from the operating system.

    0 for top_k or repetition_window, as llama.cpp has it, is None. Raises ConfigError, whose field is the
    parameter, where a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int | None = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    repetition_window: int | None = None
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, lambda t: t >= 0, "0 (greedy) or more")
        _check_number("top_p", self.top_p, lambda p: 0 < p <= 1, "above 0 and at most 1 (off)")
        _check_number("min_p", self.min_p, lambda p: 0 <= p <= 1, "from 0 (off) to 1")
        _check_number("repetition_penalty", self.repetition_penalty, lambda r: r > 0, "above 0; 1 is off")
        hints = {
            "top_k": "None is off",
            "repetition_window": "None is the whole text",
            "seed": "None is a random one",
        }
        for name, hint in hints.items():
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), hint)
        for name in ZERO_IS_NONE:
            object.__setattr__(self, name, getattr(self, name) or None)
        for name in ("frequency_penalty", "presence_penalty"):
            _check_number(name, getattr(self, name), lambda p: -2 <= p <= 2, "from -2 to 2; 0 is off")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    def as_dict(self) -> dict[str, Any]:
        """Every setting by its name, as files and reports have it: 0 where top_k or repetition_window is None."""
        return asdict(self) | {name: getattr(self, name) or 0 for name in ZERO_IS_NONE}

    @property
    def counts(self) -> bool:
        """Whether it matters how often a token was sampled."""
        return bool(self.frequency_penalty or self.presence_penalty)


def _biases(given: object) -> dict[int, float]:
    """Token id to bias, of ids that may be the texts of JSON."""
    if not isinstance(given, Mapping):
        raise _bias_error(given)
    biases = {}
    for token, bias in given.items():
        if not re.fullmatch(r"[0-9]{1,9}", str(token)) or isinstance(bias, bool):
            raise _bias_error({token: bias})
        if not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise _bias_error({token: bias})
        biases[int(token)] = float(bias)
    return biases


def _bias_error(value: object) -> ConfigError:
    accepted = "token ids, each with a number from -100 to 100"
    return ConfigError(
        f"logit_bias={value!r:.60} is out of range: give {accepted}",
        field="logit_bias",
        value=value,
        accepted=[accepted],
    )


def _check_number(name: str, value: object, accepts: Callable[[float], bool], accepted: str) -> None:
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not -1e300 < value < 1e300  # NaN is no such number
        or not accepts(value)
    ):
        raise ConfigError(
            f"{name}={value!r} is out of range: give a number {accepted}",
            field=name,
            value=value,
            accepted=[accepted],
        )


def _check_count(name: str, value: object, hint: str) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(
            f"{name}={value!r} is out of range: give a whole number of 0 or more ({hint})",
            field=name,
            value=value,
            accepted=["a whole number of 0 or more"],
        )
