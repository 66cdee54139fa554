"""`edgekv run`: stream a continuation to stdout, a report to stderr."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from typing import Any

from edgekv.cli.bars import Bars
from edgekv.cli.caches import wants_list
from edgekv.cli.conversation import add_draft_option, add_session_options, is_saved, open_session, save_session
from edgekv.cli.flags import in_flags
from edgekv.cli.interrupt import Terminated, terminable
from edgekv.cli.metering import add_power_options, energy_meter
from edgekv.cli.options import (
    Command,
    add_adapter_option,
    add_device_option,
    add_loras_option,
    add_model_options,
    load_options,
    model_path,
)
from edgekv.cli.output import output_file
from edgekv.cli.prompt import read_text
from edgekv.cli.sampling_options import add_sampling_options, sampling_params
from edgekv.cli.summary import ends_sentence, summary
from edgekv.errors import EdgeKVError
from edgekv.power.phases import EnergyMeter, NoMeter
from edgekv.session.generation import Step
from edgekv.session.grammar import read_schema
from edgekv.session.model import Model
from edgekv.session.opening import open_tokenizer
from edgekv.session.plan import default_ctx
from edgekv.session.prompt import require_room
from edgekv.session.sampling import continued
from edgekv.session.sampling_defaults import sampling_defaults
from edgekv.session.sampling_params import SamplingParams
from edgekv.session.session import Session
from edgekv.vision import Picture, picture, require_vision
from edgekv.vision.prompt import without_places

LENGTH = 128  # tokens, where no number is asked for
SPARE = 128  # that the end of a sentence may take beyond them
CUT = "cut after {} tokens; max_new_tokens=N for another length"


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add_loras_option(parser, "one for this text")
    add_adapter_option(parser)
    add_session_options(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt; - reads standard input")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file; - is standard input")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="an image for a model that sees, in place of the prompt's next <image>, or else before the prompt; "
        "may be given again",
    )
    add_sampling_options(parser, max_new_tokens=f"{LENGTH}, and on to the end of the sentence")
    parser.add_argument("--json-schema", metavar="FILE", help="answer with JSON of this schema (needs llguidance)")
    add_device_option(parser)
    add_draft_option(parser, "none")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the report with every setting as JSON"
    )
    parser.add_argument("--verbose", action="store_true", help="report every measurement and setting")
    add_power_options(parser)


def _execute(arguments: argparse.Namespace) -> int:
    if wants_list(arguments):
        return 0
    options = load_options(arguments)
    prompt: str | list[int] = read_prompt(arguments) if has_prompt(arguments) or not is_saved(arguments) else []
    sampling_params(arguments)  # a bad value is said before anything is loaded
    schema = None if arguments.json_schema is None else read_schema(arguments.json_schema)
    images = read_images(arguments)
    if isinstance(prompt, str) and not images:
        prompt = fitting(arguments, prompt)
    bars, meter, begin = Bars(), energy_meter(arguments), time.perf_counter()
    session = open_session(arguments, options, bars)
    ready_s = time.perf_counter() - begin
    sampling = sampling_params(arguments, sampling_defaults(session.model))
    with terminable(), meter:
        status = _generate(session, prompt, images, sampling, schema, arguments, bars, meter)
    save_session(arguments, session)
    report = session.report()
    report.energy = meter.report()
    message = report.finish_message and in_flags(report.finish_message)
    shown = dataclasses.replace(report, notes=list(map(in_flags, report.notes)), finish_message=message)
    print(shown.to_text() if arguments.verbose else summary(session, shown, ready_s), file=sys.stderr)
    if arguments.json:
        report.write_json(arguments.json)
    return status


def _generate(
    session: Session,
    prompt: str | list[int],
    images: list[Picture],
    sampling: SamplingParams,
    schema: dict[str, Any] | None,
    arguments: argparse.Namespace,
    bars: Bars,
    meter: EnergyMeter | NoMeter,
) -> int:
    writer = _Writer(arguments.max_new_tokens, at_sentence=schema is None)
    try:
        with bars:
            with meter.phase("prefill") as prefill:
                steps = session.generate(
                    prompt,
                    images=images,
                    max_new_tokens=writer.most,
                    sampling=continued(session.state.sampler, sampling),
                    stop=arguments.stop,
                    json_schema=schema,
                    progress=lambda done, total: bars.prefill(n_prompt, done, total),
                )
                n_prompt = session.report().prefill_tokens
                if n_prompt:
                    bars.prefill(n_prompt, 0, 1)
                first = next(steps)
            prefill.tokens = session.report().prefill_tokens
            writer.take(first)
            with meter.phase("decode") as decode, contextlib.closing(steps):
                while not writer.done and (step := next(steps, None)):
                    writer.take(step)
                    decode.tokens += 1
        sys.stdout.write("\n")
        if writer.finish_message:
            session.report().finish_message = writer.finish_message
    except KeyboardInterrupt as interrupt:
        sys.stdout.write("\n")
        session.report().finish_message = "interrupted"
        return 143 if isinstance(interrupt, Terminated) else 130
    return 0


class _Writer:
    """Prints steps, and says when enough is written: at ``asked`` tokens, or where a sentence ends."""

    def __init__(self, asked: int | None, at_sentence: bool) -> None:
        self.most = asked or LENGTH + SPARE
        self._at_sentence = at_sentence and not asked
        self.finish_message: str | None = None
        self._n, self._tail = 0, ""

    @property
    def done(self) -> bool:
        return self.finish_message is not None

    def take(self, step: Step) -> None:
        """Prints a step's text."""
        sys.stdout.write(step.text)
        sys.stdout.flush()
        self._n += 1
        self._tail = (self._tail + step.text)[-8:]
        if step.finish_reason == "length" and self._n == self.most:
            self.finish_message = CUT.format(self._n)
        elif self._at_sentence and not step.finish_reason and self._n >= LENGTH and ends_sentence(self._tail):
            self.finish_message = f"end of a sentence after {self._n} tokens"


def has_prompt(arguments: argparse.Namespace) -> bool:
    """Whether the options give a prompt."""
    return arguments.prompt is not None or arguments.prompt_file is not None


def fitting(arguments: argparse.Namespace, prompt: str) -> str | list[int]:
    """The prompt, as token ids where these had to be counted.

    Raises ContextError for one that can't fit, before anything large is loaded.
    """
    if is_saved(arguments) or arguments.overflow != "stop":
        return prompt
    model = Model.open(model_path(arguments), config=arguments.config, tokenizer=arguments.tokenizer)
    ctx = arguments.ctx or default_ctx(model.config)
    longest = len(prompt.encode(errors="replace")) + 2  # no token is less than a byte
    if longest <= ctx or model.tokenizer_path is None:
        return prompt
    tokenizer = open_tokenizer(model)
    ids = tokenizer.encode(without_places(prompt, tokenizer))
    require_room(len(ids), ctx, model.config.max_positions)
    return ids


def read_images(arguments: argparse.Namespace) -> list[Picture]:
    """The images of --image, after a look at whether the model takes any: before anything large is loaded."""
    if not arguments.image:
        return []
    require_vision(Model.open(model_path(arguments), config=arguments.config))
    return [picture(path) for path in arguments.image]


def read_prompt(arguments: argparse.Namespace) -> str:
    """The prompt's text from --prompt, --prompt-file or standard input."""
    if arguments.prompt is not None and arguments.prompt != "-":
        return str(arguments.prompt)
    if arguments.prompt is not None:
        return read_text("-", "--prompt")
    if arguments.prompt_file is None:
        raise EdgeKVError("no prompt: give --prompt TEXT, --prompt-file FILE, or - for standard input")
    return read_text(arguments.prompt_file, "--prompt-file")


RUN = Command(
    "generate text: tokens go to standard output, a short report to standard error", _arguments, _execute
)
