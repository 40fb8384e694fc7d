"""`ostinato serve` with a bundle of two ranks, as processes: what it tells, and how it ends when a rank does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from ostinato.engines.shards import Shards
from tests.scale import only_in_a_soak
from tests.serving import reserved_port
from tests.sim.standin_builds import tiny_bundle

from .test_ranks import ROOT, eventually, is_alive

PATIENCE_S = 60.0
LONG = {"model": "tiny", "prompt": [3, 1, 4, 1, 5], "max_tokens": 90, "ignore_eos": True, "stream": True}

pytestmark = pytest.mark.xdist_group("ranks")


@dataclass(frozen=True)
class Served:
    process: subprocess.Popen[str]
    client: httpx.Client
    metrics_url: str

    def is_ready(self) -> bool:
        assert self.process.poll() is None, "the server ended"
        with suppress(httpx.TransportError):
            return self.client.get("/health/ready").is_success
        return False

    def rank_pids(self) -> list[int]:
        lists = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for one in lists for pid in one.read_text().split()]
        return [pid for pid in pids if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def end(self) -> tuple[int, str]:
        """Of SIGTERM: the exit code, and what the server said."""
        self.process.terminate()
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors


@contextmanager
def served(bundle: Path) -> Iterator[Served]:
    with reserved_port() as port, reserved_port() as metrics_port:
        command = [sys.executable, "-m", "tests.sim.serve_simulated", str(bundle), "--port", str(port)]
        command += ["--metrics-port", str(metrics_port)]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        url = f"http://127.0.0.1:{port}"
        client = httpx.Client(base_url=url, timeout=PATIENCE_S, verify=False)  # loading CAs is slow
        server = Served(process, client, f"http://127.0.0.1:{metrics_port}")
        try:
            assert eventually(server.is_ready, PATIENCE_S)
            (pid,) = server.rank_pids()
            yield server
            assert eventually(lambda: not is_alive(pid), PATIENCE_S)
        finally:
            client.close()
            process.kill()
            process.communicate()


def events(lines: Iterator[str]) -> Iterator[dict[str, object]]:
    return (json.loads(line[6:]) for line in lines if line.startswith("data: {"))


def test_server_of_two_ranks_tells_what_it_replayed_and_how_it_failed(tmp_path: Path) -> None:
    tiny_bundle(tmp_path, "rtx", shards=Shards(2, 1))
    with served(tmp_path / "bundle") as server:
        client = server.client
        whole = client.post("/v1/completions", json=LONG | {"max_tokens": 5, "stream": False})
        assert whole.status_code == 200, whole.text
        assert whole.json()["usage"]["completion_tokens"] == 5
        counted = dict(
            re.findall(
                r'graph_steps_total\{mode="replayed",phase="(\w+)"\} (\S+)',
                client.get(f"{server.metrics_url}/metrics").text,
            )
        )
        assert float(counted["prefill"]) == 1
        assert float(counted["decode"]) >= 4
        (pid,) = server.rank_pids()
        with client.stream("POST", "/v1/completions", json=LONG | {"n": 32}) as answer:
            heard = events(answer.iter_lines())
            assert "choices" in next(heard)
            os.kill(pid, signal.SIGKILL)
            assert "rank 1 was killed by SIGKILL" in str(list(heard)[-1]["error"])
        assert client.get("/health/ready").status_code == 503
        late = client.post("/v1/completions", json=LONG | {"stream": False})
        assert late.status_code >= 500
        assert "rank 1 was killed by SIGKILL" in late.text
        code, errors = server.end()
    assert code != 0
    assert "\nostinato serve: rank 1 was killed by SIGKILL" in errors  # libraries may have a last word at exit


@only_in_a_soak
def test_stopping_the_whole_group_lets_streams_end(tmp_path: Path) -> None:
    """As the end of a service does: every process of it gets the signal."""
    tiny_bundle(tmp_path, "rtx", shards=Shards(1, 2))
    with served(tmp_path / "bundle") as server:
        client = server.client
        with client.stream("POST", "/v1/completions", json=LONG) as answer:
            heard = events(answer.iter_lines())
            assert "choices" in next(heard)
            os.kill(server.rank_pids()[0], signal.SIGTERM)
            server.process.terminate()
            assert "error" not in str(list(heard))
        code, _ = server.end()
    assert code == 0
