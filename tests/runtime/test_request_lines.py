"""The requests of a call: what a line may say, and that whatever else it says is refused with its number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ostinato.engines.errors import RecipeError, RequestError
from ostinato.runtime import RuntimeConfig, SamplingParams
from ostinato.runtime.request_lines import read_requests

PARAMS = SamplingParams(max_tokens=4)


def read(tmp_path: Path, text: str | bytes) -> list[object]:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(read_requests(None, None, path, PARAMS))


def test_a_line_overrides_what_it_names_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(
        '{"prompt": "a\u2028b", "stop": "x", "temperature": 0}\n\n'
        '{"prompt_ids": [1, 2], "logit_bias": {"5": -1.5}, "max_tokens": 9}\n'
        '{"messages": [{"role": "user", "content": "hi"}], "stop": ["x", "y"]}\n'
    )
    first, second, third = read_requests(None, None, path, PARAMS)
    assert (first.prompt, first.params.stop, first.params.temperature, first.params.max_tokens) == (
        "a\u2028b",
        ("x",),
        0,
        4,
    )
    assert (second.prompt, second.params.logit_bias, second.params.max_tokens) == ([1, 2], ((5, -1.5),), 9)
    assert third.messages == [{"role": "user", "content": "hi"}]
    assert third.params.stop == ("x", "y")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no request"),
        ("[]", "line 1 is list"),
        ("[" * 100_000, "line 1 is not JSON"),
        ("{", "line 1 is not JSON"),
        ('{"prompt": "a"}\n{"max_tokens": 1}', "line 2: give exactly one"),
        ('{"prompt": "a", "prompt_ids": [1]}', "exactly one"),
        ('{"prompt_ids": "abc"}', "prompt_ids is str"),
        ('{"prompt": 5}', "prompt is int"),
        ('{"prompt": "a", "beam": 2}', "unknown fields beam"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "no token id"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_a_line_that_can_not_be_used_is_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read(tmp_path, text)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="can't read"):
        read_requests(None, None, tmp_path / "none", PARAMS)
    with pytest.raises(RequestError, match="can't read"):
        read_requests(None, None, tmp_path, PARAMS)


def test_ids_of_the_command_line() -> None:
    assert read_requests(None, "1, 2,3", None, PARAMS)[0].prompt == [1, 2, 3]
    with pytest.raises(RequestError, match="--prompt-ids"):
        read_requests(None, "1,x", None, PARAMS)


@pytest.mark.parametrize("name", ["max_rows", "max_step_tokens", "max_context", "kv_tokens", "num_threads"])
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    nothing: dict[str, Any] = {name: 0}
    with pytest.raises(RecipeError, match=f"{name} is 0"):
        replace(RuntimeConfig(), **nothing)
