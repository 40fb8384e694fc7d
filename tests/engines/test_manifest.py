"""Manifests come back as they were, and strangers are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato.engines import json_record
from ostinato.engines.errors import BundleError
from ostinato.engines.manifest import digest_of, manifest_from_json, read_manifest

from .made import fill, fill_gpu, gpu_manifest_of, manifest_of, sealed


@pytest.fixture
def text(tmp_path: Path) -> str:
    fill_gpu(tmp_path)
    return gpu_manifest_of(tmp_path).to_json()


def test_a_manifest_comes_back_as_it_was(tmp_path: Path, text: str) -> None:
    assert manifest_from_json(text, tmp_path) == gpu_manifest_of(tmp_path)
    assert manifest_from_json(text, tmp_path).to_json() == text


def test_so_does_one_without_engines(tmp_path: Path) -> None:
    fill(tmp_path)
    assert manifest_from_json(manifest_of(tmp_path).to_json(), tmp_path) == manifest_of(tmp_path)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"schema_version": 1}, "schema version 1, this ostinato reads 2"),
        ({"schema_version": [[]]}, "schema version none, this ostinato reads 2"),
        ({"surprise": 1}, "surprise"),
        ({"eos_ids": None}, "eos_ids is None, wanted"),
        ({"eos_ids": [True]}, r"eos_ids\[0\] is True, wanted int"),
        ({"sizes": {"vocab_size": 3}}, "sizes has other fields than ModelSizes"),
        ({"hardware": []}, r"hardware is \[\]"),
        ({"files": {"a": {"sha256": 3, "size_bytes": 1}}}, r"files\.a\.sha256 is 3, wanted str"),
        ({"files": {"../a": {"sha256": "", "size_bytes": 1}}}, "no path inside a bundle"),
        ({"files": {"/etc/passwd": {"sha256": "", "size_bytes": 1}}}, "no path inside a bundle"),
        ({"files": {"a\0b": {"sha256": "", "size_bytes": 1}}}, "no path inside a bundle"),
        ({"name": "half \ud800 a pair"}, "surrogates not allowed"),
        ({"shards": {"tensor_parallel": 0, "pipeline_parallel": 1}}, "shards.tensor_parallel is 0"),
        ({"latency": {"decode 1": {"predicted_ms": "1", "measured_ms": None, "basis": ""}}}, "predicted_ms is '1'"),
        ({"memory": 7}, "memory has other fields than MemoryTable: 7"),
        ({"target": "tpu"}, "is for target 'tpu', this ostinato knows cpu, x86, rtx, trt: build the bundle again"),
        ({"bos_id": "7"}, "bos_id is '7', wanted int"),
    ],
)
def test_a_forged_manifest_is_refused_by_field(tmp_path: Path, text: str, change: dict[str, Any], wanted: str) -> None:
    with pytest.raises(BundleError, match=wanted):
        manifest_from_json(sealed(json.loads(text) | change), tmp_path)


def test_a_forged_field_is_refused_where_an_honest_one_is_not(tmp_path: Path, text: str) -> None:
    assert manifest_from_json(sealed(json.loads(text)), tmp_path) == gpu_manifest_of(tmp_path)


@pytest.mark.parametrize("change", [{"name": "other"}, {"digest": "0" * 64}, {"digest": 3}])
def test_a_change_by_hand_is_refused(tmp_path: Path, text: str, change: dict[str, Any]) -> None:
    with pytest.raises(BundleError, match="digest"):
        manifest_from_json(json.dumps(json.loads(text) | change, indent=1, sort_keys=True) + "\n", tmp_path)


@pytest.mark.parametrize("layout", [" {}", "{}\n", "{} "])
def test_even_a_change_of_layout_is_refused(tmp_path: Path, text: str, layout: str) -> None:
    with pytest.raises(BundleError, match="not laid out as a build writes it"):
        manifest_from_json(layout.replace("{}", text), tmp_path)


_HOSTILE = {
    "empty": b"",
    "an array": b"[]",
    "broken": b"{",
    "a string": b'"text"',
    "not UTF-8": b"\xff\xfe{}",
    "deep": b"[" * 200_000,
    "deep field": b'{"schema_version": 2, "digest": "", "a": ' + b"[" * 900 + b"]" * 900 + b"}",
    "a long number": b'{"schema_version": ' + b"9" * 10_000 + b"}",
    "no number": b'{"schema_version": NaN}',
}


@pytest.mark.parametrize("content", _HOSTILE.values(), ids=_HOSTILE)
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(content)
    with pytest.raises(BundleError, match="build the bundle again"):
        read_manifest(path)


def test_a_huge_manifest_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    with path.open("wb") as file:
        file.truncate(json_record.MAX_BYTES + 1)  # a hole: it takes no room
    with pytest.raises(BundleError, match="larger than 64 MiB"):
        read_manifest(path)


def test_a_digest_does_not_depend_on_key_order() -> None:
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1}) != digest_of({"a": 1, "b": [3]})
