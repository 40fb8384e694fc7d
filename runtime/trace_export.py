"""Steps and calls as a trace in Chrome's event format, which ui.perfetto.dev opens (made per request of it)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .call import CallRecord
from .step_log import StepRecord

_STEPS, _CALLS = 1, 2  # the trace's two processes
_LOOP, _DEVICE = 1, 2  # threads of the first
_SECOND = 1e6  # in microseconds, the format's unit

Event = dict[str, Any]


def trace(steps: Sequence[StepRecord], calls: Sequence[CallRecord]) -> dict[str, Any]:
    """One track for what the loop does, one for steps in flight, and one for each of the calls that overlap."""
    lanes = _lanes(calls)
    events = [
        _name("process_name", _STEPS, 0, "steps"),
        _name("thread_name", _STEPS, _LOOP, "the loop"),
        _name("thread_name", _STEPS, _DEVICE, "in flight"),
        _name("process_name", _CALLS, 0, "calls"),
        *(_name("thread_name", _CALLS, lane, f"lane {lane}") for lane in sorted(set(lanes))),
    ]
    for step in steps:
        events += _step(step)
    for record, lane in zip(calls, lanes, strict=True):
        events += _call(record, lane)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _lanes(calls: Sequence[CallRecord]) -> list[int]:
    """A track for each call on which no other is at that time, the fewest that do."""
    ends: list[float] = []
    chosen = dict[str, int]()
    for record in sorted(calls, key=lambda record: record.began_at):
        free = (lane for lane, end in enumerate(ends) if end <= record.began_at)
        lane = next(free, len(ends))
        ends[lane : lane + 1] = [record.began_at + record.seconds]
        chosen[record.id] = lane + 1
    return [chosen[record.id] for record in calls]


def _step(step: StepRecord) -> list[Event]:
    """Its parts on the loop's track, placed back to back at its launch and at its landing."""
    times = step.times
    about = {"rows": times.num_rows, "tokens": times.num_tokens, "padding": step.padding}
    began_at = times.launched_at - times.launch - times.pack - times.plan
    events = []
    for name in ("plan", "pack", "launch"):
        seconds = getattr(times, name)
        events.append(_span(name, _STEPS, _LOOP, began_at, seconds, {"step": step.number}))
        began_at += seconds
    events.append(_span("wait", _STEPS, _LOOP, times.landed_at - times.wait, times.wait, {"step": step.number}))
    events.append(_span("commit", _STEPS, _LOOP, times.landed_at, times.commit, {"step": step.number}))
    pair = {"cat": "step", "id": step.number, "pid": _STEPS, "tid": _DEVICE, "name": _title(step)}
    events.append({"ph": "b", "ts": times.launched_at * _SECOND, "args": about, **pair})
    events.append({"ph": "e", "ts": times.landed_at * _SECOND, **pair})
    return events


def _title(step: StepRecord) -> str:
    times = step.times
    kind = "decode" if times.num_rows == times.num_tokens else "prefill"
    return f"{kind} {times.num_tokens}" + (f" of {step.computed}" if step.padding else "")


def _call(record: CallRecord, lane: int) -> list[Event]:
    """The call, and in it the pieces of its path."""
    about = {"status": record.status, "prompt": record.num_prompt, "cached": record.num_cached, "id": record.id}
    events = [_span(record.route, _CALLS, lane, record.began_at, record.seconds, about | {"output": record.num_output})]
    for name, began_at, ended_at, spans in record.pieces:
        parts = {part: round(seconds * 1e3, 3) for part, seconds in spans.items()}  # milliseconds
        events.append(_span(name, _CALLS, lane, began_at, ended_at - began_at, parts))
    return events


def _span(name: str, process: int, thread: int, began_at: float, seconds: float, args: dict[str, Any]) -> Event:
    times = {"ts": began_at * _SECOND, "dur": max(seconds, 0.0) * _SECOND}
    return {"ph": "X", "name": name, "pid": process, "tid": thread, **times, "args": args}


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
