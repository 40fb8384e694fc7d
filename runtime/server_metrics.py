"""GET /metrics, for Prometheus (lines run per scrape)."""

from __future__ import annotations

from fastapi import APIRouter, Response

from .door import Door

_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def metrics_routes(door: Door) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics")
    async def metrics() -> Response:
        page = door.served().bridge.metrics.exposition() + door.http.exposition()
        return Response(page, media_type=_EXPOSITION)

    return router
