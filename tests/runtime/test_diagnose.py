"""`ostinato diagnose` names the hand-off that stalls: five stalls put in on purpose, over a real server."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from ostinato.engines.errors import OstinatoError
from ostinato.plugins.sampling_rows import I32, Sampled
from ostinato.runtime.batch import Batch
from ostinato.runtime.critical_path import SPANS
from ostinato.runtime.diagnose import diagnose, read_calls
from ostinato.runtime.executor import Executor, Ticket
from ostinato.runtime.grammar_guide import Grammar
from ostinato.runtime.grammar_spec import GrammarSpec
from ostinato.runtime.grammars import Grammars
from ostinato.runtime.stalls import GROUPS, Group, judge
from ostinato.runtime.tokenizer import Tokenizer
from tests.fakes import PosLM, make_limits
from tests.http_calls import complete
from tests.serving import CHAT_TEMPLATE, PATIENCE_SECONDS, VOCAB_SIZE, Running, await_true, serving
from tests.tokenizers import byte_level

LIMITS = make_limits()


class SlowTokenizer(Tokenizer):
    """Takes its time over each text."""

    def encode(self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None) -> list[int]:
        time.sleep(0.2)
        return super().encode(text, add_special_tokens, max_tokens=max_tokens)


@dataclass(frozen=True)
class SlowTicket:
    """A step that takes longer."""

    inner: Ticket
    seconds: float

    def sample(self, masks: I32) -> None:
        self.inner.sample(masks)

    def wait(self) -> Sampled:
        time.sleep(self.seconds)
        return self.inner.wait()


class SlowLM:
    """Steps of another executor that take longer."""

    def __init__(self, inner: Executor, seconds: float) -> None:
        self.rules, self.trouble, self.coverage = inner.rules, inner.trouble, inner.coverage
        self._inner = inner
        self._seconds = seconds

    def run(self, batch: Batch) -> Ticket:
        return SlowTicket(self._inner.run(batch), self._seconds)

    def close(self) -> None:
        self._inner.close()


@dataclass
class SlowGrammars:
    """Takes its time over each grammar."""

    inner: Grammars

    async def compile(self, spec: GrammarSpec) -> Grammar:
        await asyncio.sleep(0.5)
        return await self.inner.compile(spec)

    def close(self) -> None:
        self.inner.close()


def verdict(server: Running, num_calls: int, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    await_true(lambda: len(server.bridge.ledger.recent.last()) == num_calls, "calls are missing")
    capsys.readouterr()
    assert diagnose([server.metrics_url, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    assert found["num_calls"] == num_calls
    assert diagnose([server.metrics_url]) == 0
    assert str(found["sentence"])[:30] in capsys.readouterr().out
    return found


def test_a_slow_tokenizer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, LIMITS, PosLM(LIMITS, VOCAB_SIZE)) as server, server.client() as client:
        folder = tmp_path / "slow"
        folder.mkdir()
        server.bridge.tokenizer = SlowTokenizer(byte_level(folder, config={"chat_template": CHAT_TEMPLATE}))
        for _ in range(3):
            assert complete(client, max_tokens=3).status_code == 200
        assert verdict(server, 3, capsys)["stall"] == "tokenize"


def test_a_small_pool_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = make_limits(num_blocks=4, max_context=64)
    with serving(tmp_path, limits, SlowLM(PosLM(limits, VOCAB_SIZE), 0.01)) as server, server.client() as client:
        with ThreadPoolExecutor(6) as pool:
            ask = [
                pool.submit(complete, client, prompt=[number] * 40, max_tokens=20, ignore_eos=True)
                for number in range(6)
            ]
            assert {answer.result().status_code for answer in ask} == {200}
        assert verdict(server, 6, capsys)["stall"] == "queue: blocks"


def test_a_slow_executor_is_no_stall_but_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, LIMITS, SlowLM(PosLM(LIMITS, VOCAB_SIZE), 0.05)) as server, server.client() as client:
        for _ in range(2):
            assert complete(client, max_tokens=10, ignore_eos=True).status_code == 200
        found = verdict(server, 2, capsys)
    assert found["stall"] is None
    assert "execute takes" in str(found["sentence"])


def test_a_slow_socket_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = make_limits(max_context=1024, num_blocks=100)
    options = {"model": "toy", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "logprobs": 5, "n": 2}
    transport = httpx.HTTPTransport(verify=False, socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
    with serving(tmp_path, limits, PosLM(limits, VOCAB_SIZE)) as server:
        server.server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with (
            httpx.Client(base_url=server.url, timeout=PATIENCE_SECONDS, transport=transport) as client,
            client.stream("POST", "/v1/completions", json=options) as response,
        ):
            time.sleep(2.0)
            assert len(response.read()) > 50_000
        assert verdict(server, 1, capsys)["stall"] == "write"


def test_a_slow_grammar_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, LIMITS, PosLM(LIMITS, VOCAB_SIZE)) as server, server.client() as client:
        server.bridge.grammars = SlowGrammars(server.bridge.grammars)  # type: ignore[assignment]
        answer = complete(client, max_tokens=8, structured_outputs={"choice": ["yes", "no"]})
        assert answer.json()["choices"][0]["text"] in ("yes", "no")
        assert verdict(server, 1, capsys)["stall"] == "grammar"


def test_every_span_is_in_one_group() -> None:
    named = [span for group in GROUPS for span in group.spans]
    assert sorted(named) == sorted(SPANS)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_whatever_takes_most_is_named(group: Group) -> None:
    calls = [dict.fromkeys(group.spans, 10.0) | {"decode_execute": 12.0}] * 3
    found = judge(calls)
    assert found.stall == (None if group.is_work else group.name)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert group.change in found.sentence


def http(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n", b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", http(b"ok"), http(b"[]"),
        http(b'{"requests":3}'), http(b'{"requests":[3]}'), http(b'{"requests":[{"id":"x"}]}'),
        http(b'{"requests":[{"choices":1}]}'), http(b'{"requests":[{"choices":1,"spans_ms":3}]}'),
    ],
)  # fmt: skip
def test_what_is_no_server_of_ours_is_named(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(answer)

        served = pool.submit(serve)
        with pytest.raises(OstinatoError, match="no server of ours"):
            read_calls("http://{}:{}".format(*listener.getsockname()), 1)
        served.result()


def test_a_key_goes_nowhere_else_than_to_the_server_that_was_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        with ThreadPoolExecutor(1) as pool:

            def serve() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(2**16)
                    place = "http://{}:{}/".format(*other.getsockname()).encode()
                    connection.sendall(b"HTTP/1.1 302 Found\r\ncontent-length: 0\r\nlocation: %b\r\n\r\n" % place)

            served = pool.submit(serve)
            with pytest.raises(OstinatoError, match="answered 302"):
                read_calls("http://{}:{}".format(*listener.getsockname()), 1, "canary-key-0123456789")
            served.result()
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()


@pytest.mark.parametrize("url", ["http://127.0.0.1:x", "http://[::1", "http://127.0.0.1:1/\n", "127.0.0.1:1"])
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(OstinatoError, match="metrics port"):
        read_calls(url, 1)


@pytest.mark.parametrize(
    ("count", "key", "complaint"), [(0, None, "-n is 0"), (1, "canary\n", "the key has characters")]
)
def test_options_that_no_server_takes_are_refused(count: int, key: str | None, complaint: str) -> None:
    with pytest.raises(OstinatoError, match=complaint) as refused:
        read_calls("http://127.0.0.1:9", count, key)
    assert "canary" not in str(refused.value)


def test_what_can_not_be_read_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(OstinatoError, match="give its metrics port"):
        read_calls("http://127.0.0.1:9", 1)
    with pytest.raises(OstinatoError, match="no http address"):
        read_calls("file:///etc/passwd", 1)
    with serving(tmp_path, LIMITS, PosLM(LIMITS, VOCAB_SIZE)) as server:
        with pytest.raises(OstinatoError, match="give the metrics port"):
            read_calls(server.url, 1)
        assert judge(read_calls(server.metrics_url, 5)).sentence.startswith("No call has ended")
