"""A rank's memory: where everything lies, one copy up and one down, and staging that is not used too early."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings.driver import CUresult as Status
from numpy.typing import NDArray

from ostinato.engines.errors import BundleError, DeviceError
from ostinato.engines.io_table import BIAS_PAD
from ostinato.engines.memory_table import MemoryTable
from ostinato.engines.program import Buffer, KernelCall, Program, StepShape
from ostinato.runtime.buffers import StepBuffers
from ostinato.runtime.cuda import Device, Stream
from ostinato.runtime.device_weights import upload_weights
from ostinato.runtime.state_lines import StateLines
from ostinato.runtime.step_layout import ALIGN, StepLayout, step_layout

from ..sim.driver import SimDriver
from ..sim.toy import (
    LIMITS,
    SHAPES,
    SIZES,
    V,
    W,
    expected,
    random_steps,
    register_kernels,
    same,
    toy_program,
    weights,
    write_files,
)
from ..sim.toy_rank import ToyRank

PREFILL = SHAPES[-1]


def ignore(what: str, done: int, total: int) -> None:
    pass


@pytest.fixture
def driver() -> SimDriver:
    return SimDriver(capacity=1 << 24)


@pytest.fixture
def device(driver: SimDriver) -> Device:
    return Device(driver=driver, clock=driver.clock.now, sleep=driver.clock.sleep)


@pytest.fixture
def layout() -> StepLayout:
    return step_layout(toy_program(), LIMITS, SIZES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy")
    write_files(path)
    return path


def program_of(*buffers: Buffer) -> Program:
    return Program(buffers, (), SHAPES, {}, {})


def test_shapes_are_resolved_to_the_step_and_to_the_largest(layout: StepLayout) -> None:
    shapes = {name: place.shape for one in layout.blocks.values() for name, place in one.places.items()}
    assert shapes["cache.0"] == (LIMITS.num_blocks, 4, 8)
    assert shapes["counts"] == (LIMITS.num_state_lines, V)
    assert shapes["bias_ids"] == (LIMITS.num_state_lines, 1024)
    assert shapes["cut_0"] == (8, 8)
    for shape in SHAPES:
        inputs = {name: place.shape for name, place in layout.inputs[shape.key].places.items()}
        assert inputs["input_ids"] == (shape.tokens,)
        assert inputs["query_starts"] == (shape.rows + 1,)
        assert inputs["allowed"] == (shape.rows, W)


def test_sampled_tokens_lie_at_one_address_for_the_step_that_they_feed(device: Device) -> None:
    feed = KernelCall("feed", "FeedTokens", {"input_ids": "ids", "feed_rows": "rows", "last_tokens": "tokens"})
    names = ("logprobs", "hidden_out", "tokens", "top_ids")  # in any order
    outputs = tuple(Buffer(name, "int32", ("S", "K"), "output") for name in names)
    program = replace(program_of(*outputs), calls=(feed,))
    buffers = StepBuffers(device, step_layout(program, LIMITS, SIZES))
    assert len({buffers.addresses(shape)["tokens"] for shape in SHAPES}) == 1
    assert len({buffers.addresses(shape)["top_ids"] for shape in SHAPES}) > 1
    for other in ("top_ids", "missing"):  # what moves with the shape, or is not there, can't feed a step
        strange = replace(feed, arguments={**feed.arguments, "last_tokens": other})
        with pytest.raises(BundleError, match=f"fed from {other}, which is not first among the outputs: build"):
            step_layout(replace(program, calls=(strange,)), LIMITS, SIZES)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.key)
def test_nothing_overlaps_in_a_step_and_everything_is_aligned(
    device: Device, layout: StepLayout, shape: StepShape
) -> None:
    addresses = StepBuffers(device, layout).addresses(shape)
    assert addresses.keys() == {buffer.name for buffer in toy_program().buffers}
    places = {**layout.inputs[shape.key].places, **layout.outputs[shape.key].places}
    for one in layout.blocks.values():
        places |= one.places
    ends = sorted((addresses[name], addresses[name] + place.num_bytes) for name, place in places.items())
    assert all(start % ALIGN == 0 for start, _ in ends)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


def test_only_inputs_and_outputs_move_with_the_shape(device: Device, layout: StepLayout) -> None:
    buffers = StepBuffers(device, layout)
    first, *others = (buffers.addresses(shape) for shape in SHAPES)
    moving = {buffer.name for buffer in toy_program().buffers if buffer.kind in ("input", "output")}
    assert all(other[name] == first[name] for other in others for name in first.keys() - moving)
    assert list(layout.inputs[PREFILL.key].places)[-1] == "allowed", "masks are what may not go up"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.key)
def test_plain_spans_are_all_inputs_but_masks_and_tables(layout: StepLayout, shape: StepShape) -> None:
    spans = layout.plain_spans(shape.key)
    for name, place in layout.inputs[shape.key].places.items():
        covered = [start <= place.offset and place.end <= end for start, end in spans]
        apart = [place.end <= start or end <= place.offset for start, end in spans]
        assert all(apart) if name in ("block_tables", "allowed") else any(covered)


def test_inputs_go_up_in_one_copy_and_outputs_come_down_in_one(
    driver: SimDriver, device: Device, layout: StepLayout
) -> None:
    buffers, stream = StepBuffers(device, layout), device.stream()
    for shape, mask_lines in itertools.product(SHAPES, (0, 1)):
        slot = buffers.slots[0]
        inputs = slot.fill(shape)
        for number, array in enumerate(inputs.values(), 1):
            array[...] = number
        before = driver.calls.copy()
        slot.upload(stream, shape, mask_lines)
        slot.download(stream, shape)
        made = driver.calls - before
        assert made == {"cuMemcpyHtoDAsync": 1, "cuMemcpyDtoHAsync": 1, "cuEventRecord": 2}
        slot.wait(shape)
        for number, (name, array) in enumerate(inputs.items(), 1):
            there = driver.memory.view(buffers.addresses(shape)[name], "int32", array.shape)
            assert (there[:mask_lines] == number).all() if name == "allowed" else (there == number).all()


def test_masks_may_follow_when_they_are_known(driver: SimDriver, device: Device, layout: StepLayout) -> None:
    buffers, stream = StepBuffers(device, layout), device.stream()
    slot = buffers.slots[0]
    inputs = slot.fill(PREFILL)
    for array in inputs.values():
        array[...] = 1
    slot.upload(stream, PREFILL)
    inputs["allowed"][...] = 5  # while the others may still be on their way
    slot.upload_masks(stream, PREFILL, 0, 3)
    slot.fill(PREFILL)
    masks = driver.memory.view(buffers.addresses(PREFILL)["allowed"], "int32", (4, W))
    assert (masks[:3] == 5).all()
    assert (masks[3] != 5).all()
    with pytest.raises(AssertionError, match="5 mask lines in a step of 4 rows"):
        slot.upload(stream, PREFILL, 5)


def test_what_another_rank_sends_or_takes_does_not_pass_through_the_host(device: Device, driver: SimDriver) -> None:
    buffers = (
        Buffer("hidden_in", "float32", ("T", 8), "input"),
        Buffer("positions", "int32", ("T",), "input"),
        Buffer("hidden_out", "float32", ("T", 8), "output"),
    )
    held = StepBuffers(device, step_layout(program_of(*buffers), LIMITS, SIZES))
    assert held.slots[0].fill(PREFILL).keys() == {"positions"}
    stream = device.stream()
    held.slots[0].upload(stream, PREFILL)
    held.slots[0].download(stream, PREFILL)
    assert not held.slots[0].wait(PREFILL)
    assert driver.calls["cuMemcpyDtoHAsync"] == 0
    assert held.addresses(PREFILL)["hidden_in"] > held.addresses(PREFILL)["positions"]


def test_memory_is_few_blocks_and_is_told_beside_the_plan(
    driver: SimDriver, device: Device, layout: StepLayout
) -> None:
    buffers = StepBuffers(device, layout, engine_bytes=4096)
    assert driver.calls["cuMemAlloc"] == 8
    table = buffers.table
    assert table["engine"] == 4096
    assert table["pinned"] == 2 * (1792 + 272)
    assert sum(count for kind, count in table.items() if kind != "pinned") == driver.memory.used
    plan = MemoryTable(
        weight_bytes=(V * 8 + 8) * 4,
        kv_bytes_per_block=4 * 8 * 4,
        state_bytes=LIMITS.num_state_lines * (V + 1024) * 4,
        scratch_bytes=16,
        activation_bytes={"decode 1": 100, "prefill 8": 4096 + 256 + 12 * 4 * 4},
        graph_reserve_bytes=0,
        num_blocks=LIMITS.num_blocks,
    )
    beside = buffers.beside(plan)
    assert all(0 <= there - planned <= 16 * ALIGN for there, planned in beside.values())
    buffers.close()
    assert driver.memory.used == 0


@pytest.mark.parametrize("place", range(1, 9))
def test_without_room_for_all_nothing_is_kept(
    driver: SimDriver, device: Device, layout: StepLayout, place: int
) -> None:
    kinds = ("cache", "state", "cut", "scratch", "weight", "input", "output")
    wanted = sorted([4096, *map(layout.num_bytes, kinds)], reverse=True)
    driver.memory.capacity = sum(wanted[:place]) - 1
    with pytest.raises(DeviceError, match=r"bytes of GPU memory for \w+ buffers: .*OUT_OF_MEMORY"):
        StepBuffers(device, layout, engine_bytes=4096)
    assert driver.calls["cuMemAlloc"] == place, "the largest come first"
    assert driver.alive() == ["context"]


def test_a_fault_at_any_call_keeps_nothing(driver: SimDriver, device: Device, layout: StepLayout) -> None:
    num_before = driver.calls.total()
    for held in (StepBuffers(device, layout), StateLines(device, StepBuffers(device, layout))):
        held.close()
    num_calls = driver.calls.total() - num_before
    for number in range(1, num_calls + 1):
        alive = len(driver.alive())
        driver.faults.at = {driver.calls.total() + number: Status.CUDA_ERROR_UNKNOWN}
        buffers = lines = None
        try:
            buffers = StepBuffers(device, layout)
            alive = len(driver.alive())
            lines = StateLines(device, buffers)
        except DeviceError:
            assert len(driver.alive()) == alive, f"call {number}"
        driver.faults.at = {}
        for made in (lines, buffers):
            if made is not None:
                made.close()


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        (Buffer("x", "float32", ("Q",), "cut"), "x has size Q"),
        (Buffer("x", "float4", ("T",), "cut"), "x is of type float4"),
        (Buffer("x", "float32", (4,), "weight", 100), "x is not at a multiple of 256 bytes"),
    ],
)
def test_a_program_of_another_version_is_refused(buffer: Buffer, said: str) -> None:
    with pytest.raises(BundleError, match=said):
        step_layout(program_of(buffer), LIMITS, SIZES)


@pytest.mark.parametrize("chunk", [100, 256, 1 << 20])
def test_weights_lie_where_the_program_says(
    driver: SimDriver, device: Device, layout: StepLayout, folder: Path, chunk: int
) -> None:
    buffers, seen = StepBuffers(device, layout), []
    upload_weights(
        folder / "weights.bin", buffers, device.stream(), lambda _, done, total: seen.append((done, total)), chunk
    )
    for name, array in weights().items():
        there = driver.memory.view(buffers.addresses(PREFILL)[name], "float32", array.shape)
        assert np.array_equal(there, array)
    assert seen[-1][0] == seen[-1][1]
    assert not [one for one in driver.alive() if "pinned" in one][len(buffers.slots) :], "staging is given back"


def test_weights_that_are_cut_short_or_missing_are_refused(device: Device, layout: StepLayout, tmp_path: Path) -> None:
    buffers, stream, path = StepBuffers(device, layout), device.stream(), tmp_path / "weights.bin"
    with pytest.raises(BundleError, match=r"weights\.bin can't be read \(No such file"):
        upload_weights(path, buffers, stream, ignore)
    path.write_bytes(bytes(1000))
    with pytest.raises(BundleError, match=r"weights\.bin ends at 1000 of 2080 bytes: copy the bundle again"):
        upload_weights(path, buffers, stream, ignore, 300)


def counts_of(driver: SimDriver, buffers: StepBuffers) -> NDArray[Any]:
    return driver.memory.view(buffers.addresses(PREFILL)["counts"], "int32", (LIMITS.num_state_lines, V))


def write_lines(stream: Stream, lines: StateLines) -> None:
    for line in (1, 2, 4, 3):
        array = np.full(V, line, np.int32)
        lines.write(stream, line, {"counts": array, "bias_ids": np.full(1024, line, np.int32)})
        array[:] = -1  # it may be reused at once


def test_state_lines_are_written_through_few_staged_ones(driver: SimDriver, device: Device, layout: StepLayout) -> None:
    buffers, stream = StepBuffers(device, layout), device.stream()
    buffers.clear(stream)
    lines = StateLines(device, buffers, 2)
    write_lines(stream, lines)
    stream.wait("the lines")
    assert (counts_of(driver, buffers) == np.array([0, 1, 2, 3, 4, 0])[:, None]).all(), "the last is never written"
    bias_ids = driver.memory.view(buffers.addresses(PREFILL)["bias_ids"], "int32", (6, 1024))
    assert bias_ids[:, 0].tolist() == [BIAS_PAD, 1, 2, 3, 4, BIAS_PAD]
    with pytest.raises(AssertionError, match="line 0 is for pads"):
        lines.write(stream, 0, {})


def run_with_one_slot(driver: SimDriver, folder: Path, waits: bool) -> bool:
    """Whether ten steps through a single slot, its results read in time, are right."""
    steps = random_steps(5, 10)
    rank = ToyRank(driver, folder)
    slot = rank.buffers.slots[0]
    right = []
    for step, wanted, after in zip(steps, expected(steps), [*steps[1:], steps[0]], strict=True):
        rank.start(slot, step)
        if not waits:  # the bug: the next step's inputs are written before this step's have gone up
            for name, array in slot._inputs[after.shape.key].items():
                array[...] = after.inputs[name]
        right.append(same([rank.finish(slot, step)], [wanted]))
    return all(right)


def test_a_staging_block_that_is_overwritten_too_early_is_seen(folder: Path) -> None:
    for waits in (True, False):
        driver = SimDriver(capacity=1 << 24)
        register_kernels(driver)
        if waits:
            assert run_with_one_slot(driver, folder, waits)
        else:
            with pytest.raises((AssertionError, IndexError)):
                assert run_with_one_slot(driver, folder, waits)


def test_a_slot_is_filled_only_when_its_upload_has_run(driver: SimDriver, device: Device, layout: StepLayout) -> None:
    buffers, stream = StepBuffers(device, layout), device.stream()
    slot = buffers.slots[0]
    slot.fill(PREFILL)["input_ids"][...] = 1
    slot.upload(stream, PREFILL)
    slot.fill(PREFILL)["input_ids"][...] = 2
    assert (driver.memory.view(buffers.addresses(PREFILL)["input_ids"], "int32", (8,)) == 1).all()
