"""The executor of a GPU on the simulated device: the right tokens, whatever the order, the pads, the thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.engines.errors import DeviceError
from ostinato.engines.sizes import Limits
from ostinato.plugins.sampling_rows import Sampled
from ostinato.runtime.cuda_executor import CudaExecutor, CudaTicket
from ostinato.runtime.request import Event, Request, SamplingParams
from tests.bundles import random_prompts
from tests.scale import scaled
from tests.sim.sim_bundle import simulated
from tests.sim.standin_builds import TINY_LIMITS, tiny_bundle
from tests.sim_desk import Parity, SimDesk, open_desk, silent, sim_desk
from tests.tiny import VOCAB_SIZE, tiny_model

TARGETS = ("rtx", "trt")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3)
PROMPTS = random_prompts(3, [3, 9, 1, 17, 30, 70, 5, 12])


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {target: tmp_path_factory.mktemp(target) for target in TARGETS}
    for target, folder in folders.items():
        tiny_bundle(folder, target)
    return {target: folder / "bundle" for target, folder in folders.items()}


@pytest.fixture(params=TARGETS)
def path(request: pytest.FixtureRequest, bundles: dict[str, Path]) -> Path:
    return bundles[request.param]


@pytest.fixture(scope="module")
def reference() -> Iterator[Callable[..., list[int]]]:
    """Greedy tokens by transformers in float32; `legal` says which tokens may come at an output's place."""
    model = tiny_model("llama")
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def greedy(prompt: Sequence[int], count: int, legal: Callable[[int], Any] = lambda place: slice(None)) -> list[int]:
        ids = list(prompt)
        for place in range(count):
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0, -1].numpy()
            masked = np.full_like(logits, -np.inf)
            masked[legal(place)] = logits[legal(place)]
            ids.append(int(masked.argmax()))
        return ids[len(prompt) :]

    yield greedy
    torch.set_num_threads(before)


def test_tokens_are_those_of_transformers_and_nothing_is_allocated(
    path: Path, reference: Callable[..., list[int]]
) -> None:
    rank = simulated(path)
    with sim_desk(rank) as desk:
        before = rank.driver.num_allocations
        found = desk.tokens(PROMPTS, GREEDY)
        assert rank.driver.num_allocations == before
        coverage = desk.executor.coverage
        assert not coverage.eager
        assert coverage.steps("decode")[0] > 0 < coverage.steps("prefill")[0]
        assert set(coverage.graph_bytes) == {shape.key for shape in rank.program.step_shapes}
    assert found == [reference(prompt, 6) for prompt in PROMPTS]


def test_masks_that_come_late_are_obeyed(path: Path, reference: Callable[..., list[int]]) -> None:
    """Guided rows among others: what they may say next hangs on a token that is still in flight."""
    with sim_desk(simulated(path, seed=5)) as desk:
        requests = desk.requests(PROMPTS[:5], GREEDY)
        for request in requests[::2]:
            request.guide = Parity()
        events = desk.run(requests)
    assert not [event.error for event in events if event.error is not None]
    for place, request in enumerate(requests):
        found = request.tokens[request.num_prompt :]
        legal = (lambda at: slice(at % 2, None, 2)) if place % 2 == 0 else (lambda at: slice(None))
        assert found == reference(PROMPTS[place], 6, legal)


def outcome(desk: SimDesk, prompts: Sequence[Sequence[int]], first_id: int) -> dict[int, list[Any]]:
    """Tokens and logprobs by request, as they are."""
    return by_request(desk.run(desk.requests(prompts, GREEDY, first_id)), first_id)


def by_request(events: Sequence[Event], first_id: int) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for event in events:
        assert event.error is None
        assert event.logprob is not None
        found.setdefault(event.request_id - first_id, []).append((event.token_id, event.logprob.logprob))
    return found


def cache_blocks(desk: SimDesk) -> list[np.ndarray[Any, Any]]:
    """Every cache of the device, [num_blocks, bytes]."""
    buffers = desk.executor._rank.buffers
    places = buffers.layout.blocks["cache"].places.values()
    start = buffers.address("cache")
    return [
        desk.rank.driver.memory.bytes_at(start + place.offset, place.num_bytes, "the test").reshape(place.shape[0], -1)
        for place in places
    ]


@pytest.mark.parametrize("count", range(1, len(PROMPTS) + 1))
def test_pads_change_no_row_and_no_block(bundles: dict[str, Path], count: int) -> None:
    """Every live count over all buckets gives each row what it has alone; blocks of no request keep their bytes.

    Logprobs are compared to what float32 leaves: engines sum in another order in a larger bucket.
    """
    rank = simulated(bundles["rtx"])
    with sim_desk(rank) as desk:
        alone = [outcome(desk, [prompt], 0)[0] for prompt in PROMPTS[:count]]
        seen: set[int] = set()
        requests = desk.requests(PROMPTS[:count], GREEDY, 100)
        caches = cache_blocks(desk)
        poison = [cache.copy() for cache in caches]
        for request in requests:
            desk.loop.submit(request)
        events: list[Event] = []
        for some in desk.loop.run_until_idle():
            seen |= {block for request in requests for block in request.blocks}
            events += some
        found = by_request(events, 100)
        untouched = sorted(set(range(1, len(caches[0]))) - seen)
        assert untouched
        for cache, before in zip(caches, poison, strict=True):
            assert (cache[untouched] == before[untouched]).all()
    for place, wanted in enumerate(alone):
        assert [token for token, _ in found[place]] == [token for token, _ in wanted]
        np.testing.assert_allclose([one for _, one in found[place]], [one for _, one in wanted], rtol=1e-5)


@pytest.fixture(scope="module")
def in_order(bundles: dict[str, Path]) -> list[list[int]]:
    with sim_desk(simulated(bundles["rtx"])) as desk:
        return desk.tokens(PROMPTS, GREEDY)


@pytest.mark.parametrize("seed", range(scaled(4, 200)))
def test_any_legal_order_gives_the_same(bundles: dict[str, Path], in_order: list[list[int]], seed: int) -> None:
    """The device runs work as early or late as it may, and host memory is read when a copy runs."""
    with sim_desk(simulated(bundles["rtx"], seed=seed)) as desk:
        assert desk.tokens(PROMPTS, GREEDY) == in_order


def test_the_second_step_is_launched_before_the_first_is_waited_for(
    bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(name: str) -> None:
        plain = getattr(CudaExecutor, name)

        def call(*given: Any) -> Any:
            order.append(name)
            return plain(*given)

        monkeypatch.setattr(CudaExecutor, name, call)

    with sim_desk(simulated(bundles["rtx"])) as desk:
        noted("run")
        noted("finish")
        desk.tokens(PROMPTS[:2], GREEDY)
    assert order[:5] == ["run", "run", "finish", "run", "finish"]


def test_another_thread_may_run_and_a_third_close(bundles: dict[str, Path]) -> None:
    rank = simulated(bundles["rtx"])
    with sim_desk(rank) as desk:
        found: list[list[list[int]]] = []
        for _ in range(2):
            thread = threading.Thread(target=lambda: found.append(desk.tokens(PROMPTS[:3], GREEDY)))
            thread.start()
            thread.join()
        assert found[0] == found[1]
        closer = threading.Thread(target=desk.executor.close)
        closer.start()
        closer.join()
        assert rank.driver.alive() == []


def test_smaller_limits_take_less_and_give_the_same(bundles: dict[str, Path]) -> None:
    built = TINY_LIMITS
    small = Limits(built.block_size, 3, 16, 40, 80, (1, 2, 3), (1, 2, 4, 8, 16))
    with sim_desk(simulated(bundles["rtx"])) as desk:
        wanted = desk.tokens(PROMPTS[:5], GREEDY)
        whole = desk.executor._rank.buffers.table
    with sim_desk(simulated(bundles["rtx"], limits=Limits(8, 8, 64, 40, 80, (1, 8), (64,))), limits=small) as desk:
        assert desk.tokens(PROMPTS[:5], GREEDY) == wanted
        assert set(desk.executor.coverage.graph_bytes) == {"decode 1", "decode 2", "decode 4", "prefill 16"}
        table = desk.executor._rank.buffers.table
        assert table["cache"] < whole["cache"]
        assert table["cut"] < whole["cut"]


def test_a_token_out_of_the_vocabulary_is_never_served(
    bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = CudaExecutor.finish

    def spoiled(executor: CudaExecutor, ticket: CudaTicket) -> Sampled:
        ticket.slot.wait(ticket.shape)["tokens"][0] = VOCAB_SIZE
        monkeypatch.undo()
        return finish(executor, ticket)

    with sim_desk(simulated(bundles["rtx"])) as desk:
        monkeypatch.setattr(CudaExecutor, "finish", spoiled)
        events = desk.run(desk.requests(PROMPTS[:2], GREEDY))
        errors = [str(event.error) for event in events if event.error is not None]
        assert len(errors) == 2
        assert all("sampled token 320, wanted are -1 to 319" in error for error in errors)
        assert desk.executor.trouble is None
        assert all(desk.tokens(PROMPTS[:2], GREEDY))


def test_operators_inside_an_engine_are_made_known_before_it_is_loaded(
    bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the real library's registry, to launch this rank's own kernels; they are held as long as the engines are."""
    rank = simulated(bundles["trt"])
    known: list[Any] = []

    def register(registry: Any, launcher: Any) -> tuple[str, ...]:
        assert not rank.driver.calls["deserialize_cuda_engine"]
        known.extend((registry, launcher))
        return ("a creator",)

    room = ModuleType("ostinato.plugins.plugin_registry")
    monkeypatch.setattr(room, "register_plugins", register, raising=False)
    monkeypatch.setitem(sys.modules, room.__name__, room)
    monkeypatch.setattr(rank.tensorrt, "get_plugin_registry", lambda: "the registry", raising=False)
    monkeypatch.setitem(sys.modules, "tensorrt", rank.tensorrt)
    desk = open_desk(rank, libraries=replace(rank.libraries(), tensorrt=None))
    assert known == ["the registry", desk.executor._rank._cubins]
    assert desk.executor._rank._creators == ("a creator",)
    desk.executor.close()


def test_a_step_that_fits_no_shape_is_refused(bundles: dict[str, Path]) -> None:
    rank = simulated(bundles["rtx"])
    limits = Limits(8, 2, 16, 96, 512, (1, 2), (16,))
    executor = CudaExecutor(rank.bundle, limits, libraries=rank.libraries(), progress=silent)
    with sim_desk(simulated(bundles["rtx"])) as larger:
        (batch,) = _batches(larger, larger.requests(PROMPTS[5:6], GREEDY))
    with pytest.raises(DeviceError, match="a step of 1 rows with 64 tokens, 0 of them sampled, fits none of decode 1"):
        executor.run(batch)
    executor.close()


def _batches(desk: SimDesk, requests: Sequence[Request]) -> list[Any]:
    """The first batch of a desk, not run."""
    for request in requests:
        desk.loop.scheduler.submit(request)
    plan = desk.loop.scheduler.plan()
    assert plan is not None
    return [desk.loop._packer.pack(plan)]
