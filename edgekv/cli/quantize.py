"""`edgekv quantize`: make a weight store once, to map at every start or to copy to another machine."""

from __future__ import annotations

import argparse
import os

from edgekv.cli.bars import Bars
from edgekv.cli.options import (
    Command,
    add_adapter_option,
    add_lora_option,
    add_source_options,
    add_weights_option,
    bytes_text,
    model_path,
)
from edgekv.cli.prompt import read_text
from edgekv.errors import CheckpointError
from edgekv.files import user_path
from edgekv.linear.formats import WeightFormat
from edgekv.linear.store import WeightStore
from edgekv.linear.store_builder import build
from edgekv.session.calibration import Calibration
from edgekv.session.model import Model
from edgekv.vision import copy_vision


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
    add_lora_option(parser)
    add_adapter_option(parser)
    add_weights_option(parser)
    parser.add_argument(
        "--output", metavar="FOLDER", help="a new folder (default: the cache folder that run looks in)"
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help="a UTF-8 text of what the model is for, best 200 kB or more: 4-bit weights are rounded so that the "
        "model reads it as it did before",
    )


def _execute(arguments: argparse.Namespace) -> int:
    if arguments.output is not None and os.path.lexists(user_path(arguments.output)):
        raise CheckpointError(f"--output {arguments.output} exists; give a new folder or remove it")
    model = Model.open(
        model_path(arguments), config=arguments.config, adapter=arguments.adapter, lora=arguments.lora
    )
    form = model.weight_format(arguments.weights)
    with Bars() as bars:
        rounding = _calibration(model, form, arguments.calibrate)
        at_home = arguments.output is None
        store = (
            model.store(form, bars.update, rounding)
            if at_home
            else _build_at(model, form, arguments, bars, rounding)
        )
    print(f"{store.folder}: {store.form.name}, {bytes_text(store.nbytes)}")
    return 0


def _calibration(model: Model, form: WeightFormat, path: str | None) -> Calibration | None:
    if path is None:
        return None
    return Calibration(model, form, read_text(path, "--calibrate"))


def _build_at(
    model: Model, form: WeightFormat, arguments: argparse.Namespace, bars: Bars, rounding: Calibration | None
) -> WeightStore:
    folder = user_path(arguments.output)
    if isinstance(model.weights, WeightStore):
        raise CheckpointError(f"{model.path} is a store already; copy it, or give the original checkpoint")
    weights = rounding.weights if rounding else model.weights
    build(weights, form, folder, bars.update, lambda store: copy_vision(model, store), rounding)
    return WeightStore(folder)


QUANTIZE = Command(
    "write a model's weights as a store that the next start maps (run does it by itself)", _arguments, _execute
)
