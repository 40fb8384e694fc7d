"""What an answer of /v1/responses is made of, item by item: texts and calls of functions (lines run per delta)."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from .choice import Delta
from .request import TokenLogprob
from .tool_calls import Arguments, CallStart, Content, Piece, ToolCallParser

Event = tuple[str, dict[str, Any]]  # its kind and fields
Entries = Callable[[Sequence[TokenLogprob]], list[dict[str, Any]]]


class MessageItem:
    """A message of one text part."""

    def __init__(self, index: int, entries: Entries) -> None:
        self.texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._entries = entries
        self._id = f"msg_{uuid.uuid4().hex}"
        self._place = {"output_index": index, "item_id": self._id, "content_index": 0}

    def begin(self) -> list[Event]:
        item = self._table("in_progress", [])
        return [
            ("response.output_item.added", {"output_index": self._place["output_index"], "item": item}),
            ("response.content_part.added", {**self._place, "part": self._part("", [])}),
        ]

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> list[Event]:
        self.texts.append(text)
        self._logprobs += logprobs
        fields = {**self._place, "delta": text, "logprobs": self._entries(logprobs)}
        return [("response.output_text.delta", fields)] if text or fields["logprobs"] else []

    def end(self, status: str) -> list[Event]:
        part = self._whole
        return [
            ("response.output_text.done", {**self._place, "text": part["text"], "logprobs": part["logprobs"]}),
            ("response.content_part.done", {**self._place, "part": part}),
            (
                "response.output_item.done",
                {"output_index": self._place["output_index"], "item": self._table(status, [part])},
            ),
        ]

    def table(self, status: str) -> dict[str, Any]:
        return self._table(status, [self._whole])

    @cached_property
    def _whole(self) -> dict[str, Any]:
        """Its part, once nothing is added any more."""
        return self._part("".join(self.texts), self._entries(self._logprobs))

    def _table(self, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._id, "status": status, "role": "assistant", "content": parts}

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class CallItem:
    """A call of a function."""

    def __init__(self, index: int, name: str) -> None:
        self.texts: list[str] = []
        self._index = index
        self._fixed = {
            "type": "function_call",
            "id": f"fc_{uuid.uuid4().hex}",
            "call_id": f"call_{secrets.token_hex(12)}",
            "name": name,
        }
        self._place = {"output_index": index, "item_id": self._fixed["id"]}

    def begin(self) -> list[Event]:
        item = self.table("in_progress")
        return [("response.output_item.added", {"output_index": self._index, "item": item})]

    def add(self, text: str) -> list[Event]:
        self.texts.append(text)
        return [("response.function_call_arguments.delta", {**self._place, "delta": text})]

    def end(self, status: str) -> list[Event]:
        whole = {**self._place, "arguments": "".join(self.texts)}
        item = self.table(status)
        return [
            ("response.function_call_arguments.done", whole),
            ("response.output_item.done", {"output_index": self._index, "item": item}),
        ]

    def table(self, status: str) -> dict[str, Any]:
        return {**self._fixed, "arguments": "".join(self.texts), "status": status}


class ResponseItems:
    """All items in order, the last one still open. What happens to them is told as events.

    Without a parser there is one message. `entries`: makes JSON of logprobs.
    """

    def __init__(self, parser: ToolCallParser | None, entries: Entries) -> None:
        self._parser = parser
        self._entries = entries
        self._items: list[MessageItem | CallItem] = []

    def begin(self) -> list[Event]:
        return self._open(MessageItem(0, self._entries)) if self._parser is None else []

    def add(self, delta: Delta) -> list[Event]:
        if self._parser is None:
            return self._message_events(delta.text, delta.logprobs)
        pieces = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            pieces += self._parser.finish()
        return [event for piece in pieces for event in self._take(piece)]

    def end(self, status: str) -> list[Event]:
        """The last item ends with the answer; where there is none, it is an empty message."""
        begun = [] if self._items else self._open(MessageItem(0, self._entries))
        return begun + self._items[-1].end(self._last_status(status))

    def tables(self, status: str) -> list[dict[str, Any]]:
        """The items as they stand in an answer."""
        last = len(self._items) - 1
        return [
            item.table(self._last_status(status) if index == last else "completed")
            for index, item in enumerate(self._items)
            if item.texts or status != "failed"
        ]

    def _last_status(self, status: str) -> str:
        """A stop string may cut a call short: nobody should make that one."""
        is_cut = isinstance(self._items[-1], CallItem) and self._parser is not None and not self._parser.is_whole
        return "incomplete" if is_cut or status == "failed" else status

    def _take(self, piece: Piece) -> list[Event]:
        match piece:
            case Content(text):
                return self._message_events(text, ())
            case CallStart(_, name):
                return self._open(CallItem(len(self._items), name))
            case Arguments(_, text):
                call = self._items[-1]
                assert isinstance(call, CallItem)
                return call.add(text)

    def _message_events(self, text: str, logprobs: Sequence[TokenLogprob]) -> list[Event]:
        begun: list[Event] = []
        if not self._items or isinstance(message := self._items[-1], CallItem):
            message = MessageItem(len(self._items), self._entries)
            begun = self._open(message)
        return begun + message.add(text, logprobs)

    def _open(self, item: MessageItem | CallItem) -> list[Event]:
        ended = self._items[-1].end("completed") if self._items else []
        self._items.append(item)
        return ended + item.begin()
