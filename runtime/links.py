"""How a rank reaches the other ranks of its model: sums, gathers and hand-overs on a stream (launched per step)."""

from __future__ import annotations

from typing import Protocol

from .cuda import Stream


class Links(Protocol):
    """Device to device; addresses are device addresses, `count` numbers of `dtype`. Everything here may be captured.

    `all_reduce` and `all_gather` are over the tensor-parallel group of a stage; `send` goes to the same slice of the
    next stage, `receive` comes from that of the stage before. Each raises DeviceError.
    """

    @property
    def communicator(self) -> int:
        """The tensor-parallel group's NCCL communicator, as an address; what TensorRT is handed."""
        ...

    def all_reduce(self, source: int, target: int, count: int, dtype: str, stream: Stream) -> None:
        """The sum over the group; `source` may be `target`."""
        ...

    def all_gather(self, source: int, target: int, count: int, dtype: str, stream: Stream) -> None:
        """`count` numbers of each rank, one rank after another."""
        ...

    def send(self, source: int, count: int, dtype: str, stream: Stream) -> None: ...

    def receive(self, target: int, count: int, dtype: str, stream: Stream) -> None: ...

    def abort(self) -> None:
        """Give up what is under way, from any thread: a peer is gone."""
        ...

    def close(self) -> None: ...
