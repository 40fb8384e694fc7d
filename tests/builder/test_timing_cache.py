"""TensorRT's timing cache: pinned, foreign, damaged, and what a build keeps of it, without a GPU."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from ostinato.builder.checkpoint import Checkpoint
from ostinato.engines.errors import BuildError

from ..tensorrt_fakes import DAMAGED, FOREIGN, TIMED, Builder
from .trt_ranks import FLAG, config, recipe_of, written

pytestmark = pytest.mark.xdist_group("trt")  # one worker traces, not two


def pinned(path: Path, content: bytes) -> dict[str, Any]:
    path.write_bytes(content)
    return {"timing_cache": str(path), "timing_cache_sha256": hashlib.sha256(content).hexdigest()}


def test_a_pinned_timing_cache_is_used_and_may_not_miss(checkpoint: Checkpoint, tmp_path: Path) -> None:
    result, folder = written(recipe_of(**pinned(tmp_path / "cache", b"good")), checkpoint, tmp_path)
    assert FLAG.ERROR_ON_TIMING_CACHE_MISS in config().flags
    assert (folder / "timing.cache").read_bytes() == b"good"
    assert result.notes == ()


@pytest.mark.parametrize("content", [FOREIGN, DAMAGED])
def test_a_foreign_or_damaged_cache_is_rebuilt_with_a_note(
    checkpoint: Checkpoint, tmp_path: Path, content: bytes
) -> None:
    result, folder = written(recipe_of(**pinned(tmp_path / "cache", content)), checkpoint, tmp_path)
    assert FLAG.ERROR_ON_TIMING_CACHE_MISS not in config().flags
    assert (folder / "timing.cache").read_bytes() == TIMED
    rebuilt, pin = result.notes
    assert "damaged, or from another GPU" in rebuilt
    assert hashlib.sha256(TIMED).hexdigest() in pin


def test_a_cache_of_another_digest_is_refused_before_anything_is_built(checkpoint: Checkpoint, tmp_path: Path) -> None:
    options = pinned(tmp_path / "cache", b"good")
    (tmp_path / "cache").write_bytes(b"other")
    with pytest.raises(BuildError, match=r"has digest .* the recipe says"):
        written(recipe_of(**options), checkpoint, tmp_path)
    assert not list((tmp_path / "rank0").iterdir())
    (tmp_path / "rank0").rmdir()
    (tmp_path / "cache").unlink()
    with pytest.raises(BuildError, match="can't be read"):
        written(recipe_of(**options), checkpoint, tmp_path)


def test_a_miss_of_the_pinned_cache_says_what_to_do(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Builder, "fault", "tactic not in timing cache")
    with pytest.raises(BuildError, match=r"decoder: .*tactic not in timing cache.*drop tensorrt\.timing_cache"):
        written(recipe_of(**pinned(tmp_path / "cache", b"good")), checkpoint, tmp_path)
