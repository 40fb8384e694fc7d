"""GET /info: what is served here, within which bounds; no secret is in it (lines run per request)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ostinato.engines.manifest import Manifest

from .bridge import Bridge
from .chunks import to_json
from .door import Door
from .grammar_spec import Kind
from .server_status import READ


def info_routes(door: Door) -> list[Route]:
    async def info(_: Request) -> Response:
        served = door.served()
        table = {
            "version": version("ostinato"),
            "model": served.name,
            "bundle": None if served.manifest is None else _bundle(served.manifest),
            "engine": asdict(served.bridge.limits),
            "limits": asdict(door.limits),
            "features": _features(door, served.bridge),
        }
        return Response(to_json(table), media_type="application/json")

    return [Route("/info", info, methods=READ)]


def _bundle(manifest: Manifest) -> Mapping[str, Any]:
    return {
        "name": manifest.name,
        "identity": manifest.identity,
        "target": manifest.target,
        "weights": manifest.weights,
        "kv_cache": manifest.kv_cache,
        "weight_bytes": manifest.weight_bytes,
        "kv_bytes_per_block": manifest.kv_bytes_per_block,
        "ranks": len(manifest.engines) or 1,
        "notes": manifest.notes,
    }


def _features(door: Door, bridge: Bridge) -> Mapping[str, Any]:
    """`grammars`: what `structured_outputs` and `response_format` can ask for."""
    style = bridge.tokenizer.tool_style
    return {
        "api": "/openapi.json",
        "chat_template": bridge.tokenizer.has_chat_template,
        "tool_style": None if style is None else style.label,
        "grammars": [kind for kind in get_args(Kind) if kind != "lark"],
        "needs_api_key": bool(door.keys),
        "strict_fields": door.strict_fields,
    }
