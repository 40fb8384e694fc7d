"""weights.bin of an `x86` bundle on its way to disk: arrays one after another, aligned (offline)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.decoder_record import ALIGNMENT


class WeightFile:
    """Give arrays to `put` in the order in which a step reads them. `wrote` hears the bytes of each."""

    def __init__(self, path: Path, wrote: Callable[[int], None]) -> None:
        self._file = path.open("wb")
        self._wrote = wrote

    def put(self, array: NDArray[Any]) -> int:
        """Write an array as it lies in memory; returns its offset, a multiple of ALIGNMENT."""
        self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT))
        offset = self._file.tell()
        self._file.write(np.ascontiguousarray(array).data)
        self._wrote(array.nbytes)
        return offset

    @property
    def size_bytes(self) -> int:
        """What was written so far."""
        return self._file.tell()

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
