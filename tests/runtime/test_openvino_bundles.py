"""Real bundles of tiny random checkpoints through the runtime: right, the same in any batch, warm, and failing well."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from numpy.typing import NDArray

from ostinato.engines.errors import BundleError, DeviceError
from ostinato.engines.sizes import Limits
from ostinato.runtime import LLM, Choice, Completion, RuntimeConfig, SamplingParams
from ostinato.runtime.openvino_padding import padded
from ostinato.runtime.request import Request
from tests.bundles import (
    BLOCK_SIZE,
    LIMITS,
    MODELS,
    NUM_BYTES,
    Bench,
    Bundles,
    bench,
    random_prompts,
)
from tests.fakes import make_request
from tests.scale import only_in_a_soak, scaled

pytestmark = pytest.mark.xdist_group("tiny bundles")  # they are built once, in one process

NUM_TOKENS = 32
NUM_REQUESTS = scaled(120, 200)
LLAMA = "llama tied"
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
LOGPROB_ROUNDING = 5e-5  # between a token computed in a prompt's chunk and alone, in float32


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    return Bundles(tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="module")
def llama(bundles: Bundles) -> Path:
    return bundles.bundle(LLAMA)


def _open(path: Path, **choices: Any) -> LLM:
    return LLM(path, RuntimeConfig(num_threads=2, **choices), progress=False)


def _prompts() -> list[list[int]]:
    """Eight; three of them begin alike, two full blocks long."""
    *plain, shared = random_prompts(5, (1, 2, 31, 33, 90, 70))
    return [*plain, *(shared + tail for tail in random_prompts(6, (1, 5, 40)))]


SCHEDULES = (  # rows, tokens of a step, prefix cache
    (8, 128, False),  # prompts whole, in batches of 8
    (8, 128, True),
    (1, 128, False),  # alone
    (8, 32, True),  # in chunks
    (7, 7, False),
)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(bundles: Bundles, name: str) -> None:
    path = bundles.bundle(name)
    wanted = [bundles.greedy(name, prompt, NUM_TOKENS) for prompt in _prompts()]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted), "the model does not look at its prompt"
    for max_rows, max_step_tokens, prefix_cache in SCHEDULES:
        with _open(path, max_rows=max_rows, max_step_tokens=max_step_tokens, prefix_cache=prefix_cache) as llm:
            if prefix_cache:
                llm.generate(_prompts()[-1:], replace(GREEDY, max_tokens=1))  # fills it
            given = llm.generate(_prompts(), GREEDY)
        found = [list(completion.choices[0].token_ids) for completion in given]
        assert found == wanted, f"{max_rows} rows, {max_step_tokens} tokens, prefix cache {prefix_cache}"
        assert sum(completion.num_cached for completion in given) == (64 * 2 + 96 if prefix_cache else 0)


def _mixed_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """The same every time: a third share a prefix, a quarter live through three blocks."""
    rng = random.Random(3)
    prefixes = random_prompts(4, (70, 70, 70, 70))
    prompts, params = [], []
    for number in range(NUM_REQUESTS):
        shared = rng.choice(prefixes)[: rng.randint(32, 70)] if rng.random() < 0.35 else []
        prompts.append(shared + rng.choices(range(NUM_BYTES), k=rng.randint(1, 30)))
        is_long = not shared and rng.random() < 0.4
        params.append(
            SamplingParams(
                temperature=rng.choice([0.0, 0.8]),
                top_p=rng.choice([1.0, 0.9]),
                top_k=rng.choice([0, 20]),
                repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
                presence_penalty=rng.choice([0.0, 0.5]),
                frequency_penalty=rng.choice([0.0, 0.0, 0.3]),
                stop_token_ids=rng.choice([(), tuple(range(0, 320, 16))]),
                min_tokens=50 if is_long else rng.choice([0, 8]),
                max_tokens=rng.randint(60, 90) if is_long else rng.randint(8, 20),
                seed=number,
                logprobs=rng.choice([None, 0, 3]),
            )
        )
    return prompts, params


@cache
def _answers_alone(path: Path) -> list[Choice]:
    with _open(path, max_rows=1, prefix_cache=False) as llm:
        return [llm.generate([prompt], one)[0].choices[0] for prompt, one in zip(*_mixed_requests(), strict=True)]


def _check_answers(path: Path, given: Sequence[Completion], order: Sequence[int]) -> None:
    for number, completion in zip(order, given, strict=True):
        wanted, (found,) = _answers_alone(path)[number], completion.choices
        assert found.token_ids == wanted.token_ids, f"request {number} differs"
        assert (found.finish_reason, found.text) == (wanted.finish_reason, wanted.text)
        assert len(found.logprobs) == len(wanted.logprobs)
        for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
            assert abs(one.logprob - other.logprob) < LOGPROB_ROUNDING


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(
    ("max_rows", "max_blocks"), [(2, None), pytest.param(7, None, marks=only_in_a_soak), (32, None), (7, 5)]
)
def test_seeded_requests_do_not_see_their_neighbours(
    llama: Path, max_rows: int, max_blocks: int | None, prefix_cache: bool
) -> None:
    prompts, params = _mixed_requests()
    order = random.Random(max_rows).sample(range(NUM_REQUESTS), NUM_REQUESTS)
    kv_tokens = None if max_blocks is None else max_blocks * BLOCK_SIZE
    with _open(llama, max_rows=max_rows, prefix_cache=prefix_cache, kv_tokens=kv_tokens) as llm:
        given = llm.generate([prompts[number] for number in order], [params[number] for number in order])
        scheduler = llm._shop.loop.scheduler
        assert (scheduler.num_preemptions >= scaled(10, 20)) == (max_blocks is not None)
        assert (scheduler.num_prefix_hits > 0) == prefix_cache
    _check_answers(llama, given, order)


def test_the_mixed_requests_end_in_both_ways(llama: Path) -> None:
    finishes = [choice.finish_reason for choice in _answers_alone(llama)]
    assert min(finishes.count("stop"), finishes.count("length")) >= 5


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_a_row_alone_has_the_very_logprobs_of_the_same_row_in_a_batch(bundles: Bundles, precision: str) -> None:
    """Contexts of several blocks, where the order of a sum shows."""
    prompts = random_prompts(8, (1, 2, 9, 3, 17, 25, 33, 37))
    with _open(bundles.bundle(LLAMA, precision), max_rows=8, prefix_cache=False) as llm:
        alone = [llm.generate([prompt], GREEDY)[0].choices for prompt in prompts]
        together = [completion.choices for completion in llm.generate(prompts, GREEDY)]
        three = [completion.choices for completion in llm.generate(prompts[-3:], GREEDY)]
    assert together == alone
    assert three == alone[-3:]


def _greedy_request(number: int, prompt: Sequence[int], limits: Limits, max_tokens: int) -> Request:
    return make_request(number, prompt, replace(GREEDY, max_tokens=max_tokens), limits)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_no_step_has_a_shape_that_was_not_warmed(bundles: Bundles, precision: str) -> None:
    """OpenVINO compiles kernels by shape, so a shape that was seen is a shape that is warm."""
    limits = Limits(BLOCK_SIZE, 11, 100, 200, 6400, (1, 2, 4, 8, 11), (1, 2, 4, 8, 16, 32, 64, 100))
    with bench(bundles.bundle(LLAMA, precision), limits) as parts:
        warm = parts.shapes()
        number = 0
        for count in range(1, limits.max_rows + 1):  # decode steps of every row count
            for prompt in random_prompts(count, (3,) * count):
                parts.submit(_greedy_request(number, prompt, limits, 3))
                number += 1
            parts.run()
        for length in (*range(1, 20), *range(20, 199, 11)):  # chunks of every bucket, beside rows that decode
            for prompt in random_prompts(length, (length, *(2,) * (length % 8))):
                parts.submit(_greedy_request(number, prompt, limits, 2 if len(prompt) == length else 6))
                number += 1
            parts.run()
        assert parts.shapes() - warm == set()


def _start_rows(parts: Bench, limits: Limits, lengths: Sequence[int]) -> None:
    """Requests of those prompt lengths, up to the step in which all of them decode."""
    requests = [_greedy_request(number, prompt, limits, 20) for number, prompt in enumerate(random_prompts(9, lengths))]
    parts.submit(*requests)
    parts.step_until(lambda: all(request.num_output for request in requests))


PADDED = {
    "pad rows": Limits(BLOCK_SIZE, 8, 128, 96, 960, (8,), (8, 128)),
    "tokens of no row": Limits(BLOCK_SIZE, 5, 128, 96, 960, (1, 2, 3, 4, 5), (8, 128)),
    "both": Limits(BLOCK_SIZE, 8, 128, 96, 960, (1, 6, 8), (1, 12, 128)),
}


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("name", PADDED)
def test_pads_write_the_null_block_and_nothing_else(bundles: Bundles, name: str, precision: str) -> None:
    limits = PADDED[name]
    with bench(bundles.bundle(LLAMA, precision), limits) as parts:
        for data in parts.caches().values():  # memory that was used before may hold what is to be written
            data.view(np.uint32)[...] = 0x5A5A5A5A
        _start_rows(parts, limits, (40, 3, 31, 32, 9))
        before = {cache_name: data.copy() for cache_name, data in parts.caches().items()}
        plan = parts.scheduler.plan()
        assert plan is not None
        batch = parts.packer.pack(plan)
        assert batch.num_tokens == 5 < len(padded(batch, limits).input_ids)
        sampled = parts.executor.run(batch).wait()
        parts.scheduler.commit(plan, sampled)
        live = {divmod(slot, BLOCK_SIZE) for slot in batch.slot_mapping[:5].tolist()}
        assert len(before) == 4
        for cache_name, data in parts.caches().items():
            changed = (data.view(np.uint32) != before[cache_name].view(np.uint32)).any(axis=(1, 3))
            assert {(block, slot) for block, slot in np.argwhere(changed).tolist() if block} == live, cache_name


@pytest.mark.parametrize("name", PADDED)
def test_padded_steps_give_the_very_logits_of_unpadded_ones(llama: Path, name: str) -> None:
    """Even where every slot that no token was written to holds what is not a number."""
    seen: list[list[NDArray[np.float32]]] = []
    exact = replace(PADDED[name], row_buckets=tuple(range(1, PADDED[name].max_rows + 1)))
    exact = replace(exact, token_buckets=tuple(range(1, exact.max_step_tokens + 1)))
    for limits in (PADDED[name], exact):
        with bench(llama, limits) as parts:
            for data in parts.caches().values():
                data[...] = np.nan if limits is exact else 0.5
            _start_rows(parts, limits, (40, 3, 31, 32, 9))
            parts.run()
            seen.append(parts.logits)
    assert [logits.shape for logits in seen[0]] == [logits.shape for logits in seen[1]]
    for first, second in zip(*seen, strict=True):
        np.testing.assert_array_equal(first, second)


def _has_bfloat16() -> bool:
    return "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


@pytest.mark.parametrize(("weights", "kv_cache"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_bfloat16_is_refused_where_the_cpu_lacks_it(bundles: Bundles, weights: str, kv_cache: str) -> None:
    path = bundles.bundle(LLAMA, weights, kv_cache)
    if _has_bfloat16():
        pytest.skip("this CPU has bfloat16")
    with pytest.raises(BundleError, match=r"bfloat16.* no instructions for: build with --set weights=int8"):
        _open(path)


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    whole: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return whole


def _text_logprobs(path: Path) -> NDArray[np.float64]:
    """The next-token distribution after every token of a few texts, [tokens, V], in chunks beside each other."""
    seen: list[NDArray[np.float64]] = []
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    with LLM(
        path,
        RuntimeConfig(num_threads=2, max_rows=16, max_step_tokens=32),
        progress=False,
        observe_logits=lambda logits: seen.append(_log_softmax(logits)),
    ) as llm:
        for prompt in random_prompts(12, (100, 64, 37)):
            llm.generate([prompt], scoring)
    return np.concatenate(seen)


@pytest.mark.parametrize(
    ("weights", "kv_cache", "bound"),
    [
        ("float32", "float16", 1e-5),
        ("float32", "int8", 1e-2),
        ("int8", "float32", 1e-2),
        ("int8", "int8", 1e-2),
        ("int4", "float32", 5e-1),  # 4 bits of weights that are all noise
    ],
)
def test_packed_weights_and_caches_stay_close_to_float32(
    bundles: Bundles, llama: Path, weights: str, kv_cache: str, bound: float
) -> None:
    wanted, given = _text_logprobs(llama), _text_logprobs(bundles.bundle(LLAMA, weights, kv_cache))
    assert wanted.shape == given.shape == (201, 320)
    divergence = (np.exp(wanted) * (wanted - given)).sum(axis=1)
    elsewhere = (np.exp(wanted) * (wanted - np.roll(given, 1, axis=0))).sum(axis=1)
    assert elsewhere.mean() > 4 * bound, "the model does not look at its text"
    assert 0 < divergence.mean() < bound


class _FailingRequest:
    """OpenVINO's request, whose step fails once."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.is_bad = True

    def wait(self) -> None:
        self._inner.wait()
        if self.is_bad:
            self.is_bad = False
            raise RuntimeError("the plugin gave up")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_step_that_openvino_fails_ends_its_requests_and_no_others(bundles: Bundles, llama: Path) -> None:
    prompts = _prompts()
    with _open(llama, max_rows=3, max_step_tokens=128) as llm:
        executor: Any = llm._shop.loop._executor
        executor._request = _FailingRequest(executor._request)
        choices = [completion.choices[0] for completion in llm.generate(prompts, GREEDY)]
        (again,) = llm.generate(prompts[:1], GREEDY)[0].choices
    failed = [choice for choice in choices if choice.finish_reason == "error"]
    assert choices[:3] == failed
    for choice in failed:
        assert choice.token_ids == ()
        assert "OpenVINO failed in a step of 34 tokens: the plugin gave up" in str(choice.error)
    for prompt, choice in zip([*prompts[3:], prompts[0]], [*choices[3:], again], strict=True):
        assert list(choice.token_ids) == bundles.greedy(LLAMA, prompt, NUM_TOKENS)


class _BusyRequest(_FailingRequest):
    """Refuses to start, as the library does while another step runs."""

    def start_async(self) -> None:
        raise RuntimeError("Infer Request is busy")


def test_a_step_that_can_not_start_is_a_refusal(bundles: Bundles) -> None:
    with bench(bundles.bundle(LLAMA), LIMITS) as parts:
        executor: Any = parts.executor
        executor._request = _BusyRequest(executor._request)
        parts.scheduler.submit(_greedy_request(0, [1, 2, 3], LIMITS, 1))
        plan = parts.scheduler.plan()
        assert plan is not None
        with pytest.raises(DeviceError, match=r"did not start a step of 3 tokens: Infer"):
            executor.run(parts.packer.pack(plan))
