"""GET routes that tell of the server: models and health (lines run per request)."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .bridge import ClosedError
from .door import Door, Served

READ = ["GET", "HEAD"]


def status_routes(door: Door) -> list[Route]:
    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_card(door, door.served())]})

    async def model(request: Request) -> Response:
        door.find(request.path_params["name"])
        return JSONResponse(_card(door, door.served()))

    async def health(_: Request) -> Response:
        """The process answers."""
        return JSONResponse({"status": "alive"})

    async def ready(_: Request) -> Response:
        """It should get calls."""
        if trouble := door.trouble():
            raise ClosedError(trouble)
        return JSONResponse({"status": "ready"})

    return [
        Route("/v1/models", models, methods=READ),
        Route("/v1/models/{name:path}", model, methods=READ),
        Route("/health", health, methods=READ),
        Route("/health/ready", ready, methods=READ),
    ]


def _card(door: Door, served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": door.created,
        "owned_by": "ostinato",
        "max_model_len": served.bridge.limits.max_context,
    }
