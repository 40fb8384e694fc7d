"""How a command ends early: SIGTERM as Ctrl-C does, with what it started and half wrote gone first (once per call)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_EXIT_CODE = 128 + signal.SIGTERM  # as shells say it


@contextmanager
def orderly_termination() -> Iterator[None]:
    """While the block runs, SIGTERM raises SystemExit in it. For commands: it needs the main thread."""
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Processes started in the block never hear Ctrl-C, which a terminal sends to all: whoever started them does, and
    ends them. This one hears it behind the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(_EXIT_CODE)
