"""Simulated stream capture: nodes with edges, and what CUDA forbids meanwhile."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cached_property

from .timeline import Op, Run


@dataclass(eq=False)
class Node:
    """One captured piece of work. `at_launch` happens when the graph is launched, not when the node runs."""

    what: str
    run: Run
    at_launch: Run | None
    after: tuple[Node, ...]
    seconds: float = 0.0


@dataclass(eq=False)
class SimStream:
    """`last`: the newest work on it. `capture`: what it is captured into."""

    number: int
    last: Op | None = None
    capture: Capture | None = None


@dataclass(eq=False)
class Capture:
    """One capture under way. `frontier`: the newest nodes of each stream in it."""

    origin: SimStream
    thread: int = field(default_factory=threading.get_ident)
    nodes: list[Node] = field(default_factory=list)
    frontier: dict[SimStream, tuple[Node, ...]] = field(default_factory=dict)
    is_invalid: bool = False

    def add(self, stream: SimStream, what: str, run: Run, at_launch: Run | None, seconds: float) -> None:
        node = Node(what, run, at_launch, self.frontier.get(stream, ()), seconds)
        self.nodes.append(node)
        self.frontier[stream] = (node,)

    def join(self, stream: SimStream, nodes: tuple[Node, ...]) -> None:
        """What comes next on the stream is after these nodes."""
        stream.capture = self
        held = self.frontier.get(stream, ())
        self.frontier[stream] = held + tuple(node for node in nodes if node not in held)

    def unjoined(self) -> list[Node]:
        """What the origin does not wait for."""
        reached: set[Node] = set()
        waiting = list(self.frontier[self.origin])
        while waiting:
            node = waiting.pop()
            if node not in reached:
                reached.add(node)
                waiting.extend(node.after)
        return [node for node in self.nodes if node not in reached]


@dataclass(eq=False)
class SimEvent:
    """Recorded outside a capture (`op`) or inside one (`capture`, `nodes`)."""

    op: Op | None = None
    capture: Capture | None = None
    nodes: tuple[Node, ...] = ()


@dataclass(eq=False)
class SimGraph:
    """Captured, or ready to launch; `last`: the end of its newest launch, after which the next one comes."""

    nodes: tuple[Node, ...]
    last: Op | None = None

    @cached_property
    def takes_time(self) -> bool:
        """Whether some node would not be done at once."""
        return any(node.seconds for node in self.nodes)
