"""`edgekv caches`: the KV schemes."""

from __future__ import annotations

import argparse
import json

from edgekv.cli.options import Command, schemes_text
from edgekv.kvcache import scheme_facts, schemes


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print as JSON, with knobs and bytes")


def _execute(arguments: argparse.Namespace) -> int:
    if arguments.json:
        print(json.dumps([scheme_facts(name) for name in schemes()], indent=2))
    else:
        print(schemes_text())
    return 0


CACHES = Command("list the KV cache schemes", _arguments, _execute)
