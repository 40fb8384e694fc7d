"""What the routes stand on: the model behind this server, from loading to closing (lines run once at start and end)."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from typing import NamedTuple

from ostinato.engines.errors import OstinatoError

from .bridge import Bridge, ClosedError
from .chunks import Head
from .wire_errors import HttpError

logger = logging.getLogger(__name__)


class Served(NamedTuple):
    """A loaded model under the name that callers use."""

    name: str
    bridge: Bridge


class Door:
    """Loads the model on a thread while the server answers already, and closes it at the end."""

    def __init__(self, load: Callable[[], Served]) -> None:
        self.failure: Exception | None = None  # of loading, or of the model by the time it was closed
        self.created = int(time.time())
        self._load = load
        self._served: Served | None = None
        self._loading: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Start loading."""
        self._loading = asyncio.create_task(self._open())

    async def _open(self) -> None:
        try:
            served = await asyncio.to_thread(self._load)
        except Exception as error:
            self.failure = error
            return
        served.bridge.start()
        self._served = served
        logger.info("ready: serving %s", served.name)

    async def close(self) -> None:
        """Wait for loading if it is under way, then stop the loop and release the engine."""
        if self._loading is not None:
            await self._loading
        if self._served is not None:
            try:
                if (trouble := await self._served.bridge.close()) is not None:
                    self.failure = OstinatoError(trouble)
            except OstinatoError as error:
                self.failure = error

    def drain(self, seconds: float) -> None:
        """Take nothing new; what is not done in `seconds` fails. Called on the asyncio thread."""
        if self._served is not None:
            self._served.bridge.drain(seconds)

    @property
    def is_loading(self) -> bool:
        """Whether the model is on its way."""
        return self._loading is not None and not self._loading.done()

    def trouble(self) -> str | None:
        """Why this server should get no calls now, None if it should."""
        if self.failure is not None:
            return "the model could not be loaded"
        return "the model is loading" if self._served is None else self._served.bridge.trouble()

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
        return Head(f"{prefix}-{uuid.uuid4().hex}", self.served().name, int(time.time()))
