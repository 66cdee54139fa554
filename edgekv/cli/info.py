"""`edgekv info`: a model's shapes and bytes, before anything is loaded."""

from __future__ import annotations

import argparse
import json

from edgekv.cli.bars import Bars
from edgekv.cli.options import Command, add_source_options, bytes_text, model_path
from edgekv.linear.formats import WEIGHTS
from edgekv.linear.threads import FEW_CORES, remembered
from edgekv.linear.weights import CheckpointWeights
from edgekv.machine import all_cores
from edgekv.models.config import ExpertsConfig
from edgekv.session.model import Model


def _info_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _info(arguments: argparse.Namespace) -> int:
    model = Model.open(model_path(arguments), config=arguments.config)
    c = model.config
    own = model.weight_format("auto")
    forms = [own] if model.is_store else list(dict.fromkeys([own, *WEIGHTS.values()]))
    facts = {
        "model": str(model.path),
        "model_type": c.model_type,
        "parameters": model.n_parameters,
        "layers": c.n_layers,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "experts": _experts_text(c.experts),
        "heads": c.n_heads,
        "kv_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "max_positions": c.max_positions,
        "rope": ", ".join(dict.fromkeys(rope.kind for rope in c.ropes)) or None,
        "recurrent_layers": _recurrences_text(model),
        "sliding_window": next((w for w in c.layer_windows if w), None),
        "tied_embeddings": c.tied_embeddings,
        "quantized": ", ".join(model.quantized) or None,
        "calibrated": model.calibration,
        "tokenizer": str(model.tokenizer_path) if model.tokenizer_path else None,
        "image_token": model.image_token,
        "weights_bytes": {form.name: model.weights_bytes(form) for form in forms},
        "auto_weights": own.name,
        "threads": _threads_text(model),
    }
    if arguments.json:
        if isinstance(model.weights, CheckpointWeights):
            with Bars() as bars:
                model.weights.source.identify(bars.update)  # reads all of it, once
        facts["identity"] = model.identity
        print(json.dumps(facts, indent=2))
        return 0
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {bytes_text(v)}" for k, v in value.items())
        print(f"{name:<18}{'none' if value is None else value}")
    return 0


def _experts_text(experts: ExpertsConfig | None) -> str | None:
    """How many there are, and what a token goes through; None: the model has none."""
    if experts is None:
        return None
    layers = f"in {sum(experts.layers)} of {len(experts.layers)} layers"
    return f"{experts.count} of {experts.size} channels {layers}, {experts.per_token} for each token"


def _recurrences_text(model: Model) -> str | None:
    """What the layers that do not attend have instead."""
    found = [each.kernel for each in model.config.recurrences if each is not None]
    return ", ".join(f"{found.count(kind)} {kind}" for kind in dict.fromkeys(found)) or None


def _threads_text(model: Model) -> str:
    """How many threads its products will use here."""
    cores = all_cores()
    if cores <= FEW_CORES:
        return f"all {cores} cores"
    known = remembered(model.arch, model.weight_format("auto"))
    if known is None:
        return f"of {cores} cores, as many as the first load finds fastest"
    return f"of {cores} cores {known.decode} for a token's products, {known.prompt} for a prompt's: measured here"


INFO = Command(
    "print a model's shapes, the bytes of its weights and their hash, without loading them", _info_arguments, _info
)
