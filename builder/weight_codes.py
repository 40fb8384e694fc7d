"""Each weight of a decoder as codes that `x86` keeps: 4-bit ones that it was published in, else the nearest (offline).

    recipe  published in 4 bits   published in any other way
    int8    kept                  8 bits
    int4    kept                  4 bits; 8 of embedding and head

The embedding always has 8 bits, since one of its rows is read at a time. All are multiplied as bytes.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from ostinato.engines.decoder_record import Bits
from ostinato.engines.errors import CheckpointError
from ostinato.plugins.x86_pack import MAX_GROUP, Bytes, Nibbles

from .checkpoint import F32, Checkpoint
from .gguf_codes import PUBLISHED
from .group_codes import StepCodes, byte_codes, nibbles_of, stacked, step_codes
from .shard import ParameterSlice, weight_slices
from .weights import read_parameter

_BYTES = f"bytes with a float32 scale for up to {MAX_GROUP} inputs"
_STORED = {8: _BYTES, 4: f"4-bit codes with a step and a minimum for 32 inputs and multiplied as {_BYTES}"}


class WeightCodes:
    """Reads parameters as codes and counts what that loses; `notes` once all are read."""

    def __init__(self, checkpoint: Checkpoint, precision: str) -> None:
        self._checkpoint, self._precision = checkpoint, precision
        self._sources = {
            name: tuple(source for source, _ in wanted.sources)
            for name, wanted in weight_slices(checkpoint.config).items()
        }
        self._kept, self._made = Counter[str](), Counter[tuple[str, int]]()

    def bits(self, name: str) -> Bits:
        """How many bits a parameter's codes have, known without reading it."""
        if name == "embedding.weight":
            return 8
        if all(self._checkpoint.formats[source] in PUBLISHED for source in self._sources[name]):
            return 4
        return 4 if self._precision == "int4" and name != "head.weight" else 8

    def read(self, name: str) -> Bytes | Nibbles:
        """A parameter [N, K]. Raises CheckpointError where it holds NaN or infinity."""
        sources = self._sources[name]
        if self.bits(name) == 8:
            return stacked(byte_codes(self._plain(source, 8)) for source in sources)
        return stacked(nibbles_of(self._four_bits(source)) for source in sources)

    def notes(self) -> tuple[str, ...]:
        """What is as published and what is not, one line a kind."""
        kept = (
            f"{count} weights keep the codes they are published in, {kind}; they are multiplied as {_BYTES}"
            for kind, count in self._kept.items()
        )
        made = (
            f"{count} weights published as {kind} are stored as {_STORED[bits]}, which does not hold them exactly"
            for (kind, bits), count in self._made.items()
        )
        return (*sorted(kept), *sorted(made))

    def _four_bits(self, source: str) -> StepCodes:
        published = self._checkpoint.read_codes(source)
        if published is None:
            return step_codes(self._plain(source, 4))
        if not (np.isfinite(published.steps).all() and np.isfinite(published.minima).all()):
            raise CheckpointError(f"{self._checkpoint.path}: {source} holds NaN or infinity: publish sound weights")
        self._kept[self._checkpoint.formats[source]] += 1
        return published

    def _plain(self, source: str, bits: Bits) -> F32:
        """A tensor's numbers, of which codes are to be made."""
        shape = self._checkpoint.shapes[source]
        weight = read_parameter(self._checkpoint, ParameterSlice(shape, ((source, None),)))
        self._made[self._checkpoint.formats[source], bits] += 1
        return weight
