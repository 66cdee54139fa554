"""How the next token is chosen: the settings, checked."""

from collections.abc import Callable
from dataclasses import dataclass

from edgekv.errors import ConfigError


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen: greedy unless a temperature is set; the filters' defaults are llama.cpp's.

    temperature: divides the logits; 0 takes the most probable token and ignores top_k, top_p and min_p.
    top_k: keep the k most probable tokens; 0 is off.
    top_p: keep the smallest set of most probable tokens whose probability reaches top_p; 1 is off.
    min_p: keep tokens at least min_p times as probable as the most probable one; 0 is off.
    repetition_penalty: divides the positive and multiplies the negative logits of tokens already seen
        (CTRL, arXiv:1909.05858, as in transformers); 1 is off.
    repetition_window: how many of the last tokens of prompt and output count as seen; 0 is all of them.
    seed: of the random generator; None draws one from the operating system.

    Raises ConfigError, whose field is the parameter, where a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    repetition_window: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, lambda t: t >= 0, "0 (greedy) or more")
        _check_number("top_p", self.top_p, lambda p: 0 < p <= 1, "above 0 and at most 1 (off)")
        _check_number("min_p", self.min_p, lambda p: 0 <= p <= 1, "from 0 (off) to 1")
        _check_number("repetition_penalty", self.repetition_penalty, lambda r: r > 0, "above 0; 1 is off")
        _check_count("top_k", self.top_k, "0 is off")
        _check_count("repetition_window", self.repetition_window, "0 is the whole text")
        if self.seed is not None:
            _check_count("seed", self.seed, "leave it out for a random one")


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
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(
            f"{name}={value!r} is out of range: give a whole number of 0 or more ({hint})",
            field=name,
            value=value,
            accepted=["a whole number of 0 or more"],
        )
