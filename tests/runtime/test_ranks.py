"""Ranks in processes of their own, with a stand-in for the model: steps agree, and whatever ends one ends all."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ostinato.engines.bundle import Bundle
from ostinato.engines.errors import DeviceError
from ostinato.engines.shards import Shards
from ostinato.plugins.sampling_rows import I32, Sampled
from ostinato.runtime.batch import Batch
from ostinato.runtime.device_rows import DeviceRows
from ostinato.runtime.executor import Ticket
from ostinato.runtime.ranks import RanksExecutor, RanksTicket

from ..engines.made import LIMITS, manifest_of
from ..scale import scaled
from ..sim.standin_rank import Mishap, standin_parts, standin_tokens

ROOT = Path(__file__).parent.parent.parent
STALL_S = 3.0  # where a stall is to be seen; elsewhere a slow machine must not be taken for one
PATIENCE_S = 60.0
ENDS_IN_S = 15.0  # far more than it takes, and less than any wait that nobody ends

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def executor(
    folder: Path,
    shards: Shards,
    mishap: Mishap | None = None,
    shown: list[str] | None = None,
    stall_s: float = PATIENCE_S,
) -> RanksExecutor:
    bundle = Bundle(folder, replace(manifest_of(folder), shards=shards))
    show = [] if shown is None else shown
    return RanksExecutor(
        bundle,
        LIMITS,
        parts=standin_parts(mishap),
        stall_s=stall_s,
        progress=lambda what, done, total: show.append(what),
    )


class Interrupted:
    """Rank 0's own step, while Ctrl-C is pressed."""

    def __init__(self, step: Ticket) -> None:
        self._step = step

    def sample(self, masks: I32) -> None:
        raise KeyboardInterrupt

    def wait(self) -> Sampled:
        self._step.wait()
        raise KeyboardInterrupt


@contextmanager
def closing(ranks: RanksExecutor) -> Iterator[RanksExecutor]:
    pids = ranks.pids
    try:
        yield ranks
    finally:
        ranks.close()
        assert not [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def eventually(is_so: Callable[[], bool], limit_s: float = ENDS_IN_S) -> bool:
    ends_at = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > ends_at:
            return False
        time.sleep(0.01)
    return True


def batch_of(ids: I32, num_late_masks: int = 0) -> Batch:
    """A decode step of these rows."""
    count = len(ids)
    flat, zeros = np.arange(count + 1, dtype=np.int32), np.zeros(count, np.int32)
    floats = np.zeros(count, np.float32)
    rows = DeviceRows(
        floats, floats, zeros, floats, floats, floats, floats, floats, zeros, zeros - 1, zeros - 1,
        np.zeros((0, 10), np.int32), num_late_masks, (),
    )  # fmt: skip
    return Batch(ids, zeros, zeros, flat, zeros, np.zeros((count, 1), np.int32), flat[:count], None, rows)


def random_ids(rng: np.random.Generator) -> I32:
    return rng.integers(0, 100, rng.integers(1, LIMITS.max_rows + 1)).astype(np.int32)


def drive(ranks: RanksExecutor, num_steps: int, seed: int = 1) -> None:
    """As many steps in flight as the rules allow; every result is right."""
    rng, flying = np.random.default_rng(seed), list[tuple[I32, RanksTicket]]()
    for _ in range(num_steps):
        ids = random_ids(rng)
        flying.append((ids, ranks.run(batch_of(ids))))
        if len(flying) == ranks.rules.num_in_flight:
            land(*flying.pop(0), 1 + len(ranks.pids))
    for ids, ticket in flying:
        land(ids, ticket, 1 + len(ranks.pids))


def land(ids: I32, ticket: RanksTicket, num_ranks: int) -> None:
    assert ticket.wait().tokens.tolist() == standin_tokens(ids, num_ranks).tolist()


@pytest.mark.parametrize("shards", [Shards(2, 1), Shards(1, 2), Shards(2, 2)][: scaled(2, 3)], ids=str)
def test_every_rank_takes_part_in_every_step(tmp_path: Path, shards: Shards) -> None:
    shown: list[str] = []
    with closing(executor(tmp_path, shards, shown=shown)) as ranks:
        assert {"stand in", "rank 1: stand in"} <= set(shown)
        for pid in ranks.pids:  # as the end of a service does, to the whole group: rank 0 may want to drain
            os.kill(pid, signal.SIGTERM)
        drive(ranks, 60)
        assert ranks.rules.num_in_flight == 2
        assert ranks.rules.feeds_tokens == (shards.pipeline_parallel == 1)
        ids, late_masks = np.array([3, 4], np.int32), np.ones((1, 10), np.int32)
        ticket = ranks.run(batch_of(ids, 1))
        ticket.sample(late_masks)  # the stand-in adds them up
        assert ticket.wait().tokens.tolist() == (standin_tokens(ids, shards.num_ranks) + 10).tolist()
        assert ranks.trouble is None


def test_stages_have_as_many_steps_in_flight_as_there_are(tmp_path: Path) -> None:
    with closing(executor(tmp_path, Shards(1, 3))) as ranks:
        assert ranks.rules.num_in_flight == 3
        ids = [np.full(2, number, np.int32) for number in range(3)]
        tickets = [ranks.run(batch_of(one)) for one in ids]  # the stand-in counts what waits in it, on every rank
        for one, ticket in zip(ids, tickets, strict=True):
            land(one, ticket, 3)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("fail", "rank 1: the step is bewitched: wait for the moon"),
        ("hang", "rank 1 has got no further with a step"),
        ("stop", "rank 1 has not run"),
        ("kill", "rank 1 was killed by SIGKILL"),
        ("crash", "rank 1: failed inside, IndexError: list index out of range"),
    ][: scaled(2, 5)],  # a rank is killed and stopped below, too
)
def test_one_ranks_end_ends_every_step_in_flight(tmp_path: Path, what: str, told: str) -> None:
    with closing(executor(tmp_path, Shards(2, 1), Mishap(what, 1, 5), stall_s=STALL_S)) as ranks:
        pids = ranks.pids
        drive(ranks, 3)
        ids = np.arange(2, dtype=np.int32)
        flying = [ranks.run(batch_of(ids)), ranks.run(batch_of(ids))]
        began = time.monotonic()
        with suppress(DeviceError):
            land(ids, flying[0], 2)  # which had been launched everywhere
        for refused in (flying[1].wait, lambda: ranks.run(batch_of(ids))):
            with pytest.raises(DeviceError, match=told):
                refused()
        assert time.monotonic() - began < ENDS_IN_S
        assert ranks.trouble is not None
        assert told in ranks.trouble
        assert eventually(lambda: not any(map(is_alive, pids)))


def test_rank_that_stands_still_while_nothing_runs_is_missed(tmp_path: Path) -> None:
    with closing(executor(tmp_path, Shards(2, 1), stall_s=0.3)) as ranks:
        os.kill(ranks.pids[0], signal.SIGSTOP)
        assert eventually(lambda: ranks.trouble is not None)
        assert "rank 1 has not run" in (ranks.trouble or "")


def test_step_that_ctrl_c_cuts_short_is_passed_over(tmp_path: Path) -> None:
    """Whoever waits for a result may be interrupted; a call that only rank 0 leaves out ends the model."""
    with closing(executor(tmp_path, Shards(1, 2))) as ranks:
        ids = np.arange(2, dtype=np.int32)
        interrupted = ranks.run(batch_of(ids))
        with pytest.raises(KeyboardInterrupt):
            ranks.wait(interrupted._number, Interrupted(interrupted._own))
        drive(ranks, 5)
        late = ranks.run(batch_of(ids, 1))
        with pytest.raises(KeyboardInterrupt):
            ranks.sample(late._number, Interrupted(late._own), np.ones((1, 10), np.int32))
        assert "rank 0: a step was interrupted" in (ranks.trouble or "")


def test_rank_0s_own_failure_ends_the_others(tmp_path: Path) -> None:
    with closing(executor(tmp_path, Shards(2, 1), Mishap("fail", 0, 2))) as ranks:
        drive(ranks, 1)
        with pytest.raises(DeviceError, match="rank 0: the step is bewitched"):
            ranks.run(batch_of(np.arange(2, dtype=np.int32)))
        assert eventually(lambda: not any(map(is_alive, ranks.pids)))


@pytest.mark.parametrize("rank", [1, 0][: scaled(1, 2)])
def test_a_rank_that_can_not_start_says_why_in_one_line(
    tmp_path: Path, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    before = children()
    with pytest.raises(DeviceError) as refused:
        executor(tmp_path, Shards(2, 1), Mishap("refuse", rank))
    assert str(refused.value) == f"rank {rank}: the GPU is made of cardboard: buy another"
    assert not caplog.messages, "whoever opens the model tells the same"
    assert eventually(lambda: not children() - before)


def test_rank_that_stands_still_while_it_starts_is_missed(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(DeviceError, match="rank 1 has not run"):
        executor(tmp_path, Shards(2, 1), Mishap("stand", 1), stall_s=0.06)
    assert eventually(lambda: not children() - before)


@pytest.mark.parametrize("seed", range(scaled(4, 20)))
def test_a_rank_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    """Every step is right or refused, and then all are refused, by a line that names the rank."""
    chance = random.Random(seed)
    shards = chance.choice([Shards(2, 1), Shards(1, 2)])
    with closing(executor(tmp_path, shards, stall_s=STALL_S)) as ranks:
        (pid,) = ranks.pids
        how = chance.choice([signal.SIGKILL, signal.SIGSTOP])
        killed_at: list[float] = []

        def kill() -> None:
            killed_at.append(time.monotonic())
            os.kill(pid, how)

        threading.Timer(chance.uniform(0, 0.2), kill).start()
        with pytest.raises(DeviceError, match=r"rank 1 (was killed by SIG|has not run)"):
            drive(ranks, 10**6, seed)
        assert time.monotonic() - killed_at[0] < ENDS_IN_S
        assert eventually(lambda: not is_alive(pid))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM][: scaled(1, 3)])
def test_no_rank_outlives_the_server(tmp_path: Path, how: signal.Signals) -> None:
    """Whether it runs or stands still."""
    command = [sys.executable, "-m", "tests.runtime.ranks_alone", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGSTOP)
        parent.send_signal(how)
        assert eventually(lambda: not any(map(is_alive, pids)))
        _, errors = parent.communicate(timeout=PATIENCE_S)
    assert parent.returncode != 0
    assert "resource_tracker" not in errors


def children() -> set[int]:
    found = Path(f"/proc/self/task/{threading.main_thread().native_id}/children")
    return {int(pid) for pid in found.read_text().split()}
