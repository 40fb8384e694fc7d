"""The server's end: draining, signals, a process that is told to stop, loading that fails."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ostinato.engines.errors import BundleError, OstinatoError
from ostinato.runtime.serve_config import ServeConfig
from ostinato.runtime.server import Server, run
from ostinato.runtime.server_app import create_app
from tests.http_calls import LIMITS, complete, error_of, payloads
from tests.serving import ANY_PORTS, MODEL, PATIENCE_SECONDS, GatedLM, TapeLM, await_true, reserved_port, serving


def test_draining_ends_what_runs_and_takes_nothing_new(tmp_path: Path) -> None:
    gated = GatedLM(TapeLM(b"0123456789", 0))
    with serving(tmp_path, LIMITS, gated) as server, server.client() as client, ThreadPoolExecutor(4) as pool:
        client.get("/health")  # a connection that stays open
        streams = [pool.submit(complete, server.client(), temperature=0, stream=True) for _ in range(3)]
        await_true(lambda: len(server.bridge._rows) == 3, "the streams did not start")
        home = server.bridge._home
        assert home is not None
        home.call_soon_threadsafe(server.door.drain, 30.0)
        await_true(lambda: server.door.trouble() is not None, "not draining")
        error_of(client.get("/health/ready"), 503)
        response = complete(client)
        assert error_of(response, 503)["code"] == "not_ready"
        assert "retry-after" in response.headers
        assert client.get("/health").status_code == 200
        server.server.should_exit = True
        gated.permit(100)
        for stream in streams:
            assert "".join(chunk["choices"][0]["text"] for chunk in payloads(stream.result())) == "0123456789"


def test_what_is_not_done_when_draining_ends_gets_an_error_event(tmp_path: Path) -> None:
    gated = GatedLM(TapeLM(b"0123456789", 0))
    with serving(tmp_path, LIMITS, gated) as server, server.client() as client, ThreadPoolExecutor(2) as pool:
        cut = pool.submit(complete, client, stream=True)
        cut_whole = pool.submit(complete, client)
        await_true(lambda: len(server.bridge._rows) == 2, "the calls did not start")
        home = server.bridge._home
        assert home is not None
        home.call_soon_threadsafe(server.door.drain, 0.0)
        assert payloads(cut.result())[-1]["error"]["code"] == "not_ready"
        error_of(cut_whole.result(), 503)
        gated.permit(100)
        server.await_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_second_ctrl_c_cuts_what_runs(tmp_path: Path, stream: bool) -> None:
    gated = GatedLM(TapeLM(b"0123456789", 0))
    with serving(tmp_path, LIMITS, gated) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        call = pool.submit(complete, client, temperature=0, stream=stream)
        gated.await_step()
        for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            server.server.handle_exit(sign, None)
        await_true(lambda: server.door.trouble() is not None, "not draining")
        gated.permit()
        gated.await_step()
        assert not call.done()
        server.server.handle_exit(signal.SIGINT, None)
        if stream:
            assert payloads(call.result())[-1]["error"]["code"] == "not_ready"
        else:
            error_of(call.result(), 503)
        gated.permit()
        await_true(lambda: not server.loop.is_alive, "the loop goes on")


@pytest.mark.parametrize("host", ["a..b", "x" * 70 + ".example"])
def test_a_host_that_is_no_name_is_refused(host: str) -> None:
    with pytest.raises(OstinatoError, match="give another --host or --port"):
        Server(create_app(lambda: None, ServeConfig(host=host, port=0)))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_address_that_can_not_be_had_is_refused_before_anything_is_loaded(host: str) -> None:
    loaded = threading.Event()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as other:
        other.bind((host, 0))
        other.listen()
        port = other.getsockname()[1]
        for config, option in (
            (ServeConfig(host=host, port=port, metrics_port=None), "--port"),
            (ServeConfig(port=0, metrics_host=host, metrics_port=port), "--metrics-port"),
        ):
            app = create_app(lambda: loaded.set(), config)  # type: ignore[arg-type, return-value]
            with pytest.raises(OstinatoError, match=f"can't listen on {host} port {port} .*give another.*{option}"):
                run(app)
    assert not loaded.is_set()


def test_a_signal_drains_and_stops_the_server(tmp_path: Path) -> None:
    gated = GatedLM(TapeLM(b"0123456789", 0))
    with serving(tmp_path, LIMITS, gated) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(complete, client, temperature=0, stream=True)
        gated.await_step()
        server.server.handle_exit(15, None)
        await_true(lambda: server.door.trouble() is not None, "not draining")
        gated.permit(100)
        assert "".join(chunk["choices"][0]["text"] for chunk in payloads(stream.result())) == "0123456789"
        await_true(lambda: not server.loop.is_alive, "the loop goes on")
        with pytest.raises(httpx.TransportError):
            client.get("/health")


TOY_PROCESS = """
import sys, time
from pathlib import Path
from ostinato.runtime.bridge import Bridge
from ostinato.runtime.door import Served
from ostinato.runtime.metrics import Metrics
from ostinato.runtime.serve_config import ServeConfig
from ostinato.runtime.server import run
from ostinato.runtime.server_app import create_app
from tests.fakes import make_limits
from tests.serving import ANY_PORTS, MODEL, TapeLM, make_intake, make_loop, toy_tokenizer

class SlowLM(TapeLM):
    def run(self, batch):
        time.sleep(0.05)
        return super().run(batch)

limits = make_limits()
loop = make_loop(limits, SlowLM(b"0123456789" * 2, 0))
bridge = Bridge(loop, make_intake(limits), toy_tokenizer(Path(sys.argv[1])), Metrics())
run(create_app(lambda: Served(MODEL, bridge), ServeConfig(port=int(sys.argv[2]), metrics_port=None)))
"""


HUNG_PROCESS = """
import logging, sys, threading
from ostinato.runtime.serve_config import ServeConfig
from ostinato.runtime.server import run
from ostinato.runtime.server_app import create_app
logging.basicConfig(level=logging.INFO)

def load():
    logging.info("loading")
    threading.Event().wait()

run(create_app(load, ServeConfig(port=0, metrics_port=0)))
"""


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_process_that_still_loads(sign: signal.Signals) -> None:
    """At once, though its loading never ends; with a caller who is connected and one who is in the middle of a call."""
    command = [sys.executable, "-c", HUNG_PROCESS]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines: list[str] = []
        try:
            while not (lines and "Application startup complete" in lines[-1]):
                lines.append(process.stderr.readline())
                assert lines[-1], "the process ended"
            url = re.search(r"listening on (\S+),", "".join(lines)).group(1)  # type: ignore[union-attr]
            with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS, verify=False) as client:
                error_of(client.get("/health/ready"), 503)
                with socket.create_connection((client.base_url.host, client.base_url.port)) as half:
                    half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{")
                    process.send_signal(sign)
                    told = process.stderr.read()
                    assert process.wait(PATIENCE_SECONDS) == 0
            assert "stopping: the model is still loading" in told
            assert "Traceback" not in told
        finally:
            process.kill()


def test_a_signal_before_the_start_loads_nothing() -> None:
    server = Server(create_app(lambda: pytest.fail("loaded"), ANY_PORTS))
    server.handle_exit(signal.SIGTERM, None)
    server.run()
    assert server.door.failure is None


def test_a_process_that_is_told_to_end_lets_its_streams_end_and_exits_with_0(tmp_path: Path) -> None:
    with reserved_port() as port:
        _end_while_streaming([sys.executable, "-c", TOY_PROCESS, str(tmp_path), str(port)], port)


def _end_while_streaming(command: list[str], port: int) -> None:
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_SECONDS, verify=False)

    def is_ready() -> bool:
        try:
            return client.get("/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    try:
        await_true(is_ready, "the process did not start")
        options = {"model": MODEL, "prompt": "x", "temperature": 0, "max_tokens": 20, "stream": True}
        with client.stream("POST", "/v1/completions", json=options) as response:
            process.send_signal(signal.SIGTERM)
            lines = [line for line in response.iter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines) == "0123456789" * 2
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        client.close()
        process.kill()
        process.wait()


def test_while_loading_only_liveness_is_green_and_a_failure_to_load_stops_the_server() -> None:
    loading = threading.Event()

    def load() -> Any:
        loading.wait()
        raise BundleError("no bundle at nowhere: build one")

    server = Server(create_app(load, ANY_PORTS))
    thread = threading.Thread(target=server.run)
    thread.start()
    await_true(lambda: server.started, "the server did not start")
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/health").status_code == 200
        for response in (
            client.get("/health/ready"),
            client.get("/v1/models"),
            complete(client),
            client.get(f"{server.metrics_url}/metrics"),
        ):
            assert "loading" in error_of(response, 503)["message"]
    loading.set()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert str(server.door.failure).startswith("no bundle")
