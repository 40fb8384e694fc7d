"""OpenAI's own client against the server: both endpoints, streams, choices, logprobs, usage, errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from ostinato.engines.errors import DeviceError
from tests.fakes import PosLM, make_limits
from tests.serving import MODEL, PATIENCE_SECONDS, VOCAB_SIZE, FaultyLM, Running, TapeLM, serving

LIMITS = make_limits()
TEXT = "naïve \u2028 text"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


def client_of(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with (
        serving(tmp_path_factory.mktemp("toy"), LIMITS, PosLM(LIMITS, VOCAB_SIZE)) as server,
        client_of(server) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    executor = FaultyLM(PosLM(LIMITS, VOCAB_SIZE), DeviceError("the device refused"))
    executor.is_bad = True
    with serving(tmp_path_factory.mktemp("toy"), LIMITS, executor) as server, client_of(server) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "ostinato"


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, seed=4, max_completion_tokens=10, logprobs=True, top_logprobs=3
    )
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, seed=4, max_completion_tokens=10, logprobs=True, top_logprobs=3,
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = list(stream)
    assert not last.choices
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        assert mine[0].delta.role == choice.message.role == "assistant"
        assert [part.finish_reason for part in mine if part.finish_reason] == [choice.finish_reason]
        assert choice.logprobs is not None
        entries = [entry for part in mine if part.logprobs for entry in part.logprobs.content or []]
        assert entries == choice.logprobs.content
        assert all(len(entry.top_logprobs) == 3 for entry in entries)


def test_a_conversation_goes_on_with_the_answer_that_came(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3, seed=1)
    answer = first.choices[0].message.model_dump()
    second = client.chat.completions.create(model=MODEL, messages=[*MESSAGES, answer, *MESSAGES], max_tokens=3)  # type: ignore[list-item]
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_completions_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.completions.create(
        model=MODEL, prompt=["a", "bc"], n=2, seed=4, max_tokens=8, logprobs=2, echo=True, extra_body={"top_k": 20}
    )
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text[:1] for choice in whole.choices] == ["a", "a", "b", "b"]
    stream = client.completions.create(
        model=MODEL, prompt=["a", "bc"], n=2, seed=4, max_tokens=8, logprobs=2, echo=True, extra_body={"top_k": 20},
        stream=True,
    )  # fmt: skip
    chunks = list(stream)
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(part.text for part in mine) == choice.text
        assert choice.logprobs is not None
        tokens = [token for part in mine if part.logprobs for token in part.logprobs.tokens or []]
        assert tokens == choice.logprobs.tokens


def test_unusual_line_ends_arrive_whole(tmp_path: Path) -> None:
    with serving(tmp_path, LIMITS, TapeLM(TEXT.encode(), 0)) as server, client_of(server) as client:
        stream = client.completions.create(model=MODEL, prompt="x", temperature=0, max_tokens=50, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


def test_refusals_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, service_tier="flex")
    assert unsupported.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")


def test_a_failure_in_the_server_is_an_error_before_and_in_a_stream(faulty: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="the device refused"):
        faulty.completions.create(model=MODEL, prompt="x")
    stream = faulty.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="the device refused"):
        list(stream)
