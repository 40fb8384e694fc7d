"""What a step costs around its kernels: graph launches, the one copy up, replay against eager, overlap (in tests)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from ostinato.engines.program import StepShape
from ostinato.runtime.buffers import StepBuffers
from ostinato.runtime.capture import capture
from ostinato.runtime.step_layout import step_layout

from .cases import nothing_launch
from .gpu import Gpu
from .sheet import Sheet
from .stack_program import StackSizes, stack_program
from .stack_rank import StackRank
from .stack_steps import StackStep, full_step

HOST_WORK_S = 300e-6  # in place of planning, packing and committing a step


def launch_cost(gpu: Gpu, sheet: Sheet, num_nodes: int) -> None:
    """Host time of launching a graph of kernels that do nothing, and device time of running it."""
    launch = nothing_launch()
    gpu.prepare([launch.kernel])
    out = gpu.device.allocate(256, "nothing")
    gpu.see({out.address: out.num_bytes})
    graph = capture(gpu.stream, lambda _: gpu.launch([launch] * num_nodes, {"out": out.address}), "a measure")
    graph.launch(gpu.stream)
    gpu.stream.wait("a warm-up")
    host = _host_seconds(gpu, lambda: graph.launch(gpu.stream))
    device = statistics.median(gpu.elapsed(lambda: graph.launch(gpu.stream)) for _ in range(9))
    graph.close()
    out.close()
    sheet.add("graph launch", host * 1e6, "us host", kernels=num_nodes, device_us=device * 1e6)


def upload_cost(gpu: Gpu, sheet: Sheet, stack: StackSizes, shape: StepShape) -> None:
    """A step's inputs in one copy, as slots do it, beside a copy for each tensor."""
    layout = step_layout(stack_program(stack), stack.limits, stack.sizes)
    buffers = StepBuffers(gpu.device, layout, num_slots=1)
    slot, inputs, addresses = buffers.slots[0], layout.inputs[shape.key].places, buffers.addresses(shape)
    pinned = gpu.device.allocate_pinned(layout.uploads[shape.key], "a measure")

    def one_by_one() -> None:
        for name, place in inputs.items():
            if name != "allowed":  # no row has a mask here
                gpu.stream.upload(addresses[name], pinned.address + place.offset, place.num_bytes)

    def at_once() -> None:
        slot.upload(gpu.stream, shape)

    for name, run in (("upload at once", at_once), ("upload one by one", one_by_one)):
        run()
        gpu.stream.wait("a warm-up")
        host = _host_seconds(gpu, run)
        device = statistics.median(gpu.elapsed(run) for _ in range(9))
        sheet.add(name, device * 1e6, "us device", step=shape.key, host_us=host * 1e6,
                  bytes=layout.upload_bytes(shape.key, 0), tensors=len(inputs) - 1)  # fmt: skip
    pinned.close()
    buffers.close()


def step_times(gpu: Gpu, sheet: Sheet, stack: StackSizes, context: int, count: int) -> None:
    """Wall time of one step, launched and waited for: eager, then replayed; and what the graphs take."""
    taken: dict[str, dict[str, float]] = {}
    for kind, captures in (("eager", False), ("replayed", True)):
        rank = StackRank(gpu, stack, captures=captures, num_slots=1)
        for shape in stack.shapes:
            room = 0 if shape.phase == "prefill" else context
            steps = [full_step(stack, shape, room)] * count
            taken.setdefault(shape.key, {})[kind] = _serial_seconds(rank, steps)
        weight_bytes = rank.weight_bytes
        memory = dict(rank.graphs.memory)
        rank.close()
    for key, both in taken.items():
        sheet.add("step replayed", both["replayed"] * 1e6, "us", step=key, eager_us=both["eager"] * 1e6,
                  weight_bytes=weight_bytes, graph_bytes=memory[key])  # fmt: skip


def overlap(gpu: Gpu, sheet: Sheet, stack: StackSizes, context: int, count: int) -> None:
    """Steps a second with one and with two in flight, while the host has work of its own for each."""
    for shape in (shape for shape in stack.shapes if shape.phase == "decode"):
        steps = [full_step(stack, shape, context)] * count
        taken = {}
        for num_slots in (1, 2):
            rank = StackRank(gpu, stack, captures=True, num_slots=num_slots)
            taken[num_slots] = _flying_seconds(rank, steps, num_slots)
            rank.close()
        sheet.add("step, two in flight", taken[2] * 1e6, "us", step=shape.key, one_in_flight_us=taken[1] * 1e6,
                  host_work_us=HOST_WORK_S * 1e6)  # fmt: skip


def _serial_seconds(rank: StackRank, steps: Sequence[StackStep]) -> float:
    """Median of all but the first."""
    taken = []
    for number in range(len(steps)):
        began = time.perf_counter()
        rank.start(steps, number)
        rank.finish(steps, number)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def _flying_seconds(rank: StackRank, steps: Sequence[StackStep], num_in_flight: int) -> float:
    """Mean over all steps; the host's work for a step is done before it is launched."""
    began = time.perf_counter()
    for number in range(len(steps)):
        if number >= num_in_flight:
            rank.finish(steps, number - num_in_flight)
        until = time.perf_counter() + HOST_WORK_S
        while time.perf_counter() < until:
            pass
        rank.start(steps, number)
    for number in range(max(0, len(steps) - num_in_flight), len(steps)):
        rank.finish(steps, number)
    return (time.perf_counter() - began) / len(steps)


def _host_seconds(gpu: Gpu, run: Callable[[], None]) -> float:
    """Median of 50, never more than ten ahead of the device."""
    taken = []
    for number in range(50):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
        if number % 10 == 9:
            gpu.stream.wait("what is timed")
    return statistics.median(taken)
