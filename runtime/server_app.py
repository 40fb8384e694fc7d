"""The server's two applications, one a port (made once at start)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.routing import Route

from .application import Application
from .door import Door, Served
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


def create_app(load: Callable[[], Served], config: ServeConfig | None = None, keys: Keys | None = None) -> Application:
    """The application of the API port; `load` runs on a thread once the server is up. Its `state.door` is the Door."""
    door = Door(load, config or ServeConfig(), keys or Keys())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        door.open()
        yield
        await door.close()

    return Application(door, _api_routes(door), lifespan=lifespan)


def create_metrics_app(door: Door) -> Application:
    """The application of the metrics port: what operators look at, and the API for the console's playground."""
    kinds = (console_routes, debug_routes, metrics_routes)
    return Application(door, [*_all(kinds, door), *_api_routes(door)], is_aside=True)


def _api_routes(door: Door) -> list[Route]:
    kinds = (completion_routes, chat_routes, response_routes, token_routes, status_routes, info_routes, openapi_routes)
    return _all(kinds, door)


def _all(kinds: Sequence[Callable[[Door], list[Route]]], door: Door) -> list[Route]:
    return [route for routes in kinds for route in routes(door)]
