"""Captures step shapes as CUDA graphs, largest first, and replays them; counts what is not (at start; per step).

A step is one graph, or several `parts` in order where the host has something to do between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ostinato.engines.errors import DeviceError
from ostinato.engines.program import StepShape

from .capture import ReadyGraph, capture
from .cuda import Stream
from .progress import Show

WHOLE_STEP = "step"
Record = Callable[[StepShape, str, Stream], None]  # puts a part of a step on the stream; neither waits nor allocates


@dataclass
class Coverage:
    """Steps by shape's key: replayed, and not, with the reason. Tokens count only where a step was replayed."""

    replayed: Counter[str] = field(default_factory=Counter)
    eager: Counter[tuple[str, str]] = field(default_factory=Counter)
    live_tokens: int = 0
    padded_tokens: int = 0
    graph_bytes: Mapping[str, int] = field(default_factory=dict)  # captured step shape's key → GPU memory of its graphs

    @property
    def padding_share(self) -> float:
        """Of all tokens that graphs computed, how many nobody asked for."""
        return 1 - self.live_tokens / self.padded_tokens if self.padded_tokens else 0.0

    def steps(self, phase: str) -> tuple[int, int]:
        """Steps of "decode" or "prefill" so far: replayed, and not. May be read from any thread."""
        replayed, eager = list(self.replayed.items()), list(self.eager.items())
        return (
            sum(count for key, count in replayed if key.startswith(phase)),
            sum(count for (key, _), count in eager if key.startswith(phase)),
        )

    def lines(self) -> list[str]:
        """The report, a line a fact."""
        num_replayed, num_eager = self.replayed.total(), self.eager.total()
        first = f"{num_replayed} of {num_replayed + num_eager} steps replayed, {self.padding_share:.1%} padding"
        replayed = [f"replayed {key}: {count}" for key, count in sorted(self.replayed.items(), key=_by_shape)]
        eager = [f"not replayed {key}: {count}: {reason}" for (key, reason), count in sorted(self.eager.items())]
        return [first, *replayed, *eager]


class Graphs:
    """The graphs of one stream. `record` is what a step launches. One thread at a time.

    `is_strict`: a decode step that is not captured is refused, at capture and at run.
    """

    def __init__(
        self, stream: Stream, record: Record, *, parts: Sequence[str] = (WHOLE_STEP,), is_strict: bool = False
    ) -> None:
        self._stream, self._record = stream, record
        self._parts, self._is_strict = tuple(parts), is_strict
        self._graphs: dict[tuple[str, str], ReadyGraph] = {}
        self._memory: dict[str, int] = {}
        self._failures: dict[str, str] = {}
        self.coverage = Coverage(graph_bytes=self._memory)

    @property
    def memory(self) -> Mapping[str, int]:
        """Captured step shape's key → bytes of the GPU that its graphs took."""
        return self._memory

    @property
    def failures(self) -> Mapping[str, str]:
        """Step shape's key → why its capture failed."""
        return self._failures

    def capture(self, shapes: Iterable[StepShape], progress: Show) -> None:
        """Run every shape once, on whatever its inputs hold, then capture it.

        What a first launch loads or allocates is there before the capture, and a shape that can't run at all is a
        DeviceError. A capture that fails is named in `failures`, and its steps run eagerly; strict decode raises.
        """
        largest_first = sorted(shapes, key=lambda shape: (shape.tokens, shape.rows), reverse=True)
        for done, shape in enumerate(largest_first):
            progress(f"capture {shape.key}", done, len(largest_first))
            for part in self._parts:
                self._record(shape, part, self._stream)
            self._stream.wait(f"the first run of {shape.key}")
            try:
                self._capture(shape)
            except DeviceError as error:
                if self._refuses(shape):
                    raise DeviceError(f"{shape.key} can't be captured, and graphs are strict: {error}") from None
                self._failures[shape.key] = str(error)
            progress(f"capture {shape.key}", done + 1, len(largest_first))

    def run(self, shape: StepShape, live_tokens: int, part: str | None = None) -> None:
        """Put one step, or its next part, on the stream. Raises DeviceError.

        `live_tokens`: how many of the shape's are not pads. A step counts with its first part.
        """
        part = self._parts[0] if part is None else part
        assert part in self._parts, f"{part} is not a part of a step: {', '.join(self._parts)}"
        graph = self._graphs.get((shape.key, part))  # of all parts or none
        if graph is None and self._refuses(shape):
            raise DeviceError(f"{shape.key} is not captured, and graphs are strict: {self._reason(shape)}")
        if part == self._parts[0]:
            self._count(shape, live_tokens, is_replayed=graph is not None)
        if graph is None:
            self._record(shape, part, self._stream)
        else:
            graph.launch(self._stream)

    def close(self) -> None:
        """Give the graphs back; the device must be done with them."""
        for key in list(self._graphs):
            self._graphs[key].close()
            del self._graphs[key]

    def _capture(self, shape: StepShape) -> None:
        """All parts or none."""
        device = self._stream.device
        free = device.memory().free
        made: dict[tuple[str, str], ReadyGraph] = {}
        try:
            for part in self._parts:
                name = f"the {part} graph of {shape.key}"
                made[shape.key, part] = capture(self._stream, partial(self._record, shape, part), name)
            self._stream.wait(f"the upload of {shape.key}")
            self._memory[shape.key] = max(0, free - device.memory().free)
        except BaseException:
            for graph in made.values():
                graph.close()
            raise
        self._graphs |= made

    def _refuses(self, shape: StepShape) -> bool:
        return self._is_strict and shape.phase == "decode"

    def _reason(self, shape: StepShape) -> str:
        return self._failures.get(shape.key, "it was not among the shapes to capture")

    def _count(self, shape: StepShape, live_tokens: int, *, is_replayed: bool) -> None:
        coverage = self.coverage
        if is_replayed:
            coverage.replayed[shape.key] += 1
            coverage.live_tokens += live_tokens
            coverage.padded_tokens += shape.tokens
        else:
            coverage.eager[shape.key, self._reason(shape)] += 1


def _by_shape(item: tuple[str, int]) -> tuple[str, int]:
    phase, tokens = item[0].split(" ")
    return phase, int(tokens)
