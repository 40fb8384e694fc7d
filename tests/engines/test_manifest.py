"""Manifests come back as they were, and strangers are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato.engines.errors import BundleError
from ostinato.engines.manifest import digest_of, manifest_from_json

from .made import fill, manifest_of


@pytest.fixture
def text(tmp_path: Path) -> str:
    fill(tmp_path)
    return manifest_of(tmp_path).to_json()


def test_a_manifest_comes_back_as_it_was(tmp_path: Path, text: str) -> None:
    assert manifest_from_json(text, tmp_path) == manifest_of(tmp_path)
    assert manifest_from_json(text, tmp_path).to_json() == text


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"schema_version": 99}, "schema version 99"),
        ({"surprise": 1}, "surprise"),
        ({"eos_ids": None}, "does not read as a manifest"),
        ({"sizes": {"vocab_size": 3}}, "does not read as a manifest"),
    ],
)
def test_a_strange_manifest_is_refused(tmp_path: Path, text: str, change: dict[str, Any], wanted: str) -> None:
    with pytest.raises(BundleError, match=wanted):
        manifest_from_json(json.dumps(json.loads(text) | change), tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '"text"'])
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BundleError):
        manifest_from_json(text, tmp_path)


def test_a_digest_does_not_depend_on_key_order() -> None:
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1}) != digest_of({"a": 1, "b": [3]})
