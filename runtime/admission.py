"""Who may start: waiters in order while rows, tokens and blocks last, and why the others wait (lines run per step)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ostinato.engines.sizes import Limits

from .pages import Pages
from .request import Request
from .room import Room
from .waiting import Waiter, WaitingLine, may_overtake


class Admission:
    """`is_stuck`: no waiter could start for want of blocks, and since then nothing came that could help one."""

    def __init__(self, limits: Limits, pages: Pages) -> None:
        self.line = WaitingLine()
        self.is_stuck = False
        self.max_rows_per_tenant: int | None = None
        self._limits = limits
        self._pages = pages
        self._held_by = "turn"  # what kept those who are left from starting when a plan last tried

    def may_start(self, num_running: int) -> bool:
        """Whether a waiter may start now, beside all that run."""
        limits = self._limits
        most = min(limits.max_rows, limits.max_step_tokens)
        return len(self.line) > 0 and not self.is_stuck and num_running < most

    def reason(self, num_running: int) -> str:
        """Why who waits has to, one of `timeline.REASONS`."""
        if not len(self.line):
            return "turn"
        if num_running == self._limits.max_rows:
            return "slots"
        return "blocks" if self.is_stuck else self._held_by

    def preempted(self, request: Request) -> None:
        """A row gave its blocks up: it waits at the front."""
        self.line.add_front(request)
        self.is_stuck = False
        self._held_by = "blocks"

    def starting(self, running: Sequence[Request], room: Room) -> Iterator[Request]:
        """Waiters that start, blocks in hand, each added to `running` and `room` before the next is asked for.

        One that lacks blocks may be overtaken, within bounds.
        """
        if self.is_stuck:
            return
        blocked: list[Waiter] = []
        num_running = len(running)
        self._held_by = "turn"
        for waiter in self.line.ahead():
            if len(running) == self._limits.max_rows or not room.num_tokens or not room.num_sampled:
                self._held_by = "slots" if room.num_tokens else "budget"
                return
            if blocked and not may_overtake(blocked):
                break
            if self._has_its_share(waiter.request.tenant, running):
                self._held_by = "tenant"
                continue
            # A free block for each running row keeps a new one from being preempted at once.
            if not self._pages.admit(waiter.request, headroom=len(running)):
                blocked.append(waiter)
                continue
            for other in blocked:
                other.num_overtaken += 1
            self.line.leave(waiter.request.id)
            yield waiter.request
        self.is_stuck = bool(blocked) and len(running) == num_running
        if blocked:
            self._held_by = "blocks"

    def _has_its_share(self, tenant: str, running: Sequence[Request]) -> bool:
        """Whether no more rows may go to a tenant."""
        most = self.max_rows_per_tenant
        return most is not None and sum(request.tenant == tenant for request in running) >= most
