"""NCCL between simulated ranks, in one process or several: what is put on a stream sums for real when it runs.

Ranks meet at sockets that have no place in the file system. An operation waits for its peers as a GPU would, without
an end, until it is aborted; a peer that is gone shows as an asynchronous error.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from nccl.bindings import nccl as real
from numpy.typing import NDArray

from ostinato.plugins.collectives import all_gather, all_reduce

from .driver import SimDriver
from .memory import SimError, poison
from .sim_link import PeerGoneError, SimLink

_DTYPES = {
    real.DataType.Float32: np.float32, real.DataType.Float16: np.float16, real.DataType.Int32: np.int32,
    real.DataType.Int64: np.int64, real.DataType.Int8: np.int8, real.DataType.Uint8: np.uint8,
}  # fmt: skip


class SimNcclError(Exception):
    """Worded as NCCLError is, which can't be made without NCCL's library."""

    def __init__(self, result: real.Result) -> None:
        super().__init__(f"{result.name} ({int(result)}): simulated")


class SimComm:
    """What a communicator's handle stands for."""

    def __init__(self, link: SimLink) -> None:
        self.link = link
        self.error = real.Result.Success

    def gather(self, tag: str, part: NDArray[Any]) -> list[NDArray[Any]] | None:
        """Every rank's part, or None once it is aborted."""
        content = part.tobytes()
        peers = [peer for peer in range(self.link.count) if peer != self.link.place]
        found = self.trade(tag, dict.fromkeys(peers, content), dict.fromkeys(peers, len(content)))
        if found is None:
            return None
        found[self.link.place] = content
        return [np.frombuffer(found[rank], part.dtype).reshape(part.shape) for rank in range(self.link.count)]

    def trade(self, tag: str, out: dict[int, bytes], into: dict[int, int]) -> dict[int, bytes] | None:
        try:
            return self.link.trade(tag, out, into)
        except PeerGoneError:
            self.error = real.Result.RemoteError
            self.link.await_abort()
            return None


class SimNccl:
    """Takes the place of `nccl.bindings.nccl` in one process."""

    Config = real.Config
    DataType = real.DataType
    RedOp = real.RedOp
    Result = real.Result

    def __init__(self, driver: SimDriver, *, limit_s: float = 60.0) -> None:
        self._driver, self._limit_s = driver, limit_s
        self._comms: dict[int, SimComm] = {}
        self._lock = threading.Lock()
        self._next = 0x9000

    def get_unique_id(self) -> real.UniqueId:
        made = real.UniqueId()
        ctypes.memmove(made.ptr, secrets.token_hex(16).encode(), 32)
        return made

    def get_error_string(self, result: int) -> str:
        return f"{real.Result(result).name} (simulated)"

    def comm_init_rank_config(self, nranks: int, comm_id: bytearray, rank: int, config: int) -> real.Comm:
        if not getattr(self._driver._current, "is_set", False):  # whose GPU would it be?
            raise SimNcclError(real.Result.UnhandledCudaError)
        link = SimLink.meet(bytes(comm_id).rstrip(b"\0").decode(), rank, nranks, self._limit_s)
        with self._lock:
            self._next += 0x10
            self._comms[self._next] = SimComm(link)
            return real.Comm(self._next)

    def comm_get_async_error(self, comm: real.Comm) -> int:
        return int(self._comm(comm).error)

    def comm_abort(self, comm: real.Comm) -> None:
        """What runs ends, and leaves nothing; from any thread."""
        self._comms.pop(comm.handle).link.abort()

    def comm_destroy(self, comm: real.Comm) -> None:
        self._comms.pop(comm.handle).link.close()

    def all_reduce(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, comm: real.Comm, stream: int
    ) -> None:
        assert op == real.RedOp.Sum
        self._collect("AllReduce", all_reduce, (sendbuff, recvbuff, count, datatype), comm, stream)

    def all_gather(
        self, sendbuff: int, recvbuff: int, sendcount: int, datatype: int, comm: real.Comm, stream: int
    ) -> None:
        self._collect("AllGather", all_gather, (sendbuff, recvbuff, sendcount, datatype), comm, stream)

    def send(self, sendbuff: int, count: int, datatype: int, peer: int, comm: real.Comm, stream: int) -> None:
        of = self._comm(comm)

        def run() -> None:
            part = self._part(sendbuff, count, datatype, "send")
            of.trade(f"P2P {count} {datatype}", {peer: part.tobytes()}, {})

        self._submit(stream, "send", run)

    def recv(self, recvbuff: int, count: int, datatype: int, peer: int, comm: real.Comm, stream: int) -> None:
        of = self._comm(comm)

        def run() -> None:
            into = self._part(recvbuff, count, datatype, "recv")
            found = of.trade(f"P2P {count} {datatype}", {}, {peer: into.nbytes})
            self._write(into, None if found is None else np.frombuffer(found[peer], into.dtype))

        self._submit(stream, "recv", run)

    def collective(self, communicator: int, operator: str, part: NDArray[Any]) -> NDArray[Any]:
        """What an engine's own layers do, when it runs."""
        comm = self._comms.get(communicator)
        parts = None if comm is None else comm.gather(f"{operator} {part.shape} {part.dtype}", part)
        if parts is None:
            parts = [np.full(part.shape, -1, part.dtype)] * 2
        return all_reduce(parts) if operator == "AllReduce" else all_gather(parts)

    def _collect(
        self, name: str, join: Callable[[Any], Any], places: tuple[int, int, int, int], comm: real.Comm, stream: int
    ) -> None:
        source, target, count, datatype = places
        of = self._comm(comm)

        def run() -> None:
            parts = of.gather(f"{name} {count} {datatype}", self._part(source, count, datatype, name))
            width = count * (of.link.count if name == "AllGather" else 1)
            self._write(self._part(target, width, datatype, name), None if parts is None else join(parts))

        self._submit(stream, name, run)

    def _part(self, address: int, count: int, datatype: int, what: str) -> NDArray[Any]:
        dtype = np.dtype(_DTYPES[real.DataType(datatype)])
        return self._driver.memory.bytes_at(address, count * dtype.itemsize, what).view(dtype)

    @staticmethod
    def _write(target: NDArray[Any], content: NDArray[Any] | None) -> None:
        if content is None:
            poison(target.view(np.uint8))
        else:
            target[:] = content

    def _submit(self, stream: int, what: str, run: Callable[[], None]) -> None:
        if not self._driver.submit(stream, what, run):
            raise SimNcclError(real.Result.UnhandledCudaError)

    def _comm(self, comm: real.Comm) -> SimComm:
        if not isinstance(comm, real.Comm):
            raise TypeError("Cannot convert to nccl.bindings.nccl.Comm")
        if (found := self._comms.get(comm.handle)) is None:
            raise SimError("a communicator is used after its end")
        return found
