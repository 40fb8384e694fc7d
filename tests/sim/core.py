"""The inside of the simulated driver: what every call goes through, faults, and how work gets onto a stream."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cuda.bindings.driver import CUresult as Status

from .capture import Capture, SimEvent, SimGraph, SimStream
from .kernels import Kernels
from .memory import DeviceMemory, HostMemory, SimError
from .timeline import Op, Run, SimClock, Timeline

_LEGACY_STREAMS = (0, 1, 2)  # null, legacy, per thread


class RefusedError(Exception):
    """A call that has no effect but its status."""

    def __init__(self, status: Status) -> None:
        self.status = status


@dataclass
class Faults:
    """What goes wrong. `at`: number of the call, from 1 → status. `calls`: name → status, every time.

    `lost`: what every call answers once the device is lost.
    """

    at: dict[int, Status] = field(default_factory=dict)
    calls: dict[str, Status] = field(default_factory=dict)
    lost_at: int = 0  # number of the call from which on the device is lost; 0: never
    lost: Status | None = None

    def status(self, number: int, name: str) -> Status | None:
        if self.lost_at and number >= self.lost_at:
            self.lost = Status.CUDA_ERROR_DEVICE_UNAVAILABLE
        if self.lost is not None and name != "cuDevicePrimaryCtxRelease":
            return self.lost
        return self.at.get(number, self.calls.get(name))


class SimCore:
    """`num_devices` GPUs, of which a process uses one; threads may share it.

    `seed`: interleave at random; None: as late as possible. `capacity`: bytes of its memory.
    """

    def __init__(self, *, seed: int | None = None, capacity: int = 8 << 30, num_devices: int = 1) -> None:
        self.num_devices = num_devices
        self.lock = threading.RLock()
        self.clock = SimClock()
        self.timeline = Timeline(self.clock, seed)
        self.memory, self.host = DeviceMemory(capacity), HostMemory()
        self.kernels = Kernels()
        self.faults = Faults()
        self.calls: Counter[str] = Counter()
        self.num_calls = 0
        self.slow: dict[str, float] = {}  # what work is → seconds that it takes (inf: it hangs), replayed or not
        self.arguments: dict[str, tuple[Any, ...]] = {}  # of each function's newest call
        self.num_allocations = 0
        self.abandoned: list[str] = []  # what went with its context instead of being given back
        self.graph_bytes = 0
        self.live: dict[tuple[str, int], Any] = {}  # handles: (kind, number) → object
        self.contexts = 0
        self._current = threading.local()
        self._next = 0x5000
        self._captures: dict[int, Capture] = {}  # by thread

    def alive(self) -> list[str]:
        """Everything that has not been given back."""
        memory = [f"device memory {address:#x}" for address in self.memory.live]
        pinned = [f"pinned memory {address:#x}" for address in self.host.live]
        return memory + pinned + [f"{kind} {number:#x}" for kind, number in self.live] + ["context"] * self.contexts

    def enqueue(self, stream: Any, what: str, run: Run, at_launch: Run | None = None, seconds: float = 0.0) -> None:
        """Put work on a stream, or into its capture; `at_launch` happens at once, or when the graph is launched."""
        target = self.stream(stream)
        if target.capture is None:
            if at_launch is not None:
                at_launch()
            target.last = self.timeline.add(what, run, (target.last,), self.slow.get(what, seconds))
        elif target.capture.is_invalid:
            raise RefusedError(Status.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        else:
            target.capture.add(target, what, run, at_launch, seconds)

    def submit(self, stream: int, what: str, run: Run, seconds: float = 0.0, *, call: str = "") -> bool:
        """The way in for a library that is given streams, as TensorRT is: False if CUDA refuses.

        `call`: what it counts as among the calls, where that is not `what` the work is.
        """
        with self.lock:
            try:
                self.begin(call or what, _SUBMITTED, ())
                self.enqueue(stream, what, run, seconds=seconds)
            except RefusedError:
                return False
            self.timeline.stir()
            return True

    def enter(self, what: str) -> None:
        """A call of such a library that is not allowed in a capture. Raises RefusedError."""
        self.begin(what, _ENTERED, ())

    def stream(self, handle: Any) -> SimStream:
        number = int(handle)
        if number in _LEGACY_STREAMS:
            if capture := self.capture_here():
                capture.is_invalid = True
                raise RefusedError(Status.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
            raise SimError("work is put on the legacy stream, which waits for every other one")
        found: SimStream = self.thing("stream", number)
        return found

    def thing(self, kind: str, handle: Any) -> Any:
        """What a handle stands for; a real driver may crash on one that does not live."""
        number = int(handle)
        if (found := self.live.get((kind, number))) is None:
            raise SimError(f"{kind} {number:#x} is used, and does not live")
        return found

    def make(self, kind: str, thing: Any) -> int:
        self._next += 0x10
        self.live[kind, self._next] = thing
        return self._next

    def unmake(self, kind: str, handle: Any) -> Any:
        found = self.thing(kind, handle)
        del self.live[kind, int(handle)]
        return found

    def capture_here(self) -> Capture | None:
        """What the calling thread is capturing."""
        return self._captures.get(threading.get_ident())

    def begin_capture(self, stream: SimStream) -> None:
        stream.capture = self._captures[threading.get_ident()] = Capture(stream)
        stream.capture.frontier[stream] = ()

    def end_capture(self, stream: SimStream) -> SimGraph:
        capture = stream.capture
        if capture is None:
            raise RefusedError(Status.CUDA_ERROR_ILLEGAL_STATE)
        if capture.origin is not stream:
            capture.is_invalid = True
            raise RefusedError(Status.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED)
        if capture.thread != threading.get_ident():
            raise RefusedError(Status.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)
        del self._captures[capture.thread]
        for joined in capture.frontier:
            joined.capture = None
        if capture.is_invalid:
            raise RefusedError(Status.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        if capture.unjoined():
            raise RefusedError(Status.CUDA_ERROR_STREAM_CAPTURE_UNJOINED)
        return SimGraph(tuple(capture.nodes))

    def record(self, event: SimEvent, stream: SimStream) -> None:
        capture = stream.capture
        event.op, event.capture, event.nodes = None, capture, ()
        if capture is None:
            event.op = stream.last = self.timeline.add("event", None, (stream.last,))
        else:
            event.nodes = capture.frontier[stream]

    def order(self, stream: SimStream, event: SimEvent) -> None:
        if event.capture is not None:
            if stream.capture not in (None, event.capture) or event.capture not in self._captures.values():
                raise RefusedError(Status.CUDA_ERROR_STREAM_CAPTURE_MERGE)
            event.capture.join(stream, event.nodes)
        elif stream.capture is not None:
            stream.capture.is_invalid = True  # an edge from outside can't be part of a graph
            raise RefusedError(Status.CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
        else:
            stream.last = self.timeline.add("wait", None, (stream.last, event.op))

    def launch_graph(self, graph: SimGraph, stream: SimStream) -> None:
        """Its nodes, after what is on the stream and after its own launch before; each may interleave with others."""
        if stream.capture is not None:
            raise SimError("a graph is launched into a capture")
        if self.timeline.is_lazy and not graph.takes_time and not self.slow:
            stream.last = graph.last = self._launch_whole(graph, stream)
            return
        ops: dict[Any, Any] = {}
        for node in graph.nodes:
            if node.at_launch is not None:
                node.at_launch()
            after = [ops[before] for before in node.after] or [stream.last, graph.last]
            ops[node] = self.timeline.add(node.what, node.run, after, self.slow.get(node.what, node.seconds))
        stream.last = graph.last = self.timeline.add("graph's end", None, [*ops.values(), stream.last, graph.last])

    def _launch_whole(self, graph: SimGraph, stream: SimStream) -> Op:
        """As one piece of work, where nothing may come between its nodes: they run in the order of their capture."""
        for node in graph.nodes:
            if node.at_launch is not None:
                node.at_launch()

        def run() -> None:
            for node in graph.nodes:
                if self.faults.lost is None:
                    node.run()

        return self.timeline.add("graph", run, (stream.last, graph.last))

    def lose(self) -> None:
        """A kernel crashed: nothing that is queued will run, and every call says so."""
        self.faults.lost = Status.CUDA_ERROR_LAUNCH_FAILED
        self.timeline.drop()

    def begin(self, name: str, rules: Rules, arguments: tuple[Any, ...]) -> None:
        """What stands before every call; raises RefusedError where it has no effect."""
        self.calls[name] += 1
        self.num_calls += 1
        self.arguments[name] = arguments
        if (status := self.faults.status(self.num_calls, name)) is not None:
            raise RefusedError(status)
        if rules.needs_context and not (self.contexts and getattr(self._current, "is_set", False)):
            raise RefusedError(Status.CUDA_ERROR_INVALID_CONTEXT)
        capture = self.capture_here()
        if capture is not None and not rules.may_be_captured and self.faults.lost is None:
            capture.is_invalid = True
            raise RefusedError(Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)

    def set_current(self, is_set: bool) -> None:
        self._current.is_set = is_set


@dataclass(frozen=True)
class Rules:
    """`outputs`: values beside the status. `may_be_captured`: allowed in a thread that is capturing."""

    outputs: int = 0
    may_be_captured: bool = False
    needs_context: bool = True


_SUBMITTED, _ENTERED = Rules(may_be_captured=True), Rules()
F = TypeVar("F", bound=Callable[..., Any])


def call(outputs: int = 0, *, may_be_captured: bool = False, needs_context: bool = True) -> Callable[[F], F]:
    """A function of the driver: returns (status, value…) as cuda-python does, with None for what there is not."""
    rules = Rules(outputs, may_be_captured, needs_context)

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def called(self: SimCore, *arguments: Any) -> tuple[Any, ...]:
            with self.lock:
                try:
                    self.begin(function.__name__, rules, arguments)
                    value = function(self, *arguments)
                except RefusedError as refused:
                    return (refused.status, *[None] * outputs)
                self.timeline.stir()
            if outputs == 0:
                return (Status.CUDA_SUCCESS,)
            return (Status.CUDA_SUCCESS, *(value if outputs > 1 else (value,)))

        return called  # type: ignore[return-value]

    return decorate
