"""Puts weights.bin into device memory, read and copied at the same time (once at start)."""

from __future__ import annotations

from pathlib import Path

from ostinato.engines.errors import BundleError

from .buffers import StepBuffers
from .cuda import Device, Event, PinnedBuffer, Stream
from .progress import Show

_CHUNK = 32 << 20


def upload_weights(path: Path, buffers: StepBuffers, stream: Stream, progress: Show, chunk: int = _CHUNK) -> None:
    """Fill the weights' block; all is there when this returns. Raises BundleError (the file) or DeviceError."""
    total = buffers.layout.num_bytes("weight")
    if not total:
        return
    wanted = max(place.end for place in buffers.layout.blocks["weight"].places.values())  # the block is rounded up
    device, target = stream.device, buffers.address("weight")
    halves = _Halves(device, min(chunk, wanted))
    try:
        with path.open("rb") as file:
            for start in range(0, wanted, chunk):
                pinned, is_up = halves.next()
                count = min(chunk, wanted - start)
                if (found := file.readinto(memoryview(pinned.view)[:count])) != count:  # type: ignore[arg-type]
                    raise BundleError(
                        f"{path} ends at {start + found} of {wanted} bytes: copy the bundle again, or build it again"
                    )
                stream.upload(target + start, pinned.address, count)
                stream.record(is_up)
                progress("load weights", start + count, wanted)
    except OSError as error:
        raise BundleError(
            f"{path} can't be read ({error.strerror}): copy the bundle again, or build it again"
        ) from None
    finally:
        halves.close()


class _Halves:
    """Two pinned chunks: one is read into while the other goes up."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        self._both: list[tuple[PinnedBuffer, Event]] = []
        for _ in range(2):
            event = device.event()
            self._both.append((device.allocate_pinned(num_bytes, "loading weights"), event))

    def next(self) -> tuple[PinnedBuffer, Event]:
        """The one used longer ago, once it has gone up."""
        self._both.reverse()
        self._both[0][1].wait("the upload of weights")
        return self._both[0]

    def close(self) -> None:
        """Wait for the stream itself: after an error the events may not tell."""
        self._device.drain()
        for pinned, event in self._both:
            pinned.close()
            event.close()
