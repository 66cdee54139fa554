"""`edgekv run`: a continuation on standard output, its report on standard error; and opening of sessions."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shlex
import sys
import time
from typing import Any

from edgekv.cli.options import (
    SESSION,
    add_options,
    add_sampling_options,
    load_options,
    model_path,
    option,
    read_text_option,
    sampling_params,
)
from edgekv.cli.power import add_power_options, energy_meter
from edgekv.cli.terminal import Bars, Terminated, print_rows, say, terminable, write_json
from edgekv.engine.grammar import read_schema
from edgekv.engine.loading import Options, default_ctx, open_tokenizer
from edgekv.engine.model import Model
from edgekv.engine.runner import require_room
from edgekv.engine.sampling import continue_sampler
from edgekv.engine.session import Session
from edgekv.engine.verdicts import Verdicts
from edgekv.errors import ConfigError, EdgeKVError, SessionError
from edgekv.files import user_path
from edgekv.kvcache.choice import AUTO
from edgekv.power.energy import EnergyMeter
from edgekv.text.template import ChatTemplate, without_places
from edgekv.vision.images import open_image
from edgekv.vision.model import require_vision

MIN_TOKENS = 128  # of an answer, by default, before it may end with a sentence
EXTRA_TOKENS = 128  # after these at most
SENTENCE_END = re.compile(r"""[.!?…]["'”’)\]]*\s*$""")

# Sessions


def is_saved(arguments: argparse.Namespace) -> bool:
    """Returns whether the file of --session exists."""
    return arguments.session is not None and os.path.exists(user_path(arguments.session))


def load_session(arguments: argparse.Namespace, options: Options, bars: Bars) -> Session:
    """Loads a session with an empty conversation."""
    with bars:
        session = Session.load(model_path(arguments), progress=bars.update, **vars(options))
    if options.kv not in (None, AUTO):
        warn_ungated(session)
    return session


def warn_ungated(session: Session) -> None:
    """Prints a warning, once per model, about a lossy scheme that was not gated or failed its gate."""
    if warning := Verdicts(session.model).warn_once(session.plan.kv):
        say(warning)


def open_session(arguments: argparse.Namespace, options: Options, bars: Bars) -> Session:
    """Opens the conversation of --session, or an empty one, with the named LoRA if one is given."""
    names = ", ".join(options.loras)
    if len(options.loras) > 1:
        raise ConfigError(f"--lora: a conversation has one, not {names}; `edgekv serve` has several")
    if is_saved(arguments):
        with bars:
            path = model_path(arguments)
            session = Session.restore(arguments.session, path, progress=bars.update, **vars(options))
    else:
        session = load_session(arguments, options, bars)
        for name in options.loras:
            session.use_lora(name)
    if options.loras and session.lora is None:
        advice = "leave {lora} out, or start a new session"
        raise SessionError(f"{arguments.session}: was held without a LoRA beside the weights", advice=advice)
    return session


def open_template(arguments: argparse.Namespace, session: Session) -> ChatTemplate:
    """Opens --chat-template, else the model's own template, else a plain transcript with a printed note."""
    tokenizer_path = session.model.tokenizer_path
    template = ChatTemplate.open(session.require_tokenizer(), tokenizer_path, given=arguments.chat_template)
    if template.is_plain:
        print("this model brings no chat template: a plain User/Assistant transcript is used", file=sys.stderr)
    return template


# edgekv run


def run_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, f"{SESSION} session overflow images")
    prompt = option("TEXT", "the prompt; - reads standard input, as a pipe does without a prompt")
    file = option("FILE", "read the prompt from a file, less its last line break; - is standard input")
    add_options(parser.add_mutually_exclusive_group(), "", prompt=prompt, prompt_file=file)
    add_sampling_options(parser, max_new_tokens=f"{MIN_TOKENS}, and on to the end of the sentence")
    add_options(parser, "json_schema device draft json")
    add_power_options(parser)


def fit_prompt(arguments: argparse.Namespace, prompt: str) -> str | list[int]:
    """Returns a prompt, encoded if it is long. Raises ContextError, before weights are read, if it can't fit."""
    model = Model.open(model_path(arguments), config=arguments.config, tokenizer=arguments.tokenizer)
    ctx = arguments.ctx or default_ctx(model.config)
    if model.tokenizer_path is not None and len(prompt.encode(errors="replace")) + 2 > ctx:  # else it fits anyway
        tokenizer = open_tokenizer(model)
        ids = tokenizer.encode(without_places(prompt, tokenizer))
        require_room(len(ids), ctx, model.config.max_positions)
        return ids
    return prompt


def run_command(arguments: argparse.Namespace) -> int:
    options = load_options(arguments)
    text = read_prompt(arguments)
    if text is None and not is_saved(arguments):
        model = arguments.model or "demo"
        ways = f"give edgekv run {model} 'TEXT', --prompt TEXT, --prompt-file FILE or a pipe"
        raise EdgeKVError(f"no prompt: {ways}; to talk with it: edgekv chat {model}")
    prompt: str | list[int] = [] if text is None else text  # [] goes on where the conversation stopped
    sampling_params(arguments)  # a bad value is said before anything is loaded
    schema = None if arguments.json_schema is None else read_schema(arguments.json_schema)
    images = []
    if arguments.image:
        require_vision(Model.open(model_path(arguments), config=arguments.config))
        images = [open_image(path) for path in arguments.image]
    elif isinstance(prompt, str) and arguments.overflow == "stop" and not is_saved(arguments):
        prompt = fit_prompt(arguments, prompt)
    meter = energy_meter(arguments)
    bars, begin = Bars(), time.perf_counter()
    session = open_session(arguments, options, bars)
    if session.memo.get("messages"):
        advice = f"go on with edgekv chat --session {shlex.quote(arguments.session)}, or give another file"
        raise SessionError(f"{arguments.session}: is a chat, no text of `edgekv run`", advice=advice)
    ready_s = time.perf_counter() - begin
    sampling = sampling_params(arguments, session.model.sampling)
    settings = {
        "images": images,
        "max_new_tokens": arguments.max_new_tokens or MIN_TOKENS + EXTRA_TOKENS,
        "sampling": continue_sampler(session.last_sampler, sampling),
        "stop": arguments.stop,
        "json_schema": schema,
    }
    with terminable(), meter:
        status = _generate(session, prompt, settings, not (arguments.max_new_tokens or schema), bars, meter)
    if arguments.session is not None:
        session.save(arguments.session)
    report = session.report()
    report.energy = meter.report()
    (topic, model), *rows = report.rows()
    rows = [(topic, f"{model}; ready in {ready_s:.1f} s"), *rows]
    print_rows(rows, sys.stderr)
    if arguments.json:
        write_json(arguments.json, report.as_dict())
    return status


def _generate(
    session: Session,
    prompt: str | list[int],
    settings: dict[str, Any],
    at_sentence: bool,
    bars: Bars,
    meter: EnergyMeter,
) -> int:
    """Prints the text and returns the exit status. at_sentence: stop at a sentence's end after MIN_TOKENS."""
    try:
        with bars:
            with meter.phase("prefill") as prefill:
                steps = session.generate(
                    prompt, progress=lambda done, total: bars.prefill(n_prompt, done, total), **settings
                )
                n_prompt = session.report().prefill_tokens
                if n_prompt:
                    bars.prefill(n_prompt, 0, 1)
                first = next(steps)
            prefill.tokens = session.report().prefill_tokens
            end_reason, tail = None, ""
            with meter.phase("decode") as decode, contextlib.closing(steps):
                for n, step in enumerate(itertools.chain([first], steps), 1):
                    decode.tokens = n - 1
                    print(step.text.removeprefix("" if tail or not prompt else " "), end="", flush=True)
                    tail = (tail + step.text)[-8:]
                    if step.finish_reason == "length" and n == settings["max_new_tokens"]:
                        end_reason = f"cut after {n} tokens; --max-new-tokens N for another length"
                    if n >= MIN_TOKENS and at_sentence and not step.finish_reason and SENTENCE_END.search(tail):
                        end_reason = f"end of a sentence after {n} tokens"
                        break
        print()
        if end_reason:
            session.report().finish_message = end_reason
    except KeyboardInterrupt as interrupt:
        print()
        session.report().finish_message = "interrupted"
        return 143 if isinstance(interrupt, Terminated) else 130
    return 0


def read_prompt(arguments: argparse.Namespace) -> str | None:
    """Returns the text of --prompt or --prompt-file, else of a pipe, less a last line break; None without one."""
    if arguments.prompt not in (None, "-"):
        return str(arguments.prompt)
    source = arguments.prompt_file or arguments.prompt
    if source is None and sys.stdin.isatty():
        return None
    text = read_text_option(source or "-", "--prompt-file" if arguments.prompt_file else "--prompt")
    return text.removesuffix("\n").removesuffix("\r") or None
