"""An executor whose results stay as they were given, and whose steps fail only as devices do (in tests)."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import TypeVar

from ostinato.engines.errors import DeviceError
from ostinato.plugins.sampling_rows import I32, Sampled
from ostinato.runtime.batch import Batch
from ostinato.runtime.executor import Executor, StepRules, Ticket
from ostinato.runtime.graphs import Coverage

T = TypeVar("T")


class Kept:
    """Runs every step as `inner` does. `close` raises what no device told of, as a SimError, which a loop contains."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.results: list[tuple[Sampled, Sampled]] = []  # as it was given, and a copy from then
        self._surprise: Exception | None = None

    @property
    def rules(self) -> StepRules:
        return self._inner.rules

    @property
    def trouble(self) -> str | None:
        return self._inner.trouble

    @property
    def coverage(self) -> Coverage | None:
        return self._inner.coverage

    def run(self, batch: Batch) -> KeptTicket:
        return KeptTicket(self, self.watch(lambda: self._inner.run(batch)))

    def watch(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except DeviceError:
            raise
        except Exception as error:
            self._surprise = self._surprise or error
            raise

    def close(self) -> None:
        if self._surprise is not None:
            raise self._surprise
        for given, copy in self.results:
            check_same_bits(given, copy)
        self._inner.close()


@dataclass(frozen=True)
class KeptTicket:
    executor: Kept
    inner: Ticket

    def sample(self, masks: I32) -> None:
        self.executor.watch(lambda: self.inner.sample(masks))

    def wait(self) -> Sampled:
        sampled = self.executor.watch(self.inner.wait)
        self.executor.results.append((sampled, deepcopy(sampled)))
        return sampled


def check_same_bits(found: Sampled, wanted: Sampled) -> None:
    for field in fields(Sampled):
        one, other = getattr(found, field.name), getattr(wanted, field.name)
        assert one.tobytes() == other.tobytes(), f"{field.name} differ: {one}, wanted {other}"
