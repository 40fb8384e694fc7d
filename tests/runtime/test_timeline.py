"""The loop's clock and a call's path with clocks that the test sets: every second is in exactly one span."""

from __future__ import annotations

import threading
from itertools import pairwise

from ostinato.runtime.critical_path import SPANS, CriticalPath, seconds_by_span
from ostinato.runtime.timeline import LoopClock, Stage, Timeline


class Clock:
    """Time as the test tells it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def at(self, now: float) -> None:
        self.now = 100.0 + now


def test_a_request_is_charged_what_the_loop_did_at_each_of_its_stages() -> None:
    time = Clock()
    clock = LoopClock(time)
    timeline = Timeline(clock)
    time.at(1)
    timeline.turn(Stage.QUEUE)
    clock.wait_for("slots")
    time.at(3)
    clock.enter("plan")
    clock.wait_for("blocks")
    time.at(4)
    timeline.turn(Stage.PREFILL)
    time.at(5)
    assert clock.enter("launch") == 2
    time.at(7)
    clock.charge("grammar", 0.5)
    assert clock.enter("wait") == 1.5
    time.at(10)
    timeline.turn(Stage.DECODE)
    time.at(11)
    clock.enter("commit")
    time.at(13)
    queue, prefill, decode = timeline.cut(clock.snap())
    assert [(cut.stage, cut.began_at, cut.ended_at) for cut in (queue, prefill, decode)] == [
        (Stage.QUEUE, 101, 104),
        (Stage.PREFILL, 104, 110),
        (Stage.DECODE, 110, 113),
    ]
    assert queue.spans == {"slots": 2, "blocks": 1}
    assert prefill.spans == {"plan": 1, "launch": 1.5, "grammar": 0.5, "wait": 3}
    assert decode.spans == {"wait": 1, "commit": 2}


def test_a_cut_leaves_out_what_came_after_it() -> None:
    time = Clock()
    clock = LoopClock(time)
    timeline = Timeline(clock)
    assert timeline.cut(clock.snap()) == []
    timeline.turn(Stage.QUEUE)
    time.at(1)
    timeline.turn(Stage.PREFILL)
    time.at(2)
    end = clock.snap()
    time.at(3)
    timeline.turn(Stage.QUEUE)
    assert [(segment.stage, segment.ended_at) for segment in timeline.cut(end)] == [
        (Stage.QUEUE, 101),
        (Stage.PREFILL, 102),
    ]


def test_a_path_goes_through_the_loop_and_what_overlaps_is_not_in_the_sum() -> None:
    time = Clock()
    clock = LoopClock(time)
    path, timeline = CriticalPath(time), Timeline(clock)
    time.at(1)
    with path.span("parse"):
        time.at(2)
        with path.span("read"):
            time.at(4)
        time.at(5)
    path.submitted()
    time.at(7)
    timeline.turn(Stage.QUEUE)
    time.at(8)
    timeline.turn(Stage.DECODE)
    before = path.enter("write")
    time.at(11)
    path.enter(before)
    made = clock.snap()
    time.at(12)
    path.taken(timeline.cut(made), made.at, time())
    path.enter("write")
    time.at(16)
    path.end()
    spans = path.spans()
    assert spans == {
        "read": 2, "parse": 2, "other": 1, "handoff": 2, "queue_turn": 1, "decode_idle": 3, "host": 1, "write": 4,
    }  # fmt: skip
    assert sum(spans.values()) == path.seconds == 16
    assert list(spans) == [name for name in SPANS if name in spans]
    other = CriticalPath(time)
    with other.span("parse"):
        time.at(17)
    other.end()
    totals = {name: seconds.tolist() for name, seconds in seconds_by_span([path, other, path]).items()}
    both = {name: [seconds, seconds] for name, seconds in spans.items()}
    assert totals == both | {"parse": [2, 1, 2]}
    edges = [(piece.began_at, piece.ended_at) for piece in path.pieces]
    assert all(end == start for (_, end), (start, _) in pairwise(edges))


def test_a_snapshot_from_another_thread_loses_no_time() -> None:
    clock = LoopClock()
    began = clock.snap()
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            for phase in ("plan", "pack", "launch", "wait", "commit"):
                clock.enter(phase)
            clock.wait_for("slots")
            clock.wait_for("turn")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        last = began
        for _ in range(3000):
            snapshot = clock.snap()
            elapsed = snapshot.at - began.at
            for totals, before in ((snapshot.phases, began.phases), (snapshot.reasons, began.reasons)):
                assert abs(sum(totals) - sum(before) - elapsed) < 1e-6
            assert snapshot.at >= last.at
            last = snapshot
    finally:
        done.set()
        thread.join()
