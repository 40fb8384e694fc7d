"""What a service manager hears, on a socket of the test's own."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest

from ostinato.runtime.sd_notify import Manager
from tests.load.callers import body
from tests.load.toy_process import Toy, toy_process


@pytest.mark.parametrize("is_abstract", [False, True])
def test_a_manager_hears_of_trouble_once_and_of_fitness_each_time(tmp_path: Path, is_abstract: bool) -> None:
    name = f"@{tmp_path}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind("\0" + name[1:] if is_abstract else name)
        ear.settimeout(10)
        manager = Manager(name)
        for trouble in ("the model is loading", "the model is loading", None, None, "no step", "no step"):
            manager.tell(trouble)
        ready = b"READY=1\nWATCHDOG=1\nSTATUS=serving"
        assert [ear.recv(1000) for _ in range(4)] == [b"STATUS=the model is loading", ready, ready, b"STATUS=no step"]
        ear.setblocking(False)
        with pytest.raises(BlockingIOError):
            ear.recv(1000)


def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    with caplog.at_level(logging.WARNING):
        Manager().tell(None)
        assert not caplog.messages
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
        Manager().tell(None)
    assert ["did not hear 'READY=1'" in message for message in caplog.messages] == [True]


def test_a_server_tells_its_manager_how_it_is(tmp_path: Path) -> None:
    name = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(name))
        ear.settimeout(60)
        environment = os.environ | {"NOTIFY_SOCKET": str(name)}
        with toy_process(tmp_path, Toy(step_seconds=0.1), env=environment, wait=False) as server:
            while b"READY=1" not in ear.recv(1000):
                pass
            assert server.is_ready()
            asked = body(
                1, stream=True, max_tokens=25
            )  # so that the drain takes more than the second between two words
            with server.client() as client, client.stream("POST", "/v1/completions", json=asked) as answer:
                server.process.terminate()
                while (heard := ear.recv(1000)) != b"STATUS=the server is stopping":
                    assert b"READY=1" in heard
                assert answer.read().endswith(b"data: [DONE]\n\n")
            assert server.process.wait(60) == 0
