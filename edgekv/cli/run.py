"""`edgekv run`: stream a continuation to stdout, a report to stderr."""

from __future__ import annotations

import argparse
import sys

from edgekv.cli.options import (
    Bars,
    Command,
    add_adapter_option,
    add_model_options,
    cache_spec,
    kv_budget,
    model_path,
    positive_int,
)
from edgekv.cli.prompt import read_text
from edgekv.errors import EdgeKVError
from edgekv.kvcache import CacheSpec
from edgekv.sampling import SamplingParams
from edgekv.session import Session

DEFAULTS = SamplingParams()


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add_adapter_option(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt; - reads standard input")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file; - is standard input")
    parser.add_argument(
        "--max-new-tokens", type=positive_int, default=128, metavar="N", help="stop after N tokens (default 128)"
    )
    parser.add_argument("--temperature", type=float, default=DEFAULTS.temperature, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=DEFAULTS.top_k, help="0 is off (default %(default)s)")
    parser.add_argument("--top-p", type=float, default=DEFAULTS.top_p, help="1 is off (default %(default)s)")
    parser.add_argument("--min-p", type=float, default=DEFAULTS.min_p, help="0 is off (default %(default)s)")
    parser.add_argument(
        "--repetition-penalty", type=float, default=DEFAULTS.repetition_penalty, help="1 is off (default)"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the sampler (default: drawn, and reported)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)"
    )
    parser.add_argument("--device", default="cpu", help="cpu (onnxruntime + Numba) or numpy (the slow reference)")
    parser.add_argument("--json", metavar="FILE", help="write the report with every setting as JSON")


def _execute(arguments: argparse.Namespace) -> int:
    spec = cache_spec(arguments)
    if spec is None:
        return 0
    prompt = read_prompt(arguments)
    sampling = SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
    )
    bars = Bars()
    session = _load(arguments, spec, bars)
    status = _generate(session, prompt, sampling, arguments, bars)
    report = session.report()
    print(report.to_text(), file=sys.stderr)
    if arguments.json:
        report.write_json(arguments.json)
    return status


def _load(arguments: argparse.Namespace, spec: CacheSpec | str, bars: Bars) -> Session:
    with bars:
        return Session.load(
            model_path(arguments),
            kv=spec,
            ctx=arguments.ctx,
            weights=arguments.weights,
            kv_budget=kv_budget(arguments),
            device=arguments.device,
            threads=arguments.threads,
            config=arguments.config,
            tokenizer=arguments.tokenizer,
            adapter=arguments.adapter,
            progress=bars.update,
        )


def _generate(
    session: Session, prompt: str, sampling: SamplingParams, arguments: argparse.Namespace, bars: Bars
) -> int:
    try:
        with bars:
            steps = session.generate(
                prompt,
                max_new_tokens=arguments.max_new_tokens,
                sampling=sampling,
                stop=arguments.stop,
                progress=lambda done, total: bars.update("prefill", done, total),
            )
            for step in steps:
                sys.stdout.write(step.text)
                sys.stdout.flush()
        sys.stdout.write("\n")
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        session.report().stop_reason = "interrupted"
        return 130
    return 0


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
