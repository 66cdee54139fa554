"""`{% generation %}`: marks answers for training in some chat templates; here it stands for its content."""

from typing import Any

from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationBlock(Extension):
    """The tag, for a Jinja environment."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> Any:
        """The block's content, as if the tag were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
