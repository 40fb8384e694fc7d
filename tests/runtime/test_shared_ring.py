"""One writer, many readers in other processes: every message once, in order and whole, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ostinato.engines.errors import DeviceError
from ostinato.plugins.sampling_rows import I32
from ostinato.runtime.shared_ring import Ring, RingReader, RingShape, RingWriter, map_memory, share_memory

from ..scale import scaled

ROOT = Path(__file__).parent.parent.parent
SHAPE = RingShape(num_readers=2, num_slots=3, slot_words=1000)


class GivenUpError(Exception): ...


def never() -> None:
    raise GivenUpError


def message(number: int) -> I32:
    rng = np.random.default_rng(number)
    return rng.integers(0, 2**31, rng.integers(0, SHAPE.slot_words + 1)).astype(np.int32)


@pytest.fixture(params=[True, False], ids=["checked", "in order"])
def shape(request: pytest.FixtureRequest) -> RingShape:
    return RingShape(2, 3, 1000, is_checked=request.param)


@pytest.fixture
def rings(shape: RingShape) -> list[Ring]:
    """One memory, seen three times, as three processes would."""
    descriptor = share_memory(shape.num_bytes)
    try:
        return [Ring(map_memory(descriptor), shape) for _ in range(3)]
    finally:
        os.close(descriptor)


def test_slot_is_not_written_before_every_reader_has_let_go(rings: list[Ring]) -> None:
    writer, readers = RingWriter(rings[0]), [RingReader(ring, place) for place, ring in enumerate(rings[1:])]
    for number in range(3):
        writer.put(1, number, message(number).tobytes(), never)
    for reader in readers:
        with pytest.raises(GivenUpError):
            writer.put(1, 3, b"", never)
        kind, number, words = reader.take(never)
        assert (kind, number, words.tobytes()) == (1, 0, message(0).tobytes())
        reader.let_go()
    writer.put(2, -7, b"", never)
    assert [rings[0].num_read(place) for place in range(2)] == [1, 1]
    for number in (1, 2):
        assert readers[0].take(never).words.tobytes() == message(number).tobytes()
        readers[0].let_go()
    assert readers[0].take(never)[:2] == (2, -7)
    readers[0].let_go()
    with pytest.raises(GivenUpError):
        readers[0].take(never)


def test_half_a_message_is_none(rings: list[Ring], shape: RingShape) -> None:
    """Whatever part of it another processor shows first."""
    content = message(5).tobytes()
    rings[0].write(0, 1, 5, content)
    payload, head = rings[0]._payloads[0], rings[0]._heads[0]
    assert rings[1].read(0) is not None
    for place, wrong in ((0, 0), (0, 3), (3, -1), (3, 1001)) + (((1, 2), (2, 6), (3, 7)) if shape.is_checked else ()):
        kept, head[place] = head[place], wrong
        assert rings[1].read(0) is None
        head[place] = kept
    if shape.is_checked:
        payload[3] ^= 1
        assert rings[1].read(0) is None


def test_message_that_is_too_long_is_refused(rings: list[Ring]) -> None:
    with pytest.raises(AssertionError, match="a message of 1001 words, slots have 1000"):
        RingWriter(rings[0]).put(1, 1, bytes(4004), never)


def test_beats_and_cursors_are_each_readers_own(rings: list[Ring]) -> None:
    for _ in range(3):
        rings[1].beat(1)
    rings[2].set_read(0, 9)
    assert [[ring.beats(0), ring.beats(1), ring.num_read(0), ring.num_read(1)] for ring in rings] == [[0, 3, 9, 0]] * 3


READ = """
import os, signal, sys, zlib
from tests.runtime.test_shared_ring import SHAPE, message
from ostinato.runtime.shared_ring import Ring, RingReader, map_memory
reader = RingReader(Ring(map_memory(int(sys.argv[1])), SHAPE), int(sys.argv[2]))
for number in range(int(sys.argv[3])):
    kind, found, words = reader.take(lambda: None)
    assert (found, words.tobytes()) == (number, message(number).tobytes()), number
    reader.let_go()
print("read")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_read_every_message_and_leave_nothing_when_killed() -> None:
    before, count = set(os.listdir("/dev/shm")), scaled(300, 20_000)
    descriptor = share_memory(SHAPE.num_bytes)
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READ, str(descriptor), str(place), str(count)],
            pass_fds=(descriptor,),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for place in range(SHAPE.num_readers)
    ]
    try:
        writer = RingWriter(Ring(map_memory(descriptor), SHAPE))

        def go_on() -> None:
            if any(reader.poll() is not None for reader in readers):
                raise DeviceError("a reader ended")

        for number in range(count):
            writer.put(1, number, message(number).tobytes(), go_on)
        assert [reader.communicate(timeout=20) for reader in readers] == [(b"read\n", b"")] * 2
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
        os.close(descriptor)
    assert set(os.listdir("/dev/shm")) <= before
