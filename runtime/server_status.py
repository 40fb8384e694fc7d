"""GET routes that tell of the server: models and health (lines run per request)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from .bridge import ClosedError
from .door import Door, Served

READ = ["GET", "HEAD"]


def status_routes(door: Door) -> APIRouter:
    router = APIRouter()

    @router.api_route("/v1/models", methods=READ)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(door, door.served())]}

    @router.api_route("/v1/models/{name:path}", methods=READ)
    async def model(name: str) -> dict[str, Any]:
        door.find(name)
        return _card(door, door.served())

    @router.api_route("/health", methods=READ)
    async def health() -> dict[str, str]:
        """The process answers."""
        return {"status": "alive"}

    @router.api_route("/health/ready", methods=READ)
    async def ready() -> dict[str, str]:
        """It should get calls."""
        if trouble := door.trouble():
            raise ClosedError(trouble)
        return {"status": "ready"}

    return router


def _card(door: Door, served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": door.created,
        "owned_by": "ostinato",
        "max_model_len": served.bridge.limits.max_context,
    }
