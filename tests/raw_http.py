"""HTTP by hand, for requests that no client library would send (made per test)."""

from __future__ import annotations

import contextlib
import socket
from typing import Any, NamedTuple

from tests.http_calls import error_in
from tests.serving import PATIENCE_SECONDS


class Reply(NamedTuple):
    """The first answer of a connection; `is_closed`: nothing can follow it."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_closed: bool

    def error(self) -> dict[str, Any]:
        """The one error object of a refusal."""
        return error_in(self.headers["content-type"], self.body)


def connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), PATIENCE_SECONDS)


def connect_narrowly(url: str) -> socket.socket:
    """A connection whose system takes next to nothing before it is read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(PATIENCE_SECONDS)
    connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    return connection


def send(connection: socket.socket, *parts: bytes) -> None:
    """As much as the server takes: it may hang up in the middle."""
    with contextlib.suppress(ConnectionError):
        for part in parts:
            connection.sendall(part)


def read_reply(connection: socket.socket) -> Reply | None:
    """None where the connection closed without a word."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (part := _receive(connection)):
            assert not data, data
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    length = int(headers.get("content-length", 0))
    while len(body) < length and (part := _receive(connection)):
        body += part
    assert len(body) == length
    return Reply(int(first.split()[1]), headers, body, headers.get("connection") == "close")


def exchange(url: str, *parts: bytes) -> Reply | None:
    with connect(url) as connection:
        send(connection, *parts)
        return read_reply(connection)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server hangs up, after whatever it still says."""
    while part := _receive(connection):
        del part
    return True


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", *headers]
    lines.append(f"content-length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(2**16)
    except ConnectionError:
        return b""
