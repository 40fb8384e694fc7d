"""The server's process: its ports, its signals and its end (lines run once at start and end, and at each tick)."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import uvicorn
from starlette.applications import Starlette

from ostinato.engines.errors import OstinatoError, RecipeError

from .bridge import Bridge
from .door import Door, Served
from .garbage import settle_garbage
from .keys import read_keys
from .libraries import REAL, Libraries
from .logs import set_up_logs
from .metrics import Metrics
from .otel import open_tracer
from .progress import end_bars, loading
from .resident import release_freed_memory
from .sd_notify import Manager
from .serve_config import ServeConfig
from .server_app import create_app, create_metrics_app
from .server_protocol import BoundedHttp

logger = logging.getLogger(__name__)

CUT_SECONDS = 5  # for the last bytes of calls that were cut at the drain's end
_ASIDE_SECONDS = 2  # the same for the metrics port, which closes last
_LEFT_SECONDS = 1  # the same where the model still loads, so that calls have only been refused
LOST_SECONDS = 5  # for everybody to hear of it, before a process ends that can't serve any more
_TICKS_A_SECOND = 10
_KEEP_ALIVE_SECONDS = 75
_OTHER_FILES = 512


class Server(uvicorn.Server):
    """Both ports on one event loop. Drains before it stops; stops if the model can't be loaded or is lost for good.

    The addresses are taken at once, so that one that is not free costs no loading; raises OstinatoError.
    """

    def __init__(self, app: Starlette) -> None:
        self.door: Door = app.state.door
        config = self.door.config
        drain_seconds = math.ceil(config.limits.drain_seconds)
        super().__init__(_uvicorn_config(app, drain_seconds + CUT_SECONDS))
        self._home: asyncio.AbstractEventLoop | None = None
        self._manager = Manager()
        self._is_told_to_drain = False
        self._num_lost_ticks = 0
        self._listener = _listen("--host", config.host, "--port", config.port)
        self.url = _url(self._listener)
        self._aside: _Aside | None = None
        self.metrics_url: str | None = None
        if config.metrics_port is not None:
            try:
                listener = _listen("--metrics-host", config.metrics_host, "--metrics-port", config.metrics_port)
            except OstinatoError:
                self._listener.close()
                raise
            self._aside = _Aside(create_metrics_app(self.door), listener)
            self.metrics_url = _url(listener)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets or [self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._home = asyncio.get_running_loop()
        if self.should_exit:  # a signal was faster
            self.door.drain(0.0)
        await super().startup(sockets)
        if self._aside is not None:
            self._aside.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """The metrics port closes last: it shows how the drain goes."""
        if self.door.is_left:
            self.config.timeout_graceful_shutdown = _LEFT_SECONDS
        await super().shutdown(sockets)
        if self._aside is not None:
            await self._aside.stop()
        if self.door.is_left:
            _end_process()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at first, give up on what runs at a second Ctrl-C. (uvicorn itself would die of it.)"""
        is_second = self.should_exit
        self._is_told_to_drain = self._home is not None
        self.should_exit = True
        if self._home is not None and (not is_second or sig == signal.SIGINT):
            seconds = 0.0 if is_second else self.door.limits.drain_seconds
            self._home.call_soon_threadsafe(self.door.drain, seconds)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to stop. The port stays open while it drains, so that new calls hear why."""
        is_over = await super().on_tick(counter)
        if counter % _TICKS_A_SECOND == 0:
            self._manager.tell(self.door.trouble())
        self._num_lost_ticks += self.door.is_lost
        if self.door.failure is not None or self._num_lost_ticks > LOST_SECONDS * _TICKS_A_SECOND:
            return True
        return is_over and (self.door.is_drained or not self._is_told_to_drain)


class _Aside(uvicorn.Server):
    """The metrics port: no signals and no lifespan of its own."""

    def __init__(self, app: Starlette, listener: socket.socket) -> None:
        super().__init__(_uvicorn_config(app, _ASIDE_SECONDS))
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    def start(self) -> None:
        self._task = asyncio.create_task(self.serve([self._listener]))

    async def stop(self) -> None:
        self.should_exit = True
        if self._task is not None:
            await self._task


def _end_process() -> NoReturn:
    """With 0, as it was told to. Loading goes on in native code on a thread that nobody can stop, and an interpreter
    that ends in order would wait for it. Ranks and workers end with the process; nothing else has begun.
    """
    end_bars()
    logging.shutdown()
    os._exit(0)


def _listen(host_option: str, host: str, port_option: str, port: int) -> socket.socket:
    """A bound socket; raises OstinatoError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except (OSError, ValueError) as error:  # or no name at all
        listener.close()
        raise OstinatoError(
            f"can't listen on {host} port {port} ({error}): give another {host_option} or {port_option}"
        ) from None
    return listener


def _raise_file_limit(num_connections: int) -> None:
    """Files for two ports' connections beside all others, as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * num_connections + _OTHER_FILES
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        logger.warning("%d open files are allowed, %d connections may need %d: raise it", most, num_connections, wanted)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _uvicorn_config(app: Starlette, shutdown_seconds: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=BoundedHttp,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=shutdown_seconds,
    )


def run(app: Starlette) -> None:
    """Serve until SIGTERM or Ctrl-C, then let running calls end; while the model loads these end the process, with 0.
    Raises what the model failed of.
    """
    server = Server(app)
    logger.info("listening on %s, Ctrl-C stops", server.url)
    if server.metrics_url is not None:
        logger.info("metrics and console on %s", server.metrics_url)
    server.run()
    if server.door.failure is not None:
        raise server.door.failure


def serve(config: ServeConfig, libraries: Libraries = REAL) -> int:
    """Serve a bundle until SIGTERM or Ctrl-C: 0, or 1 if it failed. Raises OstinatoError for what can't be served."""
    from .shop import check_shop, open_shop  # the application itself needs no device library

    bundle = config.bundle
    if bundle is None:
        raise RecipeError(
            "no bundle to serve: give its folder, such as engines/store/NAME (`ostinato build RECIPE` makes one), or "
            "set bundle in --config FILE"
        )
    keys = read_keys(config.api_keys, os.environ)
    config.check_exposure(bool(keys))
    check_shop(bundle, config.engine, libraries)
    set_up_logs(config.log_format, config.log_level)
    tracer = open_tracer(config.otlp_endpoint, os.environ)

    def load() -> Served:
        with loading(sys.stderr.isatty()) as show:
            shop = open_shop(bundle, config.engine, show, libraries=libraries)
        metrics = Metrics()
        if shop.coverage is not None:
            metrics.watch_graphs(shop.coverage)
        bridge = Bridge(shop.loop, shop.intake, shop.tokenizer, metrics, config.limits)
        bridge.ledger.tracer = tracer
        bridge.grammars.warm()
        settle_garbage()
        release_freed_memory()
        return Served(shop.bundle.manifest.name, bridge, shop.bundle.manifest)

    app = create_app(load, config, keys)
    _raise_file_limit(config.limits.max_connections)
    try:
        run(app)
    except OstinatoError as error:
        if app.state.door.failure is None:
            raise
        print(f"ostinato serve: {error}", file=sys.stderr)
        return 1
    return 0
