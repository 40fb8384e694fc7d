"""An engine's driver as a child process of `peers.py`, frozen while it is not its turn; runs per benchmark."""

from __future__ import annotations

import contextlib
import fcntl
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frozen_process import FrozenProcess

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / ".peers"


@dataclass(frozen=True)
class Engine:
    """One engine under test: its name in the table, its driver, and where its interpreter and model are."""

    name: str
    label: str
    driver: str
    python: Path
    model: Path

    @property
    def environment(self) -> Path:
        """The folder that `--setup` makes."""
        return PEERS / self.name


def peer(name: str, label: str, model: str) -> Engine:
    """A peer in its own environment under `.peers/`."""
    return Engine(name, label, f"peer_{name}.py", PEERS / name / "bin" / "python", PEERS / model)


def ostinato(bundle: Path) -> Engine:
    """ostinato itself, in the environment of the current interpreter."""
    return Engine(
        f"ostinato:{bundle.name}", f"ostinato ({bundle.name})", "peer_ostinato.py", Path(sys.executable), bundle
    )


ALL_PEERS = {
    engine.name: engine
    for engine in (
        peer("llamacpp", "llama.cpp", "model/gguf/SmolLM2-135M-Instruct.Q4_1.gguf"),
        peer("ort", "ONNX Runtime GenAI", "model/ort"),
        peer("openvino", "OpenVINO GenAI", "model/openvino"),
        peer("vllm", "vLLM CPU", "model/hf"),
    )
}


class PeerError(Exception):
    """A driver could not do what was asked; the message goes into the table."""


@contextlib.contextmanager
def machine_lock(path: Path | None) -> Iterator[None]:
    """Hold an exclusive lock on `path`, so that nothing else that takes it measures at the same time."""
    if path is None:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Process:
    """An engine's driver, frozen except while it answers; it then holds the machine's lock, if there is one."""

    def __init__(self, engine: Engine, log: Path, lock: Path | None) -> None:
        if not engine.python.exists():
            raise PeerError(f"found no {engine.python}; run: python benchmarks/peers.py --setup")
        if not engine.model.exists():
            raise PeerError(f"found no model at {engine.model}")
        self.engine = engine
        self._lock, self._log = lock, log
        self._process = FrozenProcess([str(engine.python), str(HERE / engine.driver)], log)

    def ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        with machine_lock(self._lock):
            reply = self._process.ask(operation, **arguments)
        if reply is None:
            raise PeerError(f"driver ended (code {self._process.exit_code()}); see {self._log}")
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply

    def close(self) -> None:
        self._process.close()
