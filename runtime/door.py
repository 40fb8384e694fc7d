"""What the routes stand on: the model behind this server, from loading to closing (lines run once at start and end)."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from ostinato.engines.errors import OstinatoError
from ostinato.engines.manifest import Manifest

from .bridge import Bridge, ClosedError
from .chunks import Head
from .http_metrics import HttpMetrics
from .key_meter import KeyMeter
from .keys import Keys
from .serve_config import ServeConfig
from .wire_errors import HttpError

_POLL_SECONDS = 0.05

logger = logging.getLogger(__name__)


class Served(NamedTuple):
    """A loaded model under the name that callers use."""

    name: str
    bridge: Bridge
    manifest: Manifest | None = None  # of the bundle, where it comes from one


class Door:
    """Loads the model on a thread while the server answers already, and closes it at the end."""

    def __init__(self, load: Callable[[], Served], config: ServeConfig, keys: Keys) -> None:
        self.failure: Exception | None = None  # of loading, or of the model by the time it was closed
        self.is_left = False  # loading goes on, and who drains ends the process instead of waiting for it
        self.created = int(time.time())
        self.config = config
        self.keys = keys
        self.meter = KeyMeter(config.limits)
        self.http = HttpMetrics()
        self.num_arriving_bytes = 0  # of bodies
        self.limits = config.limits
        self.strict_fields = config.strict_fields
        self._load = load
        self._served: Served | None = None
        self._is_draining = False
        self._loading: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Start loading, unless the drain began before."""
        if not self._is_draining:
            self._loading = asyncio.create_task(self._open())

    async def _open(self) -> None:
        try:
            served = await asyncio.to_thread(self._load)
        except Exception as error:
            self.failure = error
            return
        if self.is_left:
            return
        served.bridge.start()
        self._served = served
        logger.info("ready: serving %s", served.name)

    async def close(self) -> None:
        """Wait for loading if it is under way and was not left, then stop the loop and release the engine."""
        if self._loading is not None and not self.is_left:
            await self._loading
        if self._served is not None:
            while self._is_draining and not self._served.bridge.is_quiet:  # calls of the metrics port; a drain ends
                await asyncio.sleep(_POLL_SECONDS)
            try:
                if (trouble := await self._served.bridge.close()) is not None:
                    self.failure = OstinatoError(trouble)
            except OstinatoError as error:
                self.failure = error

    def drain(self, seconds: float) -> None:
        """Take nothing new; what is not done in `seconds` fails. Called on the asyncio thread."""
        self._is_draining = True
        if self._served is not None:
            logger.info("stopping: nothing new is taken, running calls have %g s to end", seconds)
            self._served.bridge.drain(seconds)
        elif self._loading is not None and not self._loading.done():
            logger.info("stopping: the model is still loading, and is left")
            self.is_left = True

    def check_room(self) -> None:
        """Raises what a call would be refused with whatever it says, so that nothing of it need be read."""
        self.served().bridge.check_room()

    @property
    def is_drained(self) -> bool:
        """Whether it was told to drain, and nothing runs any more."""
        return self._is_draining and (self._served is None or self._served.bridge.is_quiet)

    @property
    def is_lost(self) -> bool:
        """Whether only a new process can serve again."""
        return self._served is not None and self._served.bridge.is_lost

    def trouble(self) -> str | None:
        """Why this server should get no calls now, None if it should."""
        if self.failure is not None:
            return "the model could not be loaded"
        return "the model is loading" if self._served is None else self._served.bridge.trouble()

    @property
    def bridge(self) -> Bridge | None:
        """The bridge to the model, once it is loaded."""
        return None if self._served is None else self._served.bridge

    def served(self) -> Served:
        """The model; ClosedError before it is loaded."""
        if self._served is None:
            raise ClosedError(self.trouble() or "the model is loading")
        return self._served

    def find(self, name: str) -> Bridge:
        """The bridge to the model that a call names; HttpError 404 for any other name."""
        served = self.served()
        if name != served.name:
            raise HttpError(
                404,
                f"this server has no such model, it serves {served.name!r}: name that",
                param="model",
                code="model_not_found",
            )
        return served.bridge

    def head(self, prefix: str) -> Head:
        """The head of a new answer."""
        return Head(f"{prefix}{secrets.token_hex(16)}", self.served().name, int(time.time()))
