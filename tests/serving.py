"""The real server over executors without a model: byte-level tokens, an ephemeral port, a thread of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np

from ostinato.engines.sizes import Limits
from ostinato.plugins.sampling_rows import I32, Sampled
from ostinato.runtime.batch import Batch, Packer
from ostinato.runtime.bridge import Bridge
from ostinato.runtime.door import Door, Served
from ostinato.runtime.executor import Executor, StepRules, Ticket
from ostinato.runtime.intake import Intake
from ostinato.runtime.keys import Keys
from ostinato.runtime.loop import Loop
from ostinato.runtime.metrics import Metrics
from ostinato.runtime.pages import Pages
from ostinato.runtime.scheduler import Scheduler
from ostinato.runtime.serve_config import ServeConfig
from ostinato.runtime.server import Server
from ostinato.runtime.server_app import create_app
from ostinato.runtime.tokenizer import Tokenizer
from tests.fakes import MANY_ROWS, Done, sampled_on_host
from tests.tokenizers import EOS, SYS, byte_level

MODEL = "toy"
VOCAB_SIZE = SYS + 1
PATIENCE_SECONDS = 60.0
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class TapeLM:
    """Says the tape after any prompt: the token for a row's n-th sampled place is tape[n]; EOS when it is over.

    The place is counted from `start`, the position of the prompt's last token.
    """

    def __init__(self, tape: bytes, start: int) -> None:
        self.rules = StepRules([0] * MANY_ROWS)
        self.trouble: str | None = None
        self.coverage = None
        self._tape = tape
        self._start = start

    def run(self, batch: Batch) -> Done:
        places = batch.positions[batch.logits_indices] - self._start
        logits = np.zeros((batch.num_sampled, VOCAB_SIZE), np.float32)
        for line, place in enumerate(places.tolist()):
            logits[line, self._tape[place] if 0 <= place < len(self._tape) else EOS] = 40.0
        return Done(sampled_on_host(logits, batch))

    def close(self) -> None:
        self._tape = b""


class GatedLM:
    """Steps of another executor that end only when the test lets them."""

    def __init__(self, inner: Executor) -> None:
        self.batches: list[Batch] = []
        self._inner = inner
        self._permits = threading.Semaphore(0)
        self._begun = threading.Semaphore(0)
        self.rules = inner.rules
        self.trouble: str | None = None
        self.coverage = None

    def run(self, batch: Batch) -> Ticket:
        self.batches.append(batch)
        return _GatedTicket(self._inner.run(batch), self._permits, self._begun)

    def await_step(self) -> None:
        """Until a step has begun and waits for its permit."""
        assert self._begun.acquire(timeout=PATIENCE_SECONDS), "no step began"

    def permit(self, num_steps: int = 1) -> None:
        self._permits.release(num_steps)

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True)
class _GatedTicket:
    inner: Ticket
    permits: threading.Semaphore
    begun: threading.Semaphore

    def sample(self, masks: I32) -> None:
        self.inner.sample(masks)

    def wait(self) -> Sampled:
        self.begun.release()
        assert self.permits.acquire(timeout=PATIENCE_SECONDS), "the test forgot a step"
        return self.inner.wait()


class FaultyLM:
    """Fails steps of another executor while `is_bad`."""

    def __init__(self, inner: Executor, error: BaseException) -> None:
        self.is_bad = False
        self.rules = inner.rules
        self.trouble: str | None = None
        self.coverage = None
        self._inner = inner
        self._error = error

    def run(self, batch: Batch) -> Ticket:
        if self.is_bad:
            raise self._error
        return self._inner.run(batch)

    def close(self) -> None:
        self._inner.close()


def toy_tokenizer(folder: Path, chat_template: str = CHAT_TEMPLATE) -> Tokenizer:
    return Tokenizer(byte_level(folder, config={"chat_template": chat_template}))


def make_loop(limits: Limits, executor: Executor, clock: Callable[[], float] = time.monotonic) -> Loop:
    scheduler = Scheduler(limits, Pages(limits), executor.rules)
    return Loop(scheduler, Packer(limits, VOCAB_SIZE, executor.rules), executor, clock)


def make_intake(limits: Limits) -> Intake:
    return Intake(VOCAB_SIZE, frozenset({EOS}), limits, jump_ahead=True)


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    url: str
    loop: Loop
    bridge: Bridge
    door: Door
    server: Server

    @property
    def metrics_url(self) -> str:
        assert self.server.metrics_url is not None
        return self.server.metrics_url

    def client(self) -> httpx.Client:
        return _client(self.url)

    def metrics_client(self) -> httpx.Client:
        return _client(self.metrics_url)

    def metrics(self) -> str:
        """The page that Prometheus reads."""
        with self.metrics_client() as client:
            return client.get("/metrics").text

    def await_idle(self) -> None:
        """Until no row is left; then every block must be free."""
        await_true(lambda: self.loop.scheduler.is_idle, "rows are left")
        assert self.loop.scheduler.num_running == self.loop.scheduler.num_waiting == 0
        assert self.loop.scheduler.pages.num_free == self.loop.scheduler.pages.num_total
        self.loop.scheduler.pages.check_integrity()


def _client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=PATIENCE_SECONDS, verify=False)  # no TLS here; loading CAs is slow


ANY_PORTS = ServeConfig(port=0, metrics_port=0)


@contextmanager
def serving(
    folder: Path,
    limits: Limits,
    executor: Executor,
    max_waiting: int | None = None,
    config: ServeConfig = ANY_PORTS,
    chat_template: str = CHAT_TEMPLATE,
    keys: Keys | None = None,
) -> Iterator[Running]:
    """Serve `executor` as model "toy" until the block ends."""
    bounds = config.limits if max_waiting is None else replace(config.limits, max_waiting=max_waiting)
    config = replace(config, limits=bounds)
    loop = make_loop(limits, executor)
    bridge = Bridge(loop, make_intake(limits), toy_tokenizer(folder, chat_template), Metrics(), bounds)
    server = Server(create_app(lambda: Served(MODEL, bridge), config, keys))
    door = server.door
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        await_true(lambda: server.started and door.trouble() is None, "the server did not start")
        yield Running(server.url, loop, bridge, door, server)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), "the server did not stop"


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that the system gives to nobody else while the block lasts, and where a server may still listen."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does; this one never listens
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def await_true(condition: Callable[[], bool], complaint: str) -> None:
    """Wait for what another thread brings about."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.002)
