"""Captured steps: the same bits as eager ones in every legal order, and what happens when something fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from cuda.bindings.driver import CUresult as Status

from ostinato.engines.errors import DeviceError
from ostinato.engines.program import StepShape
from ostinato.runtime.buffers import StepSlot
from ostinato.runtime.cuda import Device, Stream
from ostinato.runtime.graphs import Graphs

from ..sim.driver import SimDriver
from ..sim.toy import SHAPES, ToyStep, expected, random_steps, register_kernels, same, write_files
from ..sim.toy_rank import ToyRank

STEPS = random_steps(11, 8)
DECODE_1, DECODE_2, _, PREFILL = SHAPES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy")
    write_files(path)
    return path


def driver_with(seed: int | None = None) -> SimDriver:
    driver = SimDriver(seed=seed, capacity=1 << 24)
    register_kernels(driver)
    return driver


def test_eager_steps_compute_what_is_expected(folder: Path) -> None:
    rank = ToyRank(driver_with(), folder, captures=False)
    assert same(rank.run(STEPS), expected(STEPS))
    assert rank.driver.calls["cuGraphLaunch"] == 0


def test_replays_equal_eager_steps_bit_for_bit_in_every_order(folder: Path) -> None:
    wanted = ToyRank(driver_with(), folder, captures=False).run(STEPS)
    for seed in range(200):
        rank = ToyRank(driver_with(seed), folder, is_strict=True)
        assert same(rank.run(STEPS), wanted), f"seed {seed}"


def test_many_steps_allocate_nothing_and_launch_one_graph_each(folder: Path) -> None:
    driver = driver_with(1)
    rank = ToyRank(driver, folder, is_strict=True)
    steps = random_steps(2, 200)
    allocations, before = driver.num_allocations, driver.calls.copy()
    assert same(rank.run(steps), expected(steps))
    assert driver.num_allocations == allocations
    made = driver.calls - before
    assert made.keys() == {"cuEventQuery", "cuMemcpyHtoDAsync", "cuGraphLaunch", "cuMemcpyDtoHAsync", "cuEventRecord"}
    assert (made["cuGraphLaunch"], made["cuMemcpyHtoDAsync"], made["cuEventRecord"]) == (200, 200, 400)
    rank.close()
    assert not driver.alive()
    assert not driver.abandoned


class SideRank(ToyRank):
    """Results come down on a stream of their own: two edges are needed, from the step to its download and back."""

    edges: tuple[str, ...] = ("step to download", "download to step")

    def open(self, folder: Path, shapes: Sequence[StepShape], captures: bool, is_strict: bool) -> None:
        self.side: Stream = self.device.stream()
        self.computed, self.downloaded = self.device.event(), self.device.event()
        super().open(folder, shapes, captures, is_strict)

    def start(self, slot: StepSlot, step: ToyStep) -> None:
        inputs = slot.fill(step.shape)
        for name, array in step.inputs.items():
            inputs[name][...] = array
        slot.upload(self.stream, step.shape, step.mask_lines)
        if "download to step" in self.edges:
            self.stream.after(self.downloaded)
        self.graphs.run(step.shape, step.live_tokens)
        self.stream.record(self.computed)
        if "step to download" in self.edges:
            self.side.after(self.computed)
        slot.download(self.side, step.shape)
        self.side.record(self.downloaded)


@pytest.mark.parametrize("missing", ["nothing", *SideRank.edges])
def test_an_event_that_is_missing_between_two_streams_is_seen_in_some_order(folder: Path, missing: str) -> None:
    class Rank(SideRank):
        edges = tuple(edge for edge in SideRank.edges if edge != missing)

    wrong = [seed for seed in range(40) if not same(Rank(driver_with(seed), folder).run(STEPS), expected(STEPS))]
    assert bool(wrong) == (missing != "nothing")


def test_what_is_captured_is_told_largest_first(folder: Path) -> None:
    rank = ToyRank(driver_with(), folder, captures=False)
    rank.device.is_sealed = False
    seen: list[tuple[str, int, int]] = []
    rank.graphs.capture(SHAPES, lambda what, done, total: seen.append((what, done, total)))
    assert [what for what, done, _ in seen if done < 4][::2][:1] == ["capture prefill 8"]
    assert [what for what, _, _ in seen[1::2]] == [
        "capture prefill 8",
        "capture decode 4",
        "capture decode 2",
        "capture decode 1",
    ]
    assert seen[-1][1:] == (4, 4)
    assert rank.graphs.memory.keys() == {shape.key for shape in SHAPES}
    assert all(rank.graphs.memory.values())


def test_coverage_counts_replays_pads_and_misses(folder: Path) -> None:
    rank = ToyRank(driver_with(), folder, captures=False)
    rank.device.is_sealed = False
    rank.graphs.capture([DECODE_2, PREFILL], lambda what, done, total: None)
    for shape, live in ((DECODE_2, 1), (DECODE_2, 2), (PREFILL, 6), (DECODE_1, 1)):
        rank.graphs.run(shape, live)
    coverage = rank.graphs.coverage
    assert coverage.replayed == {"decode 2": 2, "prefill 8": 1}
    assert coverage.padding_share == 1 - 9 / 12
    assert coverage.lines() == [
        "3 of 4 steps replayed, 25.0% padding",
        "replayed decode 2: 2",
        "replayed prefill 8: 1",
        "not replayed decode 1: 1: it was not among the shapes to capture",
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.key)
def test_a_failed_capture_is_named_and_its_steps_run_eagerly(folder: Path, shape: StepShape) -> None:
    driver = driver_with()
    largest_first = sorted(SHAPES, key=lambda one: one.tokens, reverse=True)
    fail_instantiate(driver, largest_first.index(shape))
    rank = ToyRank(driver, folder)
    assert rank.graphs.failures.keys() == {shape.key}
    assert f"the step graph of {shape.key}: cuGraphInstantiate returned" in rank.graphs.failures[shape.key]
    steps = random_steps(3, 20)
    assert same(rank.run(steps), expected(steps))
    counts = rank.graphs.coverage.eager
    assert counts == {(shape.key, rank.graphs.failures[shape.key]): sum(step.shape == shape for step in steps)}
    rank.close()
    assert not driver.alive()


def test_strict_graphs_refuse_decode_steps_that_are_not_captured_and_no_others(folder: Path) -> None:
    driver = driver_with()
    fail_instantiate(driver, 1)
    with pytest.raises(DeviceError, match=r"decode 4 can't be captured, and graphs are strict: .*OUT_OF_MEMORY"):
        ToyRank(driver, folder, is_strict=True)
    assert not driver.alive()
    rank = ToyRank(driver_with(), folder, captures=False, is_strict=True)
    with pytest.raises(DeviceError, match="decode 1 is not captured, and graphs are strict: it was not among"):
        rank.graphs.run(DECODE_1, 1)
    rank.graphs.run(PREFILL, 1)
    rank.stream.wait("the step")


def fail_instantiate(driver: SimDriver, place: int) -> None:
    """Let the place-th capture, from 0, find no memory for its graph."""
    instantiate = driver.cuGraphInstantiate
    calls = iter(range(100))

    def failing(hGraph: object, flags: int) -> tuple[object, ...]:  # noqa: N803
        return (Status.CUDA_ERROR_OUT_OF_MEMORY, None) if next(calls) == place else instantiate(hGraph, flags)

    failing.__name__ = "cuGraphInstantiate"
    driver.cuGraphInstantiate = failing  # type: ignore[method-assign]


def test_a_step_may_be_several_graphs_and_counts_once() -> None:
    driver = SimDriver()
    device = Device(driver=driver, clock=driver.clock.now, sleep=driver.clock.sleep)
    stream, block = device.stream(), device.allocate(8, "test")

    def record(shape: StepShape, part: str, stream: Stream) -> None:
        stream.fill(block.address + 4 * (part == "sampling"), shape.rows, 4)

    graphs = Graphs(stream, record, parts=("forward", "sampling"))
    graphs.capture([DECODE_1, DECODE_2], lambda what, done, total: None)
    stream.fill(block.address, 0, 8)
    graphs.run(DECODE_2, 2)
    stream.wait("forward")
    assert driver.memory.bytes_at(block.address, 8, "test").tolist() == [2] * 4 + [0] * 4
    graphs.run(DECODE_2, 2, "sampling")
    stream.wait("sampling")
    assert driver.memory.bytes_at(block.address, 8, "test").tolist() == [2] * 8
    assert graphs.coverage.replayed == {"decode 2": 1}
    with pytest.raises(AssertionError, match="middle is not a part of a step: forward, sampling"):
        graphs.run(DECODE_2, 2, "middle")
    graphs.close()
    assert not [one for one in driver.alive() if "graph" in one]


def test_a_step_is_captured_whole_or_not_at_all() -> None:
    driver = SimDriver()
    device = Device(driver=driver, clock=driver.clock.now, sleep=driver.clock.sleep)
    stream, block = device.stream(), device.allocate(8, "test")
    fail_instantiate(driver, 1)
    graphs = Graphs(stream, lambda shape, part, stream: stream.fill(block.address, 1, 4), parts=("forward", "sampling"))
    graphs.capture([DECODE_1], lambda what, done, total: None)
    assert graphs.failures.keys() == {"decode 1"}
    assert not graphs.memory
    assert not [one for one in driver.alive() if "graph" in one]


FEW = (DECODE_1, PREFILL)
FEW_STEPS = random_steps(4, 3, FEW)


def live_through(driver: SimDriver, folder: Path) -> list[str]:
    """A rank's whole life; after an error it starts again from what is left. Returns the errors."""
    errors: list[str] = []
    wanted = expected(FEW_STEPS)
    for _ in range(2):
        try:
            rank = ToyRank(driver, folder, shapes=FEW)
        except DeviceError as error:
            errors.append(str(error))
            assert not driver.alive(), "a start that failed keeps nothing"
            continue
        break
    try:
        assert same(rank.run(FEW_STEPS), wanted)
    except DeviceError as error:
        errors.append(str(error))
        rank.device.drain()
        rank.buffers.clear(rank.stream)
        assert same(rank.run(FEW_STEPS), wanted), "the steps after a failed one are right"
    errors += rank.graphs.failures.values()
    for _ in range(2):
        try:
            rank.close()
        except DeviceError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("seed", [None, 1])
def test_a_fault_at_any_call_leaves_nothing_behind_and_the_next_step_right(folder: Path, seed: int | None) -> None:
    driver = driver_with(seed)
    assert live_through(driver, folder) == []
    num_calls, silent = driver.calls.total(), 0
    for number in range(1, num_calls + 1):
        driver = driver_with(seed)
        driver.faults.at[number] = Status.CUDA_ERROR_UNKNOWN
        errors = live_through(driver, folder)
        assert len(errors) <= 1
        silent += not errors
        assert not driver.alive(), f"after a fault in call {number}"
        assert all(one.startswith("module") for one in driver.abandoned), f"after a fault in call {number}"
    assert silent < num_calls / 4, "only what is tried again, while closing, may go unseen"


def test_a_device_that_is_lost_at_any_call_ends_in_an_error_and_closes(folder: Path) -> None:
    driver = driver_with()
    live_through(driver, folder)
    for number in range(1, driver.calls.total() + 1, 7):
        driver = driver_with()
        driver.faults.lost_at = number
        with pytest.raises(DeviceError, match="CUDA_ERROR_DEVICE_UNAVAILABLE"):
            run_and_close(driver, folder)
        assert not driver.alive()


def run_and_close(driver: SimDriver, folder: Path) -> None:
    rank = ToyRank(driver, folder, shapes=FEW)
    try:
        rank.run(FEW_STEPS)
    finally:
        rank.close()
