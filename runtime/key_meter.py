"""What each key uses: calls at once and calls a minute (lines run per call)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .keys import Key
from .serve_limits import ServeLimits
from .wire_errors import HttpError


class KeyMeter:
    """Counts by key, on the asyncio thread. A minute's calls may come at once; after that, one as another falls due."""

    def __init__(self, limits: ServeLimits, now: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._now = now
        self._running: dict[str, int] = {}
        self._budgets: dict[str, tuple[float, float]] = {}  # calls that may come, and when that was so

    @contextmanager
    def call(self, key: Key) -> Iterator[None]:
        """A call lasts as long as the block. Raises HttpError 429 where the key has none left."""
        running = self._running.get(key.name, 0)
        most = key.max_concurrent or self._limits.max_concurrent_per_key
        if running >= most:
            raise _refusal(f"this key has {running} calls running, and may have {most}: wait for one to end", 1)
        self._spend(key)
        self._running[key.name] = running + 1
        try:
            yield
        finally:
            self._running[key.name] -= 1

    def _spend(self, key: Key) -> None:
        rate = key.requests_per_minute or self._limits.requests_per_minute_per_key
        if rate is None:
            return
        now = self._now()
        budget, since = self._budgets.get(key.name, (float(rate), now))
        budget = min(float(rate), budget + (now - since) * rate / 60)
        if budget < 1:
            seconds = math.ceil((1 - budget) * 60 / rate)
            raise _refusal(f"this key may make {rate} calls a minute: try again in {seconds} s", seconds)
        self._budgets[key.name] = (budget - 1, now)


def _refusal(message: str, seconds: int) -> HttpError:
    return HttpError(429, message, code="rate_limit_exceeded", retry_seconds=seconds)
