"""The KV manager: sharing is by content and never by hash luck, a shared block is never written, nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engines.sizes import Limits
from ostinato.runtime.pages import BlockHash, Pages, block_hash
from ostinato.runtime.request import Request, SamplingParams
from tests.fakes import Desk, make_limits, make_request

VOCAB = 96
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


def _compute(pages: Pages, number: int, prompt: Sequence[int], limits: Limits, salt: str = "") -> Request:
    """Admit a request and pretend that all its tokens were computed."""
    request = make_request(number, prompt, GREEDY, limits)
    request.salt = salt
    assert pages.admit(request)
    request.num_cached = request.num_computed
    request.num_computed = len(prompt)
    pages.register(request)
    return request


def _cached(pages: Pages, number: int, prompt: Sequence[int], limits: Limits, salt: str = "") -> int:
    """Compute a prompt and let go of it: how many tokens were shared."""
    request = _compute(pages, number, prompt, limits, salt)
    pages.release(request)
    pages.check_integrity()
    return request.num_cached


def _eight_bits(parent: int, token_ids: tuple[int, ...], salt: str) -> int:
    return block_hash(parent, token_ids, salt) & 0xFF


def _one_value(parent: int, token_ids: tuple[int, ...], salt: str) -> int:
    return 0


def test_a_bad_hash_changes_no_answer() -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(64)] for _ in range(2000)]
    prompts += prompts[:50]
    limits = make_limits(max_rows=8, max_step_tokens=512, num_blocks=9000)
    with_cache = Desk(limits, VOCAB, pages=Pages(limits, hash_of=_eight_bits))
    without = Desk(limits, VOCAB, pages=Pages(limits, prefix_caching=False))
    for desk in (with_cache, without):
        desk.submit(*(make_request(number, prompt, GREEDY, limits) for number, prompt in enumerate(prompts)))
        desk.run()
    for number in range(len(prompts)):
        assert with_cache.token_ids(number) == without.token_ids(number), f"prompt {number} got another's block"
    assert with_cache.scheduler.num_prefix_hits == 50 * 48
    assert without.scheduler.num_prefix_hits == without.scheduler.num_prefix_queries == 0


@pytest.mark.parametrize("max_tokens", [1, 20])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 48])
def test_a_cached_prompt_leaves_a_token_to_compute(length: int, max_tokens: int) -> None:
    limits = make_limits(max_rows=8, max_step_tokens=64)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    prompt = [random.Random(length).randrange(VOCAB) for _ in range(length)]
    for tail in ([], [5]):
        desk = Desk(limits, VOCAB)
        for number in range(3):
            desk.submit(make_request(number, prompt + tail, params, limits))
            desk.run()
        desk.submit(*(make_request(number, prompt + tail, params, limits) for number in range(3, 6)))
        desk.run()
        assert len({tuple(desk.token_ids(number)) for number in range(6)}) == 1
        expected = (len(prompt + tail) - 1) // 16 * 16
        assert [desk.events[number][0].num_cached for number in range(6)] == [0] + [expected] * 5


def test_sharing_needs_the_same_salt_and_the_whole_prefix() -> None:
    limits = make_limits(block_size=4)
    pages = Pages(limits)
    prompt = list(range(12))
    assert _cached(pages, 0, prompt, limits, "a") == 0
    assert _cached(pages, 1, prompt, limits, "b") == 0
    assert _cached(pages, 2, prompt, limits, "b") == 8
    assert _cached(pages, 3, [*prompt, 1], limits, "a") == 12
    assert _cached(pages, 4, [9, *prompt[1:]], limits, "a") == 0  # the same second block after another first one
    assert _cached(Pages(limits, prefix_caching=False), 5, prompt, limits) == 0


def test_forgotten_blocks_are_shared_with_nobody_new() -> None:
    limits = make_limits(block_size=4)
    pages, prompt = Pages(limits), list(range(12))
    first = _compute(pages, 0, prompt, limits)
    sharer = _compute(pages, 1, prompt, limits)
    assert sharer.blocks[:2] == first.blocks[:2]
    pages.forget(first)
    pages.check_integrity()
    pages.release(first)
    assert _cached(pages, 2, prompt, limits) == 0
    pages.release(sharer)
    pages.check_integrity()
    assert _cached(pages, 3, prompt, limits) == 8  # those of the second reader, who computed them anew
    assert pages.num_free == pages.num_total


@pytest.mark.parametrize("hash_of", [block_hash, _eight_bits, _one_value])
@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_longest_computed_prefix_is_found(hash_of: BlockHash, data: st.DataObject) -> None:
    limits = make_limits(block_size=2, num_blocks=400)
    pages = Pages(limits, hash_of=hash_of)
    prompts = data.draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=12))
    known: set[tuple[str, tuple[int, ...]]] = set()
    held = []
    for number, prompt in enumerate(prompts):
        salt = data.draw(st.sampled_from(["", "x"]))
        request = _compute(pages, number, prompt, limits, salt)
        whole = [2 * count for count in range(1, (len(prompt) - 1) // 2 + 1)]
        expected = 0
        for end in whole:
            if (salt, tuple(prompt[:end])) not in known:
                break
            expected = end
        assert request.num_cached == expected
        known |= {(salt, tuple(prompt[:end])) for end in range(2, len(prompt) + 1, 2)}
        held.append(request)
        if data.draw(st.booleans()):
            pages.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        pages.check_integrity()


def test_the_least_recently_used_prefix_goes_first() -> None:
    limits = make_limits(block_size=4, num_blocks=6, max_context=24)
    pages = Pages(limits)
    first, second = [1] * 8, [2] * 8
    assert _cached(pages, 0, first, limits) == _cached(pages, 1, second, limits) == 0
    assert _cached(pages, 2, first, limits) == 4  # and its second block is computed again, into a copy
    assert _cached(pages, 3, [3] * 12, limits) == 0
    assert _cached(pages, 4, [*first, 0], limits) == 8
    assert _cached(pages, 5, [*second, 0], limits) < 8
    assert pages.num_evictions > 0


def test_a_refilled_block_does_not_stand_for_its_old_content() -> None:
    limits = make_limits(block_size=4, num_blocks=6, max_context=16)
    pages = Pages(limits)
    twins = [make_request(0, [*[1] * 4, 8], GREEDY, limits), make_request(1, [*[1] * 4, *[2] * 4, 9], GREEDY, limits)]
    assert all(pages.admit(twin) for twin in twins)
    for twin in twins:  # the second one's [2] * 4 comes after the first one's [1] * 4, which is the one that is shared
        twin.num_computed = len(twin.tokens)
        pages.register(twin)
    shared = twins[0].blocks[0]
    pages.release(twins[0])
    filler = _compute(pages, 2, [7] * 5, limits)
    refill = _compute(pages, 3, [5] * 4, limits)
    assert refill.blocks == [shared]
    pages.release(refill)
    pages.release(filler)
    assert _cached(pages, 4, [*[5] * 4, *[2] * 4, 0], limits) == 4


def test_a_refused_verb_changes_nothing() -> None:
    limits = make_limits(block_size=4, num_blocks=4, max_context=16)
    pages = Pages(limits)
    first = _compute(pages, 0, [1] * 8, limits)
    second = make_request(1, [*[1] * 8, *[2] * 6], GREEDY, limits)
    assert not pages.admit(second, headroom=1)
    assert second.blocks == []
    assert pages.num_free == 2
    assert pages.admit(second)
    assert second.blocks[:2] == first.blocks
    assert not pages.grow(second, 17)
    assert len(second.blocks) == 4
    assert pages.grow(second, 16)
    pages.check_integrity()


def test_an_own_copy_of_a_known_block_does_not_replace_it() -> None:
    limits = make_limits(block_size=4, num_blocks=16)
    pages = Pages(limits)
    twins = [make_request(number, [7] * 9, GREEDY, limits) for number in range(2)]
    for twin in twins:
        assert pages.admit(twin)
    for twin in twins:
        twin.num_computed = 9
        pages.register(twin)
    assert not set(twins[0].blocks) & set(twins[1].blocks)
    third = _compute(pages, 2, [7] * 9, limits)
    assert third.blocks[:2] == twins[0].blocks[:2]
    for request in (*twins, third):
        pages.release(request)
    pages.check_integrity()
    assert pages.num_free == 16


def _lose_a_block(pages: Pages, request: Request) -> None:
    pages._blank.pop()


def _free_a_held_block(pages: Pages, request: Request) -> None:
    pages._blank.append(request.blocks[-1])


def _free_twice(pages: Pages, request: Request) -> None:
    pages._blank.append(pages._blank[0])


def _free_the_null_block(pages: Pages, request: Request) -> None:
    pages._blank[0] = 0


def _miscount(pages: Pages, request: Request) -> None:
    pages._num_holders[request.blocks[0]] += 1


def _hold_twice(pages: Pages, request: Request) -> None:
    pages._num_holders[request.blocks[2]] -= 1
    pages._num_holders[request.blocks[0]] += 1
    pages._blank.append(request.blocks[2])
    request.blocks[2] = request.blocks[0]


def _write_a_known_block(pages: Pages, request: Request) -> None:
    request.num_computed = 3


def _swap_map_entries(pages: Pages, request: Request) -> None:
    first, second = list(pages._blocks)[:2]
    pages._blocks[first], pages._blocks[second] = pages._blocks[second], pages._blocks[first]


@pytest.mark.parametrize(
    ("breach", "message"),
    [
        (_lose_a_block, "1 blocks are lost"),
        (_free_a_held_block, "a held block is free"),
        (_free_twice, "twice in the free lists"),
        (_free_the_null_block, "the null block is free"),
        (_miscount, "2 holders on the books, 1 in requests"),
        (_hold_twice, "holds a block twice"),
        (_write_a_known_block, "registered a block that is not full"),
        (_swap_map_entries, "the maps disagree"),
    ],
)
def test_the_self_check_names_a_breach(breach: Callable[[Pages, Request], None], message: str) -> None:
    limits = make_limits(block_size=4, num_blocks=16)
    pages = Pages(limits)
    request = _compute(pages, 0, list(range(10)), limits)
    pages.check_integrity()
    breach(pages, request)
    with pytest.raises(AssertionError, match=message):
        pages.check_integrity()
