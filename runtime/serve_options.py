"""The options of `ostinato serve`; each that is given wins over the file (lines run once at start)."""

from __future__ import annotations

import argparse
from pathlib import Path

from ostinato.engines.argument_parser import ArgumentParser
from ostinato.engines.assignment import assign

from .config import add_arguments, given_options
from .serve_config import LOG_FORMATS, LOG_LEVELS, ServeConfig
from .serve_file import OFF, read_serve_file, serve_config

_COPIED = (
    *("host", "port", "metrics_host", "api_keys", "insecure", "strict_fields"),
    *("log_format", "log_level", "otlp_endpoint"),
)
_LISTS = {"cors_origin": "cors_origins", "allowed_host": "allowed_hosts"}


def serve_parser() -> argparse.ArgumentParser:
    """None for every option that is not given."""
    parser = ArgumentParser(prog="ostinato serve", description="Serve a bundle over the OpenAI API.")
    parser.add_argument(
        "bundle",
        type=Path,
        nargs="?",
        metavar="BUNDLE",
        help="a bundle's folder, such as engines/store/NAME; may stand in --config instead",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a TOML file; deploy/serve.toml shows every key and its default"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one key of that file, such as limits.max_waiting=64; may be given again",
    )
    group = parser.add_argument_group("addresses")
    group.add_argument("--host", metavar="NAME", help="address to listen on (default: this machine only)")
    group.add_argument("--port", type=int, metavar="N", help="port of the API (default: 8000)")
    group.add_argument(
        "--metrics-host", metavar="NAME", help="address of metrics and console (default: this machine only)"
    )
    group.add_argument("--metrics-port", metavar="N", help=f"port of metrics and console, or {OFF} (default: 8001)")
    _add_callers(parser)
    _add_answers(parser)
    add_arguments(parser)
    return parser


def _add_callers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("who may call")
    group.add_argument(
        "--api-keys",
        type=str,
        metavar="FILE",
        help="keys of callers, in lines name:key or as TOML; OSTINATO_API_KEYS adds to it",
    )
    group.add_argument(
        "--insecure", action="store_true", default=None, help="let other machines call without an API key"
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        metavar="URL",
        help="a web site whose pages may call; may be given again (default: none)",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="a name of this server, where no key protects it; may be given again",
    )


def _add_answers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("answers and logs")
    group.add_argument(
        "--strict-fields",
        action="store_true",
        default=None,
        help="refuse fields that nobody knows (default: a header names them)",
    )
    group.add_argument("--log-format", choices=LOG_FORMATS, help="of log lines (default: human)")
    group.add_argument("--log-level", choices=LOG_LEVELS, help="least that is logged (default: info)")
    group.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send traces there, with the extra otel (default: OTEL_EXPORTER_OTLP_ENDPOINT's, if set)",
    )


def config_of(args: argparse.Namespace) -> ServeConfig:
    """The file, then --set, then the other options. Raises RecipeError."""
    table = {} if args.config is None else read_serve_file(args.config)
    for assignment in args.set:
        assign(table, assignment)
    if args.bundle is not None:
        table["bundle"] = str(args.bundle)
    table.update({name: value for name in _COPIED if (value := getattr(args, name)) is not None})
    table.update({key: value for name, key in _LISTS.items() if (value := getattr(args, name)) is not None})
    if (port := args.metrics_port) is not None:
        table["metrics_port"] = int(port) if port.isdecimal() else port
    if isinstance(engine := table.setdefault("engine", {}), dict):
        engine.update(given_options(args))
    return serve_config(table)
