"""What a caller says of its place in the queue and of whom it shares a prefix with counts at every endpoint."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import make_limits
from tests.serving import MODEL, GatedLM, TapeLM, serving

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


def body(path: str, text: str, **fields: Any) -> dict[str, Any]:
    """A call that makes one token."""
    match path:
        case "/v1/completions":
            asked: dict[str, Any] = {"prompt": text, "max_tokens": 1}
        case "/v1/chat/completions":
            asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        case _:
            asked = {"input": text, "max_output_tokens": 1}
    return {"model": MODEL} | asked | fields


@pytest.mark.parametrize("path", PATHS)
def test_a_lower_priority_number_that_came_later_runs_first(tmp_path: Path, path: str) -> None:
    limits = make_limits(max_rows=1, max_step_tokens=64, max_context=128)
    gated = GatedLM(TapeLM(b"", 0))
    with serving(tmp_path, limits, gated) as server, server.client() as client, ExitStack() as streams:

        def submit(text: str, **fields: Any) -> httpx.Response:
            """A stream's head comes when its call is in the queue."""
            return streams.enter_context(
                client.stream("POST", path, json=body(path, text, stream=True, ignore_eos=True, **fields))
            )

        answers = [submit("first")]
        gated.await_step()
        answers += [submit("Q" * 8, priority=5), submit("Z" * 8, priority=-5)]
        gated.permit(100)
        assert [answer.read() != b"" for answer in answers] == [True] * 3
        fed = [set(batch.input_ids.tolist()) for batch in gated.batches]
        late, early = (next(at for at, ids in enumerate(fed) if ord(letter) in ids) for letter in "QZ")
        assert early < late
        server.await_idle()


@pytest.mark.parametrize("path", PATHS)
def test_a_prefix_is_shared_under_one_salt_only(client: httpx.Client, path: str) -> None:
    text = f"{path} alone asks for this prefix, of some blocks"

    def num_cached(**fields: Any) -> int:
        usage = client.post(path, json=body(path, text, **fields)).json()["usage"]
        details = usage["input_tokens_details" if "responses" in path else "prompt_tokens_details"]
        count: int = details["cached_tokens"]
        return count

    assert num_cached(cache_salt="a") == 0
    shared = num_cached(cache_salt="a")
    assert shared >= 32
    assert [num_cached(cache_salt="b"), num_cached(), num_cached(cache_salt="a")] == [0, 0, shared]
    assert [num_cached(), num_cached(cache_salt="b")] == [shared, shared]
