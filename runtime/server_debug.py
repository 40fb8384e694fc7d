"""GET /debug/…: where the time of the last calls and steps went, without any text (lines run per request)."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ostinato.engines.errors import RequestError

from .call import CallRecord
from .critical_path import SPANS
from .door import Door
from .recent import NUM_CALLS
from .step_log import NUM_STEPS, StepRecord
from .trace_export import trace
from .wire_errors import HttpError

_SHOWN = 100  # where the caller names no number


def debug_routes(door: Door) -> list[Route]:
    async def requests(request: Request) -> Response:
        records = door.served().bridge.ledger.recent.last(_count(request, NUM_CALLS))
        return _json({"spans": SPANS, "requests": [call_json(record) for record in reversed(records)]})

    async def one(request: Request) -> Response:
        record = door.served().bridge.ledger.recent.find(request.path_params["call_id"])
        if record is None:
            raise HttpError(404, f"no such call among the last {NUM_CALLS} that ended: see /debug/requests")
        pieces = [
            {"name": piece.name, "began_ms": _ms(piece.began_at - record.began_at), "spans_ms": _spans(piece.spans)}
            for piece in record.pieces
        ]
        return _json(call_json(record) | {"pieces": pieces})

    async def steps(request: Request) -> Response:
        log = door.served().bridge.ledger.steps
        return _json({"num_steps": log.num_steps, "steps": list(map(step_json, log.last(_count(request, NUM_STEPS))))})

    async def chrome_trace(request: Request) -> Response:
        bridge = door.served().bridge
        steps = bridge.ledger.steps.last(_count(request, NUM_STEPS))
        since = steps[0].times.launched_at if steps else 0.0
        calls = [record for record in bridge.ledger.recent.last() if record.began_at + record.seconds >= since]
        return _json(await asyncio.to_thread(trace, steps, calls))  # so that streams go on

    return [
        Route("/debug/requests", requests, methods=["GET"]),
        Route("/debug/requests/{call_id}", one, methods=["GET"]),
        Route("/debug/steps", steps, methods=["GET"]),
        Route("/debug/trace", chrome_trace, methods=["GET"]),
    ]


def call_json(record: CallRecord) -> dict[str, Any]:
    """What is told of a call. `spans_ms` add up to `total_ms`."""
    first = record.first_token_seconds
    return {
        "id": record.id,
        "route": record.route,
        "status": record.status,
        "began": round(record.began_unix, 6),
        "total_ms": _ms(record.seconds),
        "ttft_ms": None if first is None else _ms(first),
        "choices": record.num_choices,
        "prompt_tokens": record.num_prompt,
        "cached_tokens": record.num_cached,
        "output_tokens": record.num_output,
        "preemptions": record.num_preemptions,
        "finish_reasons": record.finish_reasons,
        "spans_ms": _spans(record.spans),
    }


def step_json(step: StepRecord) -> dict[str, Any]:
    """What is told of a step; times are milliseconds, moments are of the server's monotonic clock in seconds."""
    times = step.times
    parts = {name: _ms(getattr(times, name)) for name in ("plan", "pack", "launch", "wait", "commit", "grammar")}
    return {
        "number": step.number,
        "rows": times.num_rows,
        "tokens": times.num_tokens,
        "sampled": times.num_sampled,
        "bucket": step.bucket,
        "padding": step.padding,
        "launched_at": times.launched_at,
        "landed_at": times.landed_at,
        "parts_ms": parts,
    }


def _count(request: Request, most: int) -> int:
    """The number that the query asks for."""
    if unknown := [name for name in request.query_params if name != "n"]:
        raise RequestError(f"the query {unknown[0][:64]!r} is not known here: only n is", param=unknown[0][:64])
    text = request.query_params.get("n", str(_SHOWN))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise RequestError(f"n is not a number from 1 to {most}: ask for that many", param="n")
    return int(text)


def _spans(spans: dict[str, float]) -> dict[str, float]:
    return {name: _ms(seconds) for name, seconds in spans.items() if seconds}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json", headers={"cache-control": "no-store"})
