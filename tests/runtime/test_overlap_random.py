"""Random requests that join, leave, stop and lack blocks: with steps in flight they end as without."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count

import pytest

from ostinato.engines.sizes import Limits
from ostinato.runtime import masks
from ostinato.runtime.executor import StepRules
from ostinato.runtime.mask_time import STEP_SECONDS, MaskTime
from ostinato.runtime.request import Request
from tests.fakes import PosLM, make_limits
from tests.overlap_fakes import LaggingLM, overlap_rules, pipeline_rules
from tests.overlap_requests import VOCAB, Band, Order, make, random_orders
from tests.scale import scaled

NUM_ORDERS = 25
SEEDS = range(scaled(14, 400))


def _limits(rng: random.Random) -> Limits:
    block_size = rng.choice([1, 4, 8])
    return make_limits(
        block_size=block_size,
        max_rows=rng.choice([2, 5, 8]),
        max_step_tokens=rng.choice([8, 20, 64]),
        max_context=64,
        num_blocks=rng.choice([64, 80, 400]) // block_size + 1,
    )


def _rules(rng: random.Random, limits: Limits) -> StepRules:
    if rng.random() < 0.7:
        return overlap_rules(limits)
    return pipeline_rules(limits, rng.choice([2, 3, 4]))


def _plain(limits: Limits, orders: list[Order], *, prefix_caching: bool) -> Band:
    band = Band(limits, PosLM(limits, VOCAB), prefix_caching=prefix_caching)
    band.submit(*(make(number, order, limits) for number, order in enumerate(orders)))
    band.run()
    return band


class SlowMasks(MaskTime):
    """Masks that take more than a step's allowance each; counts who was put off."""

    def __init__(self) -> None:
        super().__init__(count(step=2 * STEP_SECONDS).__next__)
        self.num_put_off = 0

    def turns(self, requests: Sequence[Request]) -> Iterator[int]:
        yield from super().turns(requests)
        self.num_put_off += sum(request.num_put_off > 0 for request in requests)


class Crowd:
    """The requests of one seed on a lagging executor, joining and leaving at random."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.limits = _limits(self.rng)
        self.prefix_caching = self.rng.random() < 0.5
        self.rules = _rules(self.rng, self.limits)
        lags = random.Random(seed) if self.rng.random() < 0.5 else None
        self.lagging = LaggingLM(self.limits, VOCAB, self.rules, lags)
        self.band = Band(self.limits, self.lagging, prefix_caching=self.prefix_caching)
        self.orders = random_orders(self.rng, NUM_ORDERS)
        self.aborted: set[int] = set()

    def run(self) -> None:
        coming = list(enumerate(self.orders))
        while coming or not self.band.scheduler.is_idle or not self.band.loop._inbox.empty():
            for _ in range(self.rng.choice([0, 0, 1, 3])):
                if coming:
                    self.band.submit(make(*coming.pop(0), self.limits))
            if self.band.events and self.rng.random() < 0.04:
                self._abort(self.rng.choice(list(self.band.events)))
            self.band.step()
            self.band.pages.check_integrity()
        self.band.check_idle()

    def _abort(self, number: int) -> None:
        self.aborted.add(number)
        self.band.loop.abort(number)


@cache
def _crowd(seed: int) -> Crowd:
    """One that has run."""
    crowd = Crowd(seed)
    crowd.run()
    return crowd


@cache
def _slow_crowd(seed: int) -> tuple[Crowd, int]:
    """One whose masks are slow, and how often one was put off."""
    slow = SlowMasks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "MaskTime", lambda: slow)
        crowd = Crowd(seed)
        crowd.run()
    return crowd, slow.num_put_off


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_end_as_without_overlap(seed: int) -> None:
    check_as_without_overlap(_crowd(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_masks_that_are_put_off_change_no_output(seed: int) -> None:
    check_as_without_overlap(_slow_crowd(seed)[0])


def check_as_without_overlap(crowd: Crowd) -> None:
    plain = _plain(crowd.limits, crowd.orders, prefix_caching=crowd.prefix_caching)
    for number in range(NUM_ORDERS):
        if number in crowd.aborted and crowd.band.finish(number) == "abort":
            told = crowd.band.token_ids(number)
            assert told == plain.token_ids(number)[: len(told)]
        else:
            assert crowd.band.outcome(number) == plain.outcome(number)


def test_the_seeds_meet_what_they_are_for() -> None:
    """Late stops, aborts, preemptions, shared prefixes, guides and steps that are fed; else the test above is empty."""
    seen: Counter[str] = Counter()
    for seed in list(SEEDS)[:14]:
        crowd = _crowd(seed)
        for number, (_, params, _, is_guided) in enumerate(crowd.orders):
            seen[str(crowd.band.finish(number))] += 1
            seen["guided"] += is_guided
            seen["scored"] += params.prompt_logprobs is not None
        seen["put off"] += _slow_crowd(seed)[1]
        seen["preemptions"] += crowd.band.scheduler.num_preemptions
        seen["hits"] += crowd.band.scheduler.num_prefix_hits
        seen["fed"] += sum(batch.feed_rows is not None for batch in crowd.lagging.batches)
    assert (
        min(seen[name] for name in ("stop", "length", "abort", "guided", "scored", "put off", "preemptions", "hits"))
        > 10
    ), seen
    assert seen["fed"] > 200, seen
