"""The server's two applications, one a port (made once at start; the handlers of errors run per refused request)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ostinato.engines.errors import OstinatoError

from .call import call_of
from .calls import Calls
from .door import Door, Served
from .guard import Guard
from .keys import Keys
from .serve_config import ServeConfig
from .server_chat import chat_routes
from .server_completions import completion_routes
from .server_console import console_routes
from .server_debug import debug_routes
from .server_info import info_routes
from .server_metrics import metrics_routes
from .server_openapi import openapi_routes
from .server_responses import response_routes
from .server_status import status_routes
from .server_tokens import token_routes
from .wire_errors import HttpError, refusal

logger = logging.getLogger(__name__)

_HTTP_MESSAGES = {404: "no such route: see /v1/models and the README", 405: "this route has another method"}

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def create_app(load: Callable[[], Served], config: ServeConfig | None = None, keys: Keys | None = None) -> Starlette:
    """The application of the API port; `load` runs on a thread once the server is up. Its `state.door` is the Door."""
    door = Door(load, config or ServeConfig(), keys or Keys())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        door.open()
        yield
        await door.close()

    return _application(door, _api_routes(door), lifespan=lifespan)


def create_metrics_app(door: Door) -> Starlette:
    """The application of the metrics port: what operators look at, and the API for the console's playground."""
    kinds = (console_routes, debug_routes, metrics_routes)
    return _application(door, [*_all(kinds, door), *_api_routes(door)], is_aside=True)


def _api_routes(door: Door) -> list[Route]:
    kinds = (completion_routes, chat_routes, response_routes, token_routes, status_routes, info_routes, openapi_routes)
    return _all(kinds, door)


def _all(kinds: Sequence[Callable[[Door], list[Route]]], door: Door) -> list[Route]:
    return [route for routes in kinds for route in routes(door)]


def _application(
    door: Door, routes: Sequence[Route], *, lifespan: Lifespan | None = None, is_aside: bool = False
) -> Starlette:
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Calls, door=door), Middleware(Guard, door=door, is_aside=is_aside)],
        exception_handlers=dict.fromkeys((HttpError, OstinatoError), _refusal) | {HTTPException: _http_refusal},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.door = door
    return app


async def _refusal(request: Request, error: Exception) -> Response:
    told = refusal(error)
    if told.status == 500:
        logger.error("%s failed", call_of(request).id, exc_info=error)
    return told.response()


async def _http_refusal(_: Request, error: Exception) -> Response:
    """The framework's own refusals, such as unknown routes."""
    assert isinstance(error, HTTPException)
    message = _HTTP_MESSAGES.get(error.status_code, "the request is not valid HTTP for this server")
    response = refusal(HttpError(error.status_code, message)).response()
    response.headers.update(error.headers or {})
    return response
