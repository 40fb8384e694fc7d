"""NVIDIA's collectives between the ranks of a model (connected at start, launched at capture or per step).

A rank is in up to two communicators: that of its stage's tensor-parallel slices, and that of its slice's stages. The
bindings (nccl4py) are injected, so that this file imports, and is tested, where no GPU is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ostinato.engines.errors import DeviceError
from ostinato.engines.shards import Shard, Shards

from .cuda import Device, Stream
from .shared_ring import GoOn, wait_until

_TYPES = {
    "float32": "Float32", "float16": "Float16", "bfloat16": "Bfloat16", "int32": "Int32", "int64": "Int64",
    "int8": "Int8", "uint8": "Uint8",
}  # fmt: skip
UniqueIds = Mapping[str, bytes]  # communicator → what its ranks meet by


def nccl_bindings() -> Any:
    """NCCL's bindings. Raises DeviceError where they are not installed."""
    try:
        from nccl.bindings import nccl
    except ImportError as error:
        raise DeviceError(f"nccl4py is not here ({error}): install ostinato[ranks]") from None
    return nccl


def unique_ids(nccl: Any, shards: Shards) -> UniqueIds:
    """One for each communicator of a model; the process that makes them must outlive the connecting."""
    names = [name for shard in shards.all() for name in _groups(shard)]
    return {name: bytes(_call("make a unique id", nccl.get_unique_id)) for name in dict.fromkeys(names)}


def _groups(shard: Shard) -> Mapping[str, tuple[int, int]]:
    """A rank's communicators: name → (its place, how many there are)."""
    groups = {
        f"slices of stage {shard.stage}": (shard.tp_rank, shard.tensor_parallel),
        f"stages of slice {shard.tp_rank}": (shard.stage, shard.pipeline_parallel),
    }
    return {name: place for name, place in groups.items() if place[1] > 1}


class NcclLinks:
    """`Links` over NCCL. Made by `connect`; `abort` and `error` may be called from any thread."""

    def __init__(self, nccl: Any, device: Device, shard: Shard) -> None:
        self._nccl, self._device, self._shard = nccl, device, shard
        self._slices: Any = None
        self._stages: Any = None
        self._is_aborted = threading.Event()
        self._ending = threading.Lock()

    @classmethod
    def connect(cls, nccl: Any, device: Device, shard: Shard, ids: UniqueIds, go_on: GoOn) -> NcclLinks:
        """Meet the other ranks. `device` is closed with the links. `go_on` raises when there is nobody to wait for.

        NCCL waits for its peers without an end, so it does so on a thread of its own, which is left behind then.
        """
        links = cls(nccl, device, shard)
        failures: list[Exception] = []

        def meet() -> None:
            try:
                device.make_current()
                links._meet(ids)
            except Exception as error:  # raised again where it is waited for
                failures.append(error)

        thread = threading.Thread(target=meet, name="nccl", daemon=True)
        thread.start()
        wait_until(lambda: not thread.is_alive(), go_on)
        if failures:
            links.abort()
            device.close()
            raise failures[0]
        return links

    def _meet(self, ids: UniqueIds) -> None:
        communicators = []
        for name, (place, count) in _groups(self._shard).items():
            config = self._nccl.Config()
            config.blocking = 1
            meeting = bytearray(ids[name])
            what = f"connect the {name}"
            communicators.append(_call(what, self._nccl.comm_init_rank_config, count, meeting, place, config.ptr))
        if self._shard.tensor_parallel > 1:
            self._slices = communicators.pop(0)
        if self._shard.pipeline_parallel > 1:
            self._stages = communicators.pop(0)

    @property
    def communicator(self) -> int:
        return int(self._slices.handle) if self._slices is not None else 0

    def all_reduce(self, source: int, target: int, count: int, dtype: str, stream: Stream) -> None:
        arguments = (source, target, count, self._type(dtype), int(self._nccl.RedOp.Sum), self._slices)
        self._launch("sum over the slices", self._nccl.all_reduce, *arguments, stream.address)

    def all_gather(self, source: int, target: int, count: int, dtype: str, stream: Stream) -> None:
        arguments = (source, target, count, self._type(dtype), self._slices)
        self._launch("gather from the slices", self._nccl.all_gather, *arguments, stream.address)

    def send(self, source: int, count: int, dtype: str, stream: Stream) -> None:
        arguments = (source, count, self._type(dtype), self._shard.stage + 1, self._stages)
        self._launch("send to the next stage", self._nccl.send, *arguments, stream.address)

    def receive(self, target: int, count: int, dtype: str, stream: Stream) -> None:
        arguments = (target, count, self._type(dtype), self._shard.stage - 1, self._stages)
        self._launch("receive from the stage before", self._nccl.recv, *arguments, stream.address)

    def error(self) -> str | None:
        """What went wrong after it was launched, as when a peer is gone; None if nothing did."""
        with self._ending:
            for communicator in self._communicators():
                status = int(_call("ask for NCCL's state", self._nccl.comm_get_async_error, communicator))
                if status not in (int(self._nccl.Result.Success), int(self._nccl.Result.InProgress)):
                    return _refusal("reach the other ranks", self._nccl.get_error_string(status))
            return None

    def abort(self) -> None:
        with self._ending:
            if self._is_aborted.is_set():
                return
            self._is_aborted.set()
            self._end("give up NCCL's work", self._nccl.comm_abort)

    def close(self) -> None:
        """The stream must be done with it; every rank closes, or aborts."""
        with self._ending:
            if not self._is_aborted.is_set():
                self._is_aborted.set()
                self._end("disconnect the ranks", self._nccl.comm_destroy)
        self._device.close()

    def _end(self, what: str, function: Callable[[Any], Any]) -> None:
        """Of every communicator, even if one refuses; raises the first refusal."""
        failures = []
        for communicator in self._communicators():
            try:
                _call(what, function, communicator)
            except DeviceError as error:
                failures.append(error)
        self._slices = self._stages = None
        if failures:
            raise failures[0]

    def _communicators(self) -> Sequence[Any]:
        return [one for one in (self._slices, self._stages) if one is not None]

    def _type(self, dtype: str) -> int:
        return int(getattr(self._nccl.DataType, _TYPES[dtype]))

    def _launch(self, what: str, function: Any, *arguments: Any) -> None:
        if self._is_aborted.is_set():
            raise DeviceError(f"can't {what}: the ranks were disconnected; restart the server")
        _call(what, function, *arguments)


def _call(what: str, function: Any, *arguments: Any) -> Any:
    """One call to NCCL, or a DeviceError in one line. Its bindings raise RuntimeError where its library is not."""
    try:
        return function(*arguments)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise DeviceError(f"can't {what}: {reason}: install ostinato[ranks]") from None
    except Exception as error:
        raise DeviceError(_refusal(what, str(error))) from None


def _refusal(what: str, reason: str) -> str:
    reason = " ".join(reason.split()).rstrip(".")
    return f"can't {what}: {reason}: see nvidia-smi, and NCCL_DEBUG=INFO for what NCCL says"
