"""Sockets between simulated ranks: every one is connected to every other, and trades bytes with them."""

from __future__ import annotations

import json
import selectors
import socket
import struct
import threading
import time

from .memory import SimError

_POLL_S = 0.02
_HEAD = struct.Struct("<II")  # bytes of the tag, and of what follows it


class PeerGoneError(Exception):
    """The other end's process has ended."""


class SimLink:
    """Rank `place` of `count`. One thread trades; another may abort."""

    def __init__(self, place: int, count: int, limit_s: float) -> None:
        self.place, self.count, self._limit_s = place, count, limit_s
        self._sockets: dict[int, socket.socket] = {}
        self._rest: dict[int, bytearray] = {}
        self._is_aborted = threading.Event()

    @classmethod
    def meet(cls, name: str, place: int, count: int, limit_s: float) -> SimLink:
        """Connect to those before, and take the connections of those behind."""
        link = cls(place, count, limit_s)
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(f"\0ostinato-{name}-{place}")
            door.listen(count)
            door.settimeout(limit_s)
            for peer in range(place):
                link._add(peer, _connect(f"\0ostinato-{name}-{peer}", place, limit_s))
            for _ in range(count - 1 - place):
                other, _ = door.accept()
                link._add(other.recv(1)[0], other)
        return link

    def _add(self, peer: int, other: socket.socket) -> None:
        other.setblocking(False)
        self._sockets[peer], self._rest[peer] = other, bytearray()

    def trade(self, tag: str, out: dict[int, bytes], into: dict[int, int]) -> dict[int, bytes] | None:
        """Send to some and receive from some; None once aborted. `tag`: both ends must have the same.

        Raises PeerGoneError.
        """
        frames = {peer: memoryview(_frame(tag, content)) for peer, content in out.items()}
        found: dict[int, bytes] = {}
        ends_at = time.monotonic() + self._limit_s
        while frames or len(found) < len(into):
            if self._is_aborted.is_set():
                return None
            if time.monotonic() > ends_at:
                raise SimError(f"rank {self.place}: {tag} has no peer: the ranks' work differs")
            for peer in into.keys() - found.keys():
                if (content := self._taken(peer, tag, into[peer])) is not None:
                    found[peer] = content
            self._move(frames, into.keys() - found.keys())
        return found

    def _move(self, frames: dict[int, memoryview], wanted: set[int]) -> None:
        """Some bytes, in whichever direction they go now."""
        if not frames and not wanted:
            return
        with selectors.DefaultSelector() as selector:
            for peer in frames.keys() | wanted:
                events = (selectors.EVENT_WRITE if peer in frames else 0) | (
                    selectors.EVENT_READ if peer in wanted else 0
                )
                selector.register(self._sockets[peer], events, peer)
            for key, event in selector.select(_POLL_S):
                try:
                    if event & selectors.EVENT_READ:
                        self._read(key.data)
                    if event & selectors.EVENT_WRITE:
                        frames[key.data] = frames[key.data][self._sockets[key.data].send(frames[key.data]) :]
                except OSError:
                    if not self._is_aborted.is_set():
                        raise PeerGoneError from None
        for peer in [peer for peer, frame in frames.items() if not frame]:
            del frames[peer]

    def _read(self, peer: int) -> None:
        content = self._sockets[peer].recv(1 << 20)
        if not content:
            raise ConnectionResetError
        self._rest[peer] += content

    def _taken(self, peer: int, tag: str, num_bytes: int) -> bytes | None:
        """The next frame of a peer, if all of it is here."""
        rest = self._rest[peer]
        if len(rest) < _HEAD.size:
            return None
        tag_size, size = _HEAD.unpack_from(rest)
        end = _HEAD.size + tag_size + size
        if len(rest) < end:
            return None
        found = json.loads(bytes(rest[_HEAD.size : _HEAD.size + tag_size]))
        if found != tag or size != num_bytes:
            raise SimError(f"rank {self.place} does {tag}, rank {peer} {found}: on a GPU both would hang")
        content = bytes(rest[end - size : end])
        del rest[:end]
        return content

    def await_abort(self) -> None:
        if not self._is_aborted.wait(self._limit_s):
            raise SimError(f"rank {self.place} lost a peer and was not aborted for {self._limit_s:g} s")

    def abort(self) -> None:
        self._is_aborted.set()

    def close(self) -> None:
        for other in self._sockets.values():
            other.close()


def _connect(address: str, place: int, limit_s: float) -> socket.socket:
    ends_at = time.monotonic() + limit_s
    while True:
        other = socket.socket(socket.AF_UNIX)
        try:
            other.connect(address)
            other.send(bytes([place]))
            return other
        except OSError:
            other.close()
            if time.monotonic() > ends_at:
                raise SimError(f"rank {place} waited {limit_s:g} s for another") from None
            time.sleep(0.005)


def _frame(tag: str, content: bytes) -> bytes:
    name = json.dumps(tag).encode()
    return _HEAD.pack(len(name), len(content)) + name + content
