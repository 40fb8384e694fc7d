"""GET /metrics, for Prometheus (lines run per scrape)."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .door import Door

_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def metrics_routes(door: Door) -> list[Route]:
    async def metrics(_: Request) -> Response:
        model = door.served().bridge.metrics
        model.settle()
        page = await asyncio.to_thread(lambda: model.exposition() + door.http.exposition())  # so that streams go on
        return Response(page, media_type=_EXPOSITION)

    return [Route("/metrics", metrics, methods=["GET"])]
