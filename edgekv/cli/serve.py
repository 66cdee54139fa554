"""`edgekv serve`: a model behind OpenAI's API, on this machine alone unless a key is set."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import re
import signal
import socket
from typing import Any

from edgekv.cli.options import REPEATED, SESSION, add_options, count, load_options, option, positive_seconds, size
from edgekv.cli.power import shared_meter
from edgekv.cli.run import load_session, open_template
from edgekv.cli.terminal import Bars, say
from edgekv.engine.chat import MAX_NEW_TOKENS
from edgekv.errors import ConfigError, EdgeKVError
from edgekv.kvcache.choice import size_text
from edgekv.machine import available_memory_bytes, parse_bytes

LOOPBACK_NAMES = ["localhost", "127.0.0.1", "::1"]
KEY_VARIABLE = "EDGEKV_API_KEY"
MAX_PORT = 65535
MAX_REQUEST, MAX_REQUEST_IMAGES = "1M", "16M"


def origin(text: str) -> str:
    """Returns an origin, scheme and host as in the header Origin of browsers, else raises ArgumentTypeError."""
    if text != "*" and not re.fullmatch(r"https?://[^/\s]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no origin; accepted: https://example.org, or *")
    return text.lower()


OPTIONS = {
    "host": option(None, "address to listen on (default %(default)s)", default="127.0.0.1"),
    "port": option("N", "0 takes a free one (default %(default)s)", type=int, default=8080),
    "api_key": option("KEY", f"that clients must send; needed beyond this machine (or {KEY_VARIABLE})"),
    "name": option(None, "the model's name in the API (default: its folder's)"),
    "cors": option(
        "ORIGIN",
        "a web page elsewhere that may call this server, such as https://example.org; * is any (repeatable)",
        type=origin,
        **REPEATED,
    ),
    "max_new_tokens": count("of an answer whose request sets none (default %(default)s)", default=MAX_NEW_TOKENS),
    "slots": count(
        "answers made at once, each with its own cache; more than 1 on a CPU only, without --draft (default 1)",
        default=1,
    ),
    "queue": count("requests that may wait (default %(default)s)", default=32),
    "max_request": size(
        "max_request",
        f"of a request's body (default {MAX_REQUEST}, {MAX_REQUEST_IMAGES} where the model takes images)",
    ),
    "cache_ram": size(
        "cache_ram", "of memory for recent conversations' caches (default: a quarter of what is free)"
    ),
    "client_timeout": option(
        "S",
        "for a request to arrive whole, and for a client that stops reading (default %(default)g)",
        type=positive_seconds,
        default=30.0,
    ),
}
"""The options of this command alone."""


def serve_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser, f"{SESSION} chat_template device draft power prefix_cache", draft={"default": "auto"}, **OPTIONS
    )
    parser.set_defaults(power_csv=None)


def serve_command(arguments: argparse.Namespace) -> int:
    _require_uvicorn()
    options = load_options(arguments)
    api_key, hosts = _access(arguments)
    meter = shared_meter(arguments)
    _listener(arguments).close()  # a port that is taken is said before weights are read
    session = load_session(arguments, options, Bars())
    name = arguments.name or session.model.path.name
    if name in options.loras:
        raise ConfigError(f"--lora {name}=...: {name!r} is the model's own name; give another, or --name")
    from edgekv.server.app import build_app
    from edgekv.server.engine import Engine
    from edgekv.server.limits import BoundedServer, ServerLimits

    usual = MAX_REQUEST if session.model.image_token is None else MAX_REQUEST_IMAGES
    max_request = arguments.max_request or parse_bytes(usual)
    engine = Engine(
        session,
        open_template(arguments, session),
        queue_limit=arguments.queue,
        pool_bytes=available_memory_bytes() // 4 if arguments.cache_ram is None else arguments.cache_ram,
        max_new_tokens=arguments.max_new_tokens,
        power=meter,
        slots=arguments.slots,
    )
    bodies = max(ServerLimits.max_bodies, 6 * max_request)
    limits = ServerLimits(max_request, arguments.client_timeout, max_bodies=bodies)
    app = build_app(engine, name, api_key=api_key, hosts=hosts, limits=limits, origins=arguments.cors)
    plan = session.plan
    about = f"{plan.ctx:,} tokens, cache {size_text(str(plan.kv), plan.cache_bytes, plan.f16_bytes)}"
    _listen(BoundedServer(app, limits, engine.stop), arguments, "; ".join([f"{name}, {about}", *plan.notes]))
    return 0


def _listener(arguments: argparse.Namespace) -> socket.socket:
    """Returns a listening socket. Raises EdgeKVError for an address that is not here, and a port that is taken."""
    if not 0 <= arguments.port <= MAX_PORT:
        raise ConfigError(field="port", value=arguments.port, accepted=[f"0 to {MAX_PORT}"])
    family = socket.AF_INET6 if ":" in arguments.host else socket.AF_INET
    try:
        return socket.create_server((arguments.host, arguments.port), family=family, backlog=2048)
    except OSError as error:
        number = error.errno or 0  # below 0 for a host without an address
        reason = os.strerror(number) if number > 0 else error.strerror
        where = f"--host {arguments.host} --port {arguments.port}: can't listen there: {reason}"
        raise EdgeKVError(f"{where}; give an address of this machine and a free port") from None


def _listen(server: Any, arguments: argparse.Namespace, about: str) -> None:
    """Binds the socket, prints what is served and where, and serves until the process ends."""
    with _listener(arguments) as listener:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        say(about)
        say(f"http://{shown}:{port} (a page to chat on; OpenAI's API at /v1; Ctrl-C ends)")
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process as SIGTERM does
        server.run(sockets=[listener])


def _access(arguments: argparse.Namespace) -> tuple[str | None, list[str] | None]:
    """Returns the API key and the accepted host names (None: any). Raises ConfigError if a key is missing."""
    api_key = arguments.api_key or os.environ.get(KEY_VARIABLE) or None
    if api_key is not None:
        return api_key, None
    with contextlib.suppress(ValueError):  # a name that is no address
        if arguments.host == "localhost" or ipaddress.ip_address(arguments.host).is_loopback:
            return None, [*LOOPBACK_NAMES, arguments.host]
    raise ConfigError(
        f"--host {arguments.host} can be reached from other machines: set --api-key KEY (or {KEY_VARIABLE}), "
        "or listen on 127.0.0.1"
    )


def _require_uvicorn() -> None:
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise EdgeKVError("serve needs starlette and uvicorn: pip install 'edgekv[serve]'") from None
