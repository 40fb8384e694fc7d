"""The bodies of tests/gpu on the simulated device, with kernels interpreted and small sizes: they run, and hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ostinato.engines.program import StepShape
from ostinato.engines.sizes import Limits
from ostinato.plugins.feed_tokens import FORMALS, feed_tokens
from ostinato.plugins.kernel_launch import KernelSpec
from ostinato.plugins.operator_shapes import AttentionShape, SamplingShape
from ostinato.plugins.paged_attention import AttentionAttributes
from ostinato.runtime.cuda import Device
from tests.gpu import measures, step_measures
from tests.gpu.cases import SHORT_CASES, AttentionCase
from tests.gpu.compile_ahead import all_kernels
from tests.gpu.gpu import Gpu
from tests.gpu.kernel_checks import check_attention, check_company, check_feed, check_sampling, check_sampling_company
from tests.gpu.kernel_store import KernelStore, package_of
from tests.gpu.rehearsed import RehearsedGpu
from tests.gpu.replay_checks import check_replay
from tests.gpu.sheet import Sheet
from tests.gpu.stack_checks import check_stack
from tests.gpu.stack_program import TINY_STACK
from tests.interpreter import compiled_form
from tests.scale import scaled
from tests.sim.driver import SimDriver
from tests.sim.kernels import Grid, SimKernel
from tests.sim.memory import DeviceMemory
from tests.sim.toy import write_files


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[RehearsedGpu]:
    """Leaves nothing on the device."""
    found = RehearsedGpu(KernelStore(tmp_path), seed=1)
    yield found
    found.close()
    assert not found.driver.alive()


@pytest.mark.parametrize("case", SHORT_CASES[:: scaled(4, 1)], ids=lambda case: case.name)
def test_attention(gpu: RehearsedGpu, case: AttentionCase) -> None:
    check_attention(gpu, case, 0, ("decode", "prefill"))


def test_company(gpu: RehearsedGpu) -> None:
    check_company(gpu, SHORT_CASES[1])


def test_sampling_and_feeding(gpu: RehearsedGpu) -> None:
    check_sampling(gpu, 97, 0, "bfloat16", 20)
    check_sampling_company(gpu, 97, 7)
    check_feed(gpu, StepShape("prefill", 20, 4))


def test_the_made_up_rank_on_kernels_for_a_gpu(gpu: RehearsedGpu, tmp_path: Path) -> None:
    write_files(tmp_path)
    check_replay(gpu, tmp_path, 1, scaled(8, 40))


def test_a_decoder_with_torch_between_our_kernels(gpu: RehearsedGpu) -> None:
    memory = check_stack(gpu, TINY_STACK, 0, scaled(4, 20))
    assert memory.keys() == {shape.key for shape in TINY_STACK.shapes}


def test_measures_run_and_are_written(gpu: RehearsedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "COLD_BYTES", 1 << 12)
    sheet = Sheet({"name": "Simulated GPU"})
    attributes = AttentionAttributes(2, 1, 16, 0.25)
    shape = AttentionShape(attributes, "float16", "int8", block_size=4, table_width=4, max_rows=2)
    ceiling = measures.copy_ceiling(gpu, sheet, 1 << 12)
    monkeypatch.setattr(gpu, "seconds", lambda record, repeats, captured=True: _once(gpu, record))
    measures.decode_attention(gpu, sheet, shape, 2, 9, ceiling)
    measures.cache_write(gpu, sheet, shape, 5, ceiling)
    plain = AttentionShape(attributes, "float32", "float32", block_size=4, table_width=4, max_rows=2)
    ours = measures.prefill_attention(gpu, sheet, plain, 2, 6)
    measures.torch_prefill(gpu, sheet, plain, 2, 6, ours)
    measures.sampling(gpu, sheet, SamplingShape(97, "float32", 4, 6, 2), 2, "truncated")
    step_measures.launch_cost(gpu, sheet, 2)
    stack = replace(
        TINY_STACK,
        sizes=replace(TINY_STACK.sizes, num_layers=1),
        limits=Limits(8, 2, 2, 16, 32, row_buckets=(2,), token_buckets=(2,)),
    )
    step_measures.upload_cost(gpu, sheet, stack, stack.shapes[0])
    step_measures.step_times(gpu, sheet, stack, context=5, count=2)
    step_measures.overlap(gpu, sheet, stack, context=5, count=2)
    assert {measure.name for measure in sheet.measures} >= {"device copy", "sampling", "graph launch", "step replayed"}
    assert all(measure.value > 0 for measure in sheet.measures)
    path = sheet.write(tmp_path)
    assert path.name.startswith("gpu-simulated-gpu-20")
    assert path.with_suffix(".md").read_text().count("\n| ") == len(sheet.measures) + 1


def _once(gpu: RehearsedGpu, record: object) -> float:
    assert callable(record)
    record(0)
    gpu.stream.wait("what is timed")
    return 1e-3


def test_every_kernel_takes_what_it_is_launched_with() -> None:
    """Names and number of arguments; the compiler sees the rest (`python -m tests.gpu.compile_ahead`)."""
    named = {spec.name: spec for spec in all_kernels()}
    assert len(named) > 100
    for spec in named.values():
        compiled_form(spec, package_of(spec))


class CompiledGpu(Gpu):
    """Everything as on a GPU, compiler and launches too, but that the driver is simulated and FeedTokens its oracle."""

    def __init__(self, store: KernelStore) -> None:
        self.driver = SimDriver()
        super().__init__(store)

    def new_device(self) -> Device:
        return Device(driver=self.driver, clock=self.driver.clock.now, sleep=self.driver.clock.sleep)

    def prepare(self, specs: Iterable[KernelSpec]) -> None:
        wanted = list(specs)
        self.store.add(wanted, "9.0")
        for spec in wanted:
            info = self.store.kernels["sm_90"][spec.name]
            kernel = SimKernel(info.entry, self._feed, len(spec.pointers), info.num_hidden_pointers)
            self.driver.kernels.register(kernel, (self.store.path / "sm_90" / f"{spec.name}.cubin").read_bytes())
        super().prepare(wanted)

    def see(self, sizes: Mapping[int, int]) -> None:
        self.sizes = sizes

    def _feed(self, memory: DeviceMemory, grid: Grid, pointers: tuple[int, ...]) -> None:
        arrays = [memory.view(pointer, "int32", (self.sizes[pointer] // 4,)) for pointer in pointers]
        arrays[0][:] = feed_tokens(dict(zip(FORMALS, arrays, strict=True)))


def test_kernels_are_compiled_once_loaded_and_launched(tmp_path: Path) -> None:
    """For a Hopper GPU; the next store finds the cubin on disk."""
    first = CompiledGpu(KernelStore(tmp_path))
    check_feed(first, StepShape("prefill", 20, 4))
    first.close()
    assert not first.driver.alive()
    (cubin,) = first.store.path.rglob("*.cubin")
    written = cubin.stat().st_mtime_ns
    again = CompiledGpu(KernelStore(tmp_path))
    check_feed(again, StepShape("decode", 3, 3))
    again.close()
    assert again.store.kernels == first.store.kernels
    assert cubin.stat().st_mtime_ns == written
