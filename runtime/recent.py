"""The calls that ended last, without any text (a call is added as it ends, on the asyncio thread)."""

from __future__ import annotations

from collections import OrderedDict

from .call import CallRecord

NUM_CALLS = 512


class Recent:
    """A ring; the newest is last. One thread."""

    def __init__(self, num_calls: int = NUM_CALLS) -> None:
        self._records: OrderedDict[str, CallRecord] = OrderedDict()
        self._num_calls = num_calls

    def add(self, record: CallRecord) -> None:
        """A call has ended."""
        self._records[record.id] = record
        if len(self._records) > self._num_calls:
            self._records.popitem(last=False)

    def last(self, count: int = NUM_CALLS) -> list[CallRecord]:
        """The last `count` calls, the oldest first."""
        records = list(self._records.values())
        return records[max(0, len(records) - count) :]

    def find(self, call_id: str) -> CallRecord | None:
        """A call by its id, while it is kept."""
        return self._records.get(call_id)
