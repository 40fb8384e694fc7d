"""Who launches compiled kernels: the seam between an operator in an engine and the CUDA driver (once at start)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class Launcher(Protocol):
    """Launches cubins by name; addresses and streams are integers, as TensorRT hands them out."""

    def prepare(self, kernels: Iterable[str]) -> None:
        """Load every kernel now, so that no launch loads one: a stream that is captured can't. Again is free."""
        ...

    def launch(self, kernel: str, grid: tuple[int, int, int], pointers: Sequence[int], stream: int) -> None:
        """Put one launch on the stream; allocates nothing and waits for nothing."""
        ...
