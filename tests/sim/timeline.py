"""Simulated time: work waits until something asks for it, and runs in an order that its edges allow."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Run = Callable[[], None]


class SimClock:
    """Seconds that pass only when something sleeps; `pace`: how many times longer than it asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pace = 1.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += max(seconds * self.pace, 1e-6)


@dataclass(eq=False)
class Op:
    """One piece of work. `after`: what must be done first. `seconds`: how long it takes; it shows at the end."""

    what: str
    run: Run | None
    after: tuple[Op, ...]
    seconds: float = 0.0
    ready_at: float | None = None
    is_done: bool = False


class Timeline:
    """All work that is not done yet.

    Without a seed nothing runs before it is asked for, and then no more than it needs. With one, any work whose edges
    allow it runs at any time, in a random order; how eager it is, and whether it prefers new work or old, is the
    seed's too, so that rare orders come up.
    """

    def __init__(self, clock: SimClock, seed: int | None = None) -> None:
        self._clock = clock
        self._random = None if seed is None else random.Random(seed)
        self._eagerness, self._habit = 0.0, "any"
        if self._random is not None:
            self._eagerness = self._random.choice((0.0, 0.1, 0.5, 0.9))
            self._habit = self._random.choice(("any", "any", "newest", "oldest"))
        self._pending: dict[Op, None] = {}

    @property
    def is_lazy(self) -> bool:
        """Whether nothing runs before it is asked for."""
        return self._random is None

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, what: str, run: Run | None, after: Iterable[Op | None], seconds: float = 0.0) -> Op:
        op = Op(what, run, tuple(one for one in after if one is not None and not one.is_done), seconds)
        self._pending[op] = None
        return op

    def stir(self) -> None:
        """Called after each call to the driver: some work may run by itself."""
        if self._random is not None and self._random.random() < self._eagerness:
            self._run_some(self._random.choice((1, 1, 2, 4, 16)))

    def ask(self, op: Op | None) -> bool:
        """Whether it is done, after some more work has run."""
        if op is None or op.is_done:
            return True
        if self._random is not None:
            self._run_some(self._random.choice((1, 2, 4)))
        elif (step := self._needed(op)) is not None:
            self._run(step)
        return op.is_done

    def drop(self) -> None:
        """Nothing of it will ever run."""
        self._pending.clear()

    def _run_some(self, count: int) -> None:
        assert self._random is not None
        for _ in range(count):
            ready = [op for op in self._pending if self._is_ready(op)]
            if not ready:
                return
            place = {"newest": -1, "oldest": 0}.get(self._habit, self._random.randrange(len(ready)))
            if self._random.random() < 0.1:  # no habit without exceptions
                place = self._random.randrange(len(ready))
            self._run(ready[place])

    def _needed(self, op: Op) -> Op | None:
        """The first piece of work that `op` needs, if it can run now."""
        while True:
            first = next((one for one in op.after if not one.is_done), None)
            if first is None:
                return op if self._is_ready(op) else None
            op = first

    def _is_ready(self, op: Op) -> bool:
        if not all(one.is_done for one in op.after):
            return False
        if op.seconds and op.ready_at is None:
            op.ready_at = self._clock.now() + op.seconds
        return op.ready_at is None or self._clock.now() >= op.ready_at

    def _run(self, op: Op) -> None:
        self._pending.pop(op, None)
        if op.run is not None:
            op.run()
        op.is_done, op.after, op.run = True, (), None
