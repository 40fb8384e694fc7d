"""A server without a model in a process of its own, for tests that signal, starve or overload one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.serving import PATIENCE_SECONDS, await_true, reserved_port

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Toy:
    """What kind of server. A step takes `step_seconds`, so that its capacity is known; `dies_at` is a step's number.
    `warms`: as the real one, it has its workers for grammars before anybody asks.
    """

    step_seconds: float = 0.0
    max_rows: int = 8
    max_waiting: int = 512
    drain_seconds: float = 30.0
    body_seconds: float = 30.0
    dies_at: int = 0
    fails_to_load: bool = False
    warms: bool = False


@dataclass(frozen=True)
class ToyProcess:
    url: str
    process: subprocess.Popen[Any]
    log: Path

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_SECONDS, verify=False)  # loading CAs is slow

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            with self.client() as client:
                return client.get("/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    def resident_bytes(self) -> int:
        return resident_bytes(self.process.pid)

    def end(self) -> int:
        """Of SIGTERM: the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_SECONDS)


def resident_bytes(pid: int) -> int:
    """Of memory, now. OSError where the process is gone."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def toy_process(folder: Path, toy: Toy, *, wait: bool = True, **options: Any) -> Iterator[ToyProcess]:
    """`options` are those of Popen. Its stderr goes to a file unless they say otherwise."""
    log = folder / "server.log"
    with reserved_port() as port:
        command = [sys.executable, "-m", "tests.load.toy_app", str(folder), str(port), json.dumps(asdict(toy))]
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, cwd=ROOT, **{"stderr": stderr} | options)
        served = ToyProcess(f"http://127.0.0.1:{port}", process, log)
        try:
            if wait:
                await_true(served.is_ready, "the process did not start")
            yield served
        finally:
            process.kill()
            process.wait()
