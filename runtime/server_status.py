"""GET routes that tell of the server: models, health, metrics (lines run per request)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from .bridge import ClosedError
from .door import Door, Served

_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def status_routes(door: Door) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(door, door.served())]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        door.find(name)
        return _card(door, door.served())

    @router.get("/health")
    async def health() -> dict[str, str]:
        """The process answers."""
        return {"status": "alive"}

    @router.get("/health/ready")
    async def ready() -> dict[str, str]:
        """It should get calls."""
        if trouble := door.trouble():
            raise ClosedError(trouble)
        return {"status": "ready"}

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(door.served().bridge.metrics.exposition(), media_type=_EXPOSITION)

    return router


def _card(door: Door, served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": door.created,
        "owned_by": "ostinato",
        "max_model_len": served.bridge.limits.max_context,
    }
