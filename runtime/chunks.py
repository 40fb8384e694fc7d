"""Bytes of stream chunks: all that one stream's chunks share is encoded once per request, the rest per token."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from .stream import Stream
from .wire_errors import Refusal

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"  # for proxies and clients that give up on a silent connection
NULL = b"null"


class Head(NamedTuple):
    """What identifies an answer."""

    id: str
    model: str
    created: int  # unix seconds


def to_json(value: object) -> bytes:
    """JSON on one line by every client's idea of a line: U+0085, U+2028 and U+2029 are escaped too."""
    encoded = orjson.dumps(value)
    if encoded.isascii():
        return encoded
    # UTF-8 is self-synchronizing: these bytes can't be parts of other characters.
    return (
        encoded.replace(b"\xe2\x80\xa8", b"\\u2028")
        .replace(b"\xe2\x80\xa9", b"\\u2029")
        .replace(b"\xc2\x85", b"\\u0085")
    )


def event(payload: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + payload + b"\n\n"


class Frame:
    """Makes the chunks of one stream; with `has_usage` it ends with a chunk that has usage and no choices."""

    def __init__(self, head: Head, kind: str, has_usage: bool) -> None:
        common = to_json({"id": head.id, "object": kind, "created": head.created, "model": head.model})
        self._start = event(common)[:-3] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"
        self._has_usage = has_usage

    def chunk(self, index: int, content: bytes, logprobs: bytes = NULL, finish: bytes = NULL) -> bytes:
        """One choice's chunk; `content` is the `"key":value` that differs between endpoints."""
        return b'%b{"index":%d,%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._start, index, content, logprobs, finish, self._end,
        )  # fmt: skip

    def around(self, index: int, before: bytes, after: bytes = b"") -> tuple[bytes, bytes]:
        """What stands around one choice's text in all of its chunks that have nothing else."""
        head, tail = self.chunk(index, before + b"\0" + after).split(b"\0")
        return head, tail

    def closing(self, stream: Stream) -> bytes:
        """What ends the stream: the usage and the timings if they were asked for, and the mark."""
        timings = timings_field(stream)
        if not self._has_usage and not timings:
            return DONE
        usage = b',"usage":' + to_json(usage_of(stream)) if self._has_usage else b""
        return self._start + b"]" + usage + timings + b"}\n\n" + DONE


def failure(refusal: Refusal) -> bytes:
    """What ends a stream of chunks that failed on its way."""
    return event(refusal.to_json()) + DONE


def timings_field(stream: Stream) -> bytes:
    """The last field of an answer whose caller asked where its time went, else nothing."""
    call = stream.call
    return b',"timings":' + to_json(call.timings()) if call.wants_timings else b""


def usage_of(stream: Stream) -> dict[str, Any]:
    """Tokens of a call that has ended: each prompt once, every choice's output."""
    return {
        "prompt_tokens": stream.num_prompt,
        "completion_tokens": stream.num_output,
        "total_tokens": stream.num_prompt + stream.num_output,
        "prompt_tokens_details": {"cached_tokens": stream.num_cached},
    }
