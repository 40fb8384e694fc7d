"""Memory that the ranks of a model share: one writes messages to many, round and round (made at start, used per step).

    │ read by 0 │ … │ beats of 0 │ … │ head │ message │ head │ message │ …

The memory has no name: it is a file descriptor that child processes inherit, so that nothing stays behind however they
end. A slot is written again only when every reader has let go of it, and its sequence number is written last, so that
no reader sees half a message. A processor that may show the other's writes in another order also compares a checksum.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ostinato.plugins.sampling_rows import I32

_LINE = 64  # bytes: what one process writes shares no cache line with what another does
_HEAD = 5  # a slot's: sequence, kind, number, words, checksum
_SPIN_S, _NAP_S = 200e-6, 50e-6  # as `runtime.cuda` waits
_IDLE_S, _LONG_NAP_S = 1.0, 1e-3
_SHOWS_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64")
GoOn = Callable[[], None]  # called while one waits; raises to give up


@dataclass(frozen=True)
class RingShape:
    """`slot_words`: 32-bit words of the longest message."""

    num_readers: int
    num_slots: int
    slot_words: int
    is_checked: bool = not _SHOWS_IN_ORDER

    @property
    def slot_bytes(self) -> int:
        return _LINE + -(-self.slot_words * 4 // _LINE) * _LINE

    @property
    def num_bytes(self) -> int:
        return 2 * self.num_readers * _LINE + self.num_slots * self.slot_bytes


class Message(NamedTuple):
    """`words` lie in the ring: use them before the reader lets go."""

    kind: int
    number: int
    words: I32


def share_memory(num_bytes: int) -> int:
    """A file descriptor of zeros; pages take memory only once they are written."""
    descriptor = os.memfd_create("ostinato-ranks", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_memory(descriptor: int) -> memoryview:
    """All of it, for as long as something looks at it."""
    return memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))


class Ring:
    """Both ends' view of one ring."""

    def __init__(self, memory: memoryview, shape: RingShape) -> None:
        self.shape = shape
        lines = memory[: 2 * shape.num_readers * _LINE].cast("q")
        stride = _LINE // 8
        self._cursors, self._beats = lines[: shape.num_readers * stride], lines[shape.num_readers * stride :]
        self._heads: list[memoryview] = []
        self._payloads: list[I32] = []
        for slot in range(shape.num_slots):
            start = 2 * shape.num_readers * _LINE + slot * shape.slot_bytes
            self._heads.append(memory[start : start + _HEAD * 8].cast("q"))
            self._payloads.append(np.frombuffer(memory, np.int32, shape.slot_words, start + _LINE))

    def num_read(self, reader: int) -> int:
        """How many messages a reader has let go of."""
        return int(self._cursors[reader * (_LINE // 8)])

    def set_read(self, reader: int, count: int) -> None:
        self._cursors[reader * (_LINE // 8)] = count

    def beats(self, reader: int) -> int:
        """Grows as long as the reader's process runs."""
        return int(self._beats[reader * (_LINE // 8)])

    def beat(self, reader: int) -> None:
        self._beats[reader * (_LINE // 8)] += 1

    def write(self, sequence: int, kind: int, number: int, content: bytes) -> None:
        slot = sequence % self.shape.num_slots
        head, payload = self._heads[slot], self._payloads[slot]
        count = len(content) // 4
        assert count <= self.shape.slot_words, f"a message of {count} words, slots have {self.shape.slot_words}"
        if count:
            payload[:count] = np.frombuffer(content, np.int32)
        head[1], head[2], head[3], head[4] = kind, number, count, self._checksum(kind, number, content)
        head[0] = sequence + 1  # 0: never written

    def read(self, sequence: int) -> Message | None:
        """The message, or None as long as it is not there as a whole."""
        slot = sequence % self.shape.num_slots
        head = self._heads[slot]
        if head[0] != sequence + 1:
            return None
        kind, number, count, checksum = head[1], head[2], head[3], head[4]
        if not 0 <= count <= self.shape.slot_words:
            return None
        words = self._payloads[slot][:count]
        return Message(kind, number, words) if self._checksum(kind, number, words.data) == checksum else None

    def _checksum(self, kind: int, number: int, content: bytes | memoryview) -> int:
        return zlib.adler32(content, kind + (number << 8) & 0xFFFF_FFFF) if self.shape.is_checked else 0


class RingWriter:
    """The only writer. One thread at a time."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.num_written = 0

    def put(self, kind: int, number: int, content: bytes, go_on: GoOn) -> None:
        """Wait for a free slot and write it."""
        shape = self.ring.shape

        def has_room() -> bool:
            oldest = self.num_written - shape.num_slots
            return all(self.ring.num_read(reader) > oldest for reader in range(shape.num_readers))

        wait_until(has_room, go_on)
        self.ring.write(self.num_written, kind, number, content)
        self.num_written += 1


class RingReader:
    """Takes every message in order: `take`, use it, `let_go`, again."""

    def __init__(self, ring: Ring, reader: int) -> None:
        self._ring, self._reader = ring, reader
        self._next = 0

    def take(self, go_on: GoOn) -> Message:
        found: list[Message] = []

        def is_there() -> bool:
            if (message := self._ring.read(self._next)) is None:
                return False
            found.append(message)
            return True

        wait_until(is_there, go_on)
        return found[0]

    def let_go(self) -> None:
        self._next += 1
        self._ring.set_read(self._reader, self._next)


def wait_until(is_done: Callable[[], bool], go_on: GoOn) -> None:
    """Poll at once for a moment, then with naps, longer ones when nobody has asked for anything for a while."""
    began = time.monotonic()
    while not is_done():
        go_on()
        waited = time.monotonic() - began
        time.sleep(0.0 if waited < _SPIN_S else _NAP_S if waited < _IDLE_S else _LONG_NAP_S)
