"""Each weight of a decoder as the codes that `x86` multiplies: those it was published in, else the nearest (offline).

    recipe  published in 4 bits   published in 8 bits, or as plain numbers
    int8    kept                  8 bits
    int4    kept                  4 bits; 8 of embedding and head

The embedding always has 8 bits, since one of its rows is read at a time. What is kept is exact.
"""

from __future__ import annotations

from collections import Counter

from ostinato.engines.decoder_record import Bits
from ostinato.engines.errors import BuildError
from ostinato.plugins.x86_pack import Groups

from .checkpoint import Checkpoint
from .gguf_codes import PUBLISHED_BITS
from .group_codes import codes_of, is_finite, stacked
from .shard import ParameterSlice, weight_slices
from .weights import read_parameter


class WeightCodes:
    """Reads parameters as codes and counts what that loses; `notes` once all are read."""

    def __init__(self, checkpoint: Checkpoint, precision: str) -> None:
        self._checkpoint, self._precision = checkpoint, precision
        self._sources = {
            name: tuple(source for source, _ in wanted.sources)
            for name, wanted in weight_slices(checkpoint.config).items()
        }
        self._kept, self._lost = Counter[str](), Counter[tuple[str, int]]()

    def bits(self, name: str) -> Bits:
        """How many bits a parameter's codes have, known without reading it."""
        if name == "embedding.weight":
            return 8
        formats = {self._checkpoint.formats[source] for source in self._sources[name]}
        if all(PUBLISHED_BITS.get(one) == 4 for one in formats):
            return 4
        return 4 if self._precision == "int4" and name != "head.weight" else 8

    def read(self, name: str) -> Groups:
        """A parameter [N, K]. Raises BuildError where float16 can't hold its scales."""
        bits = self.bits(name)
        return stacked(self._source(source, bits) for source in self._sources[name])

    def notes(self) -> tuple[str, ...]:
        """What is as published and what is not, one line a kind."""
        kept = (f"{count} weights keep the codes they are published in, {kind}" for kind, count in self._kept.items())
        lost = (
            f"{count} weights published as {kind} are stored as {bits}-bit codes with a float16 scale for 32 inputs, "
            "which does not hold them exactly"
            for (kind, bits), count in self._lost.items()
        )
        return (*sorted(kept), *sorted(lost))

    def _source(self, source: str, bits: Bits) -> Groups:
        kind = self._checkpoint.formats[source]
        if PUBLISHED_BITS.get(kind) == bits and (published := self._checkpoint.read_codes(source)) is not None:
            self._kept[kind] += 1
            found = published
        else:
            self._lost[kind, bits] += 1
            shape = self._checkpoint.shapes[source]
            found = codes_of(read_parameter(self._checkpoint, ParameterSlice(shape, ((source, None),))), bits)
        if not is_finite(found):
            raise BuildError(
                f"{source} is too large for scales in float16, or holds no numbers: choose target cpu, or publish "
                "sound weights"
            )
        return found
