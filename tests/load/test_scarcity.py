"""A process that has no more files, or nobody who reads its log: it serves on, and what it says is right."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

from tests.load.callers import answers
from tests.load.toy_process import Toy, toy_process
from tests.serving import await_true

NUM_FILES, NUM_CONNECTIONS = 64, 100


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES, NUM_FILES))


def test_more_connections_than_files(tmp_path: Path) -> None:
    with toy_process(tmp_path, Toy(), preexec_fn=few_files) as server:
        wanted = answers(server.url, [1])
        host, port = server.url.removeprefix("http://").split(":")
        connections = [socket.create_connection((host, int(port))) for _ in range(NUM_CONNECTIONS)]
        files = Path(f"/proc/{server.process.pid}/fd")
        await_true(lambda: len(list(files.iterdir())) >= NUM_FILES - 2, "they were not taken")
        for connection in connections:
            connection.close()
        await_true(server.is_ready, "it did not recover")
        assert answers(server.url, [1]) == wanted
        assert server.end() == 0


def test_a_log_that_can_not_be_written(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full, toy_process(tmp_path, Toy(), stderr=full, stdout=full) as server:
        wanted = answers(server.url, [1])
        with server.client() as client:
            assert client.post("/v1/completions", content=b"{").status_code == 400
            assert client.get("/nowhere").status_code == 404
        assert answers(server.url, [1]) == wanted
        server.end()
