"""The HTTP server: application and process (lines run once at start and end, but for the handlers of errors)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from ostinato.engines.errors import OstinatoError

from .bridge import Bridge
from .calls import Calls
from .config import RuntimeConfig
from .door import Door, Served
from .garbage import settle_garbage
from .libraries import REAL, Libraries
from .metrics import Metrics
from .progress import loading
from .server_chat import chat_routes
from .server_completions import completion_routes
from .server_protocol import BoundedHttp
from .server_status import status_routes
from .wire_errors import HttpError, refusal

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 30.0
_CUT_SECONDS = 5  # for the last bytes of calls that were cut at the drain's end
_KEEP_ALIVE_SECONDS = 75
_HTTP_MESSAGES = {404: "no such route: see /v1/models and the README", 405: "this route has another method"}


def create_app(load: Callable[[], Served]) -> FastAPI:
    """The application; `load` runs on a thread once the server is up. Its `state.door` is the Door."""
    door = Door(load)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        door.open()
        yield
        await door.close()

    # No schema and pages of documentation: the bodies' rules are code, not what FastAPI would derive.
    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.state.door = door
    for routes in (completion_routes, chat_routes, status_routes):
        app.include_router(routes(door))
    app.add_middleware(Calls)
    app.add_exception_handler(HTTPException, _http_refusal)
    for kind in (HttpError, OstinatoError, Exception):
        app.add_exception_handler(kind, _refusal)
    return app


async def _refusal(_: Request, error: Exception) -> Response:
    return refusal(error).response()


async def _http_refusal(_: Request, error: Exception) -> Response:
    """The framework's own refusals, such as unknown routes."""
    assert isinstance(error, HTTPException)
    message = _HTTP_MESSAGES.get(error.status_code, "the request is not valid HTTP for this server")
    response = refusal(HttpError(error.status_code, message)).response()
    response.headers.update(error.headers or {})
    return response


class Server(uvicorn.Server):
    """Drains before it stops, and stops if the model can't be loaded."""

    def __init__(self, config: uvicorn.Config, door: Door) -> None:
        super().__init__(config)
        self._door = door
        self._home: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._home = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at first, give up on what runs or loads at a second Ctrl-C. (uvicorn itself would die of it.)"""
        is_second = self.should_exit
        self.should_exit = True
        if is_second and self._door.is_loading:  # which nobody can stop: ranks may wait for each other without an end
            os._exit(128 + sig)
        if self._home is not None and (not is_second or sig == signal.SIGINT):
            self._home.call_soon_threadsafe(self._door.drain, 0.0 if is_second else DRAIN_SECONDS)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._door.failure is not None


def run(app: FastAPI, host: str, port: int) -> None:
    """Serve until SIGTERM or Ctrl-C, then let running calls end. Raises what the model failed of."""
    door: Door = app.state.door
    with _listen(host, port) as listener:
        logger.info("listening on %s port %d, Ctrl-C stops", *listener.getsockname()[:2])
        Server(server_config(app, host, port), door).run([listener])
    if door.failure is not None:
        raise door.failure


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket. It comes first, so that an address that is taken costs no loading; raises OstinatoError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        raise OstinatoError(f"can't listen on {host} port {port} ({error}): give another --host or --port") from None
    return listener


def server_config(app: FastAPI, host: str, port: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http=BoundedHttp,
        ws="none",
        lifespan="on",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(DRAIN_SECONDS) + _CUT_SECONDS,
    )


def serve(bundle: Path, config: RuntimeConfig, host: str, port: int, libraries: Libraries = REAL) -> int:
    """Serve a bundle until SIGTERM or Ctrl-C. Raises OstinatoError where it can't be opened."""
    from .shop import check_shop, open_shop  # the application itself needs no device library

    check_shop(bundle, config, libraries)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")

    def load() -> Served:
        with loading(sys.stderr.isatty()) as show:
            shop = open_shop(bundle, config, show, libraries=libraries)
        metrics = Metrics()
        if shop.coverage is not None:
            metrics.watch_graphs(shop.coverage)
        settle_garbage()
        return Served(shop.bundle.manifest.name, Bridge(shop.loop, shop.intake, shop.tokenizer, metrics))

    run(create_app(load), host, port)
    return 0
