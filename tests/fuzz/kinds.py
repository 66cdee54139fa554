"""The kinds of input: each makes a damaged one from whole material and gives it to what reads it."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Callable
from random import Random

from .material import Material
from .model_kinds import (
    adapter,
    config,
    family,
    gguf,
    image,
    index,
    lora,
    packed,
    processor,
    safetensors,
    store,
    tokenizer,
    unpack,
    weights,
)
from .place_kinds import hub, remembered, working_folder
from .request_kinds import answer, deep_schema, request, schema, template
from .session_kinds import numbers, recurrent, resume, session
from .use_kinds import arguments, knobs

Kind = Callable[[Material, pathlib.Path, Random], object]
KINDS: dict[str, Kind] = {
    each.__name__: each
    for each in (
        config,
        family,
        packed,
        safetensors,
        index,
        tokenizer,
        template,
        gguf,
        session,
        resume,
        recurrent,
        adapter,
        lora,
        image,
        processor,
        schema,
        store,
        request,
        answer,
        weights,
        unpack,
        numbers,
        knobs,
        arguments,
        remembered,
        hub,
        deep_schema,
        working_folder,
    )
}
RARE = {
    "template": 20,
    "deep_schema": 10,
    "weights": 4,
    "numbers": 4,
    "hub": 4,
    "remembered": 10,
    "working_folder": 100,
}  # slow kinds: a case in so many rounds


def crash(m: Material, folder: pathlib.Path, rng: Random) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(m: Material, folder: pathlib.Path, rng: Random) -> None:
    time.sleep(60)


def hunger(m: Material, folder: pathlib.Path, rng: Random) -> None:
    bytearray(3 << 30)


if "EDGEKV_FUZZ_SELF_TEST" in os.environ:  # what the harness must notice
    KINDS |= {"crash": crash, "hang": hang, "hunger": hunger}
