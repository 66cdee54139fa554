"""How a model's text is sampled where nobody says: as its generation_config.json has it."""

from __future__ import annotations

from msgspec import Struct

from edgekv.checkpoint.source import read_config
from edgekv.checks import Natural
from edgekv.schema import read
from edgekv.session.model import Model
from edgekv.session.sampling_params import Divisor, SamplingParams, Share, Temperature

FILE = "generation_config.json"
TEMPERATURE = 0.7  # greedy text of small models falls into loops


class GenerationConfig(Struct):
    """The fields of generation_config.json that say how to sample."""

    do_sample: bool | None = None
    temperature: Temperature | None = None
    top_k: Natural | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    repetition_penalty: Divisor | None = None


def sampling_defaults(model: Model) -> SamplingParams:
    """What the file beside the weights says, else TEMPERATURE and the filters of `SamplingParams`.

    Raises ConfigError where the file can't be read, or has other values than `SamplingParams` takes.
    """
    path = (model.path if model.path.is_dir() else model.path.parent) / FILE
    config = read(read_config(path), GenerationConfig, str(path)) if path.is_file() else GenerationConfig()
    temperature = TEMPERATURE if config.temperature is None else config.temperature
    said = {name: getattr(config, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")}
    given = {name: value for name, value in said.items() if value is not None}
    return SamplingParams(temperature=0.0 if config.do_sample is False else temperature, **given)
