"""A side of the latency gate with a slowdown planted: each step spins for a share of its time (run by the gate)."""

from __future__ import annotations

import os
import time

from latency_side import Side, serve

SHARE = 0.05


def spin(seconds: float) -> None:
    """Work for `SHARE` of a step's CPU seconds, on one of the cores that they were spread over."""
    end = time.process_time() + seconds * SHARE / len(os.sched_getaffinity(0))
    while time.process_time() < end:
        pass


if __name__ == "__main__":
    serve(Side(burden=spin))
