"""A prompt that takes long: what its reader sees meanwhile, and what is left for the next try when it gives up."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.fakes import PosLM, make_limits
from tests.http_calls import complete, payloads
from tests.serving import MODEL, VOCAB_SIZE, GatedLM, await_true, serving

LIMITS = make_limits(max_rows=4, max_step_tokens=32, max_context=512)
PROMPT = [number % 250 for number in range(400)]  # a step takes 32 of them
OPTIONS: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "seed": 1, "max_tokens": 4, "ignore_eos": True}
NUM_STEPS = 10  # before the reader gives up


def test_a_reader_that_gives_up_stops_the_prefill_and_leaves_its_work_to_the_next_try(tmp_path: Path) -> None:
    gated = GatedLM(PosLM(LIMITS, VOCAB_SIZE))
    with serving(tmp_path, LIMITS, gated) as server, server.client() as client:
        with client.stream("POST", "/v1/completions", json=OPTIONS | {"stream": True}) as response:
            assert response.status_code == 200  # before the first token
            for _ in range(NUM_STEPS):
                gated.await_step()
                gated.permit()
            gated.await_step()
        await_true(lambda: not server.loop._inbox.empty(), "nobody saw the reader leave")
        gated.permit()
        server.await_idle()
        assert NUM_STEPS < len(gated.batches) <= NUM_STEPS + 2  # no more than the step that ran and one planned
        before = len(gated.batches)
        gated.permit(100)
        again = complete(client, **OPTIONS).json()
        done = NUM_STEPS * LIMITS.max_step_tokens
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0.8 * done
        computed = sum(batch.num_tokens for batch in gated.batches)
        assert computed <= 1.2 * (len(PROMPT) + OPTIONS["max_tokens"])
        assert len(gated.batches) > before


def test_a_chat_begins_with_its_role_before_anything_is_computed(tmp_path: Path) -> None:
    gated = GatedLM(PosLM(LIMITS, VOCAB_SIZE))
    with serving(tmp_path, LIMITS, gated) as server, server.client() as client:
        messages = [{"role": "user", "content": "y" * 300}]
        options = {"model": MODEL, "messages": messages, "max_tokens": 1, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=options) as response:
            lines = response.iter_lines()
            first = json.loads(next(lines).removeprefix("data: "))
            assert first["choices"][0]["delta"]["role"] == "assistant"
            gated.permit(100)
            assert [line for line in lines if line][-1] == "data: [DONE]"


def test_calls_of_one_name_do_not_end_each_other(tmp_path: Path) -> None:
    """A client's own request id names nothing here: one reader leaves, the other's stream is whole."""
    gated = GatedLM(PosLM(LIMITS, VOCAB_SIZE))
    headers = {"x-request-id": "abc"}
    body = {"model": MODEL, "prompt": "x", "seed": 3, "max_tokens": 20, "ignore_eos": True, "stream": True}
    with serving(tmp_path, LIMITS, gated) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        gated.permit(100)
        alone = [chunk["choices"] for chunk in payloads(client.post("/v1/completions", json=body))]
        for _ in range(100 - len(gated.batches)):
            assert gated._permits.acquire(blocking=False)
        stays = pool.submit(client.post, "/v1/completions", json=body, headers=headers)
        gated.await_step()
        with server.client() as other, other.stream("POST", "/v1/completions", json=body, headers=headers):
            await_true(lambda: len(server.bridge._rows) == 2, "the second call did not start")
        await_true(lambda: len(server.bridge._rows) == 1, "the reader who left was not noticed")
        gated.permit(100)
        assert [chunk["choices"] for chunk in payloads(stays.result())] == alone
