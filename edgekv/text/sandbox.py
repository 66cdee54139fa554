"""Compiles and renders chat templates as transformers does, in an immutable sandbox."""

import datetime
import json
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationBlock(Extension):
    """The block `{% generation %}`, which marks answers for training; it is rendered as its content."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> Any:
        """Returns the statements within the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = lambda x, **options: json.dumps(x, **{"ensure_ascii": False} | options)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def answer(request: bytes) -> bytes:
    """Renders for a `BoundedChild`: a JSON object of arguments, and the result as JSON."""
    return json.dumps(render(**json.loads(request))).encode()


def render(source: str, names: Mapping[str, Any] | None) -> dict[str, str]:
    """Renders a template: returns {"text": ...}, or the reason as {"invalid": ...} (source) or {"refused": ...}.

    names: the template's variables; None: only checks that the source is a template.
    """
    try:
        template = _compile(source)
    except Exception as error:  # jinja2's, and RecursionError, MemoryError, ValueError of its constant folding
        return {"invalid": _reason(error)}
    try:
        return {"text": "" if names is None else template.render(**names)}
    except Exception as error:  # templates are programs: anything can go wrong in them
        return {"refused": _reason(error)}


def _reason(error: Exception) -> str:
    """Returns an exception's message in one line of at most 300 characters, or its type."""
    return " ".join(str(error).split())[:300] or type(error).__name__
