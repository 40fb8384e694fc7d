"""Prefix cache, preemption and pools that are too small, as a caller sees them."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ostinato.runtime.batch import Batch
from tests.fakes import Done, PosLM, make_limits
from tests.http_calls import complete, error_of
from tests.load.callers import body, call_all
from tests.serving import VOCAB_SIZE, serving

BLOCK = 16


class PacedLM(PosLM):
    """Slow enough for callers to meet."""

    def run(self, batch: Batch) -> Done:
        time.sleep(0.002)
        return super().run(batch)


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(250), k=length)


@pytest.mark.parametrize("max_tokens", [1, 20])
def test_a_prompt_of_whole_blocks_that_are_all_cached(tmp_path: Path, max_tokens: int) -> None:
    """K26: three times in a row and all at once; a token at least is computed."""
    limits = make_limits()
    with serving(tmp_path, limits, PosLM(limits, VOCAB_SIZE)) as server, server.client() as client:
        for length in (1, 15, 16, 17, 32, 33, 48):
            for tail in ([], [5]):
                prompt = prompt_of(length, length) + tail
                options = {"prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
                answers = [complete(client, **options).json() for _ in range(3)]
                texts = {answer["choices"][0]["text"] for answer in answers}
                cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
                assert cached[1:] == [(len(prompt) - 1) // BLOCK * BLOCK] * 2
                together = asyncio.run(call_all(server.url, [{"model": "toy"} | options] * 3))
                assert {one.text for one in together} == texts
                assert len(texts) == 1
        server.await_idle()


@pytest.mark.parametrize("order", [(0, 0), (0, 1), (1, 0), (2, 0, 0)])
def test_an_echoed_prompt_has_the_same_logprobs_when_it_is_cached(tmp_path: Path, order: tuple[int, ...]) -> None:
    """K28: P is 33 tokens in chunks of 8, then P+Q, in both orders, and P after one that did not ask for any."""
    limits = make_limits(max_step_tokens=8)
    prompt = prompt_of(4, 33)
    asked: list[dict[str, Any]] = [
        {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0},
        {"prompt": prompt + prompt_of(5, 7), "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0},
        {"prompt": prompt, "max_tokens": 1, "temperature": 0},
    ]

    def logprobs(client: httpx.Client, which: int) -> dict[str, Any] | None:
        found: dict[str, Any] | None = complete(client, **asked[which]).json()["choices"][0]["logprobs"]
        return found

    fresh = {}
    for which in set(order):
        with serving(tmp_path, limits, PosLM(limits, VOCAB_SIZE)) as server, server.client() as client:
            fresh[which] = logprobs(client, which)
    with serving(tmp_path, limits, PosLM(limits, VOCAB_SIZE)) as server, server.client() as client:
        for which in order:
            found, wanted = logprobs(client, which), fresh[which]
            if found is None or wanted is None:
                assert which == 2
                continue
            assert found["token_logprobs"][0] is None
            assert found["tokens"] == wanted["tokens"]
            np.testing.assert_allclose(found["token_logprobs"][1:], wanted["token_logprobs"][1:], atol=1e-5)
            assert len(found["token_logprobs"]) == len(asked[which]["prompt"]) + 1


def test_streams_that_were_preempted_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """K29: twenty tokens and a hundred in a pool of 12 blocks, beside one of 1,000."""
    penalties = {"presence_penalty": 0.7, "logprobs": 1, "stop": ["zzzz"], "max_tokens": 100, "stream": True}
    asked = [body(number, prompt=prompt_of(number, 20), **penalties) for number in range(40)]
    texts = []
    for num_blocks in (12, 1000):
        limits = make_limits(num_blocks=num_blocks)
        with serving(tmp_path, limits, PacedLM(limits, VOCAB_SIZE)) as server:
            heard = asyncio.run(call_all(server.url, asked))
            assert all(one.is_whole for one in heard)
            texts.append([one.text for one in heard])
            server.await_idle()
            assert (server.loop.scheduler.num_preemptions >= 20) == (num_blocks == 12)
    assert texts[0] == texts[1]


def test_one_that_can_never_fit_is_refused_at_once_and_the_line_moves(tmp_path: Path) -> None:
    """K31: a pool of 1,024 tokens under a model of 4,096."""
    limits = make_limits(max_context=4096, num_blocks=64)
    with serving(tmp_path, limits, PosLM(limits, VOCAB_SIZE)) as server, server.client() as client:
        for fields in ({"prompt": prompt_of(0, 1500)}, {"prompt": prompt_of(1, 1000), "max_tokens": 500}):
            error = error_of(complete(client, ignore_eos=True, **fields), 400)
            assert error["code"] == "context_length_exceeded"
            assert "1024" in error["message"]
        grows = body(2, prompt=prompt_of(1, 1000), max_tokens=24)
        small = [body(number, prompt=prompt_of(number, 10), max_tokens=4) for number in range(3, 23)]
        heard = asyncio.run(call_all(server.url, [grows, *small]))
        assert [one.finish for one in heard] == ["length"] * 21
        server.await_idle()
