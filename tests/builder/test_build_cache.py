"""The build cache gives back whole bundles or nothing, keeps to its bound, and is shared by builders."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ostinato.builder.build_cache import BuildCache
from ostinato.engines.bundle import Bundle, open_bundle, publish, put_in_place, unfinished_bundle
from ostinato.engines.errors import BundleError

from ..engines.made import fill, manifest_of

ROOT = Path(__file__).parent.parent.parent
CONTENT = 2**16
_KEEP_AND_FETCH = """
import sys
from pathlib import Path
from ostinato.builder.build_cache import BuildCache
from ostinato.engines.bundle import open_bundle
cache, folder = BuildCache(Path(sys.argv[1])), Path(sys.argv[2])
bundle = open_bundle(folder / "made")
for turn in range(30):
    cache.keep(bundle)
    target = folder / f"fetched-{turn}"
    target.mkdir()
    assert cache.fetch(bundle.manifest.identity, target)
    assert open_bundle(target).manifest == bundle.manifest
"""


def make(path: Path, identity: str) -> Bundle:
    with unfinished_bundle(path) as folder:
        fill(folder, identity.encode() * (CONTENT // len(identity)))
        return publish(folder, path, replace(manifest_of(folder), identity=identity))


@pytest.fixture
def cache(tmp_path: Path) -> BuildCache:
    return BuildCache(tmp_path / "cache")


def _fetch(cache: BuildCache, identity: str, path: Path) -> bool:
    with unfinished_bundle(path) as folder:
        if not cache.fetch(identity, folder):
            assert not any(folder.iterdir())
            return False
        put_in_place(folder, path)
        return True


def test_a_kept_bundle_comes_back_after_another_took_its_place(tmp_path: Path, cache: BuildCache) -> None:
    first = make(tmp_path / "b", "first")
    assert not _fetch(cache, "first", tmp_path / "elsewhere")
    cache.keep(first)
    cache.keep(make(tmp_path / "b", "second"))
    assert open_bundle(tmp_path / "b").manifest.identity == "second"
    assert _fetch(cache, "first", tmp_path / "b")
    assert open_bundle(tmp_path / "b").manifest == first.manifest
    assert not _fetch(cache, "third", tmp_path / "elsewhere")


def test_files_are_linked_and_not_copied(tmp_path: Path, cache: BuildCache) -> None:
    cache.keep(make(tmp_path / "b", "first"))
    file = Path("rank0", "weights.bin")
    assert (tmp_path / "b" / file).samefile(cache.folder / "first" / file)
    make(tmp_path / "b", "second")  # publishing replaces files, it does not write into them
    assert _fetch(cache, "first", tmp_path / "c")


def test_a_damaged_entry_is_dropped(tmp_path: Path, cache: BuildCache) -> None:
    for damage in (b"", b"\1" * CONTENT):
        cache.keep(make(tmp_path / "b", "first"))
        (tmp_path / "b" / "rank0" / "weights.bin").write_bytes(damage)  # and so, through the link, the entry's
        assert not _fetch(cache, "first", tmp_path / "c")
        assert not (cache.folder / "first").exists()
    cache.keep(make(tmp_path / "b", "first"))
    (cache.folder / "first").rename(cache.folder / "other")
    assert not _fetch(cache, "other", tmp_path / "c")  # it is not what its name says


def test_what_a_killed_builder_left_is_no_entry(tmp_path: Path, cache: BuildCache) -> None:
    made = make(tmp_path / "b", "first")
    cache.folder.mkdir()
    (cache.folder / ".unfinished" / "rank0").mkdir(parents=True)
    cache.keep(made)
    assert {path.name for path in cache.folder.iterdir()} == {".lock", "first"}


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path / "cache", max_bytes=3 * (CONTENT + 4096))
    for number, identity in enumerate(("one", "two", "three")):
        cache.keep(make(tmp_path / identity, identity))
        os.utime(cache.folder / identity, (number, number))
    assert _fetch(cache, "one", tmp_path / "fetched")  # so that "two" is the oldest
    cache.keep(make(tmp_path / "four", "four"))
    assert {path.name for path in cache.folder.iterdir()} == {".lock", "one", "three", "four"}
    BuildCache(cache.folder, max_bytes=100).keep(make(tmp_path / "five", "five"))  # larger than all of the cache
    assert {path.name for path in cache.folder.iterdir()} == {".lock", "one", "three", "four"}


def test_builders_share_it(tmp_path: Path, cache: BuildCache) -> None:
    """Two processes keep and fetch one identity over and over; neither ever sees a part of it."""
    processes = []
    for name in ("left", "right"):
        make(tmp_path / name / "made", "same")
        command = [sys.executable, "-c", _KEEP_AND_FETCH, str(cache.folder), str(tmp_path / name)]
        processes.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True))
    for process in processes:
        assert (process.communicate()[1], process.returncode) == ("", 0)


def test_a_cache_that_can_not_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made = make(tmp_path / "b", "first")
    with pytest.raises(BundleError, match=r"is built, but the build cache .*; or|give --no-cache"):
        BuildCache(tmp_path / "file" / "cache").keep(made)
    assert open_bundle(tmp_path / "b").manifest == made.manifest


def test_a_cache_that_can_not_be_read_is_said(tmp_path: Path, cache: BuildCache) -> None:
    cache.keep(make(tmp_path / "b", "first"))
    (cache.folder / ".lock").unlink()
    (cache.folder / ".lock").mkdir()  # no user can open it, as on a disk that is mounted to be read only
    with pytest.raises(BundleError, match=r"the build cache .* can't be used \(.*\): mend that, or give --no-cache"):
        _fetch(cache, "first", tmp_path / "c")
    assert not (tmp_path / "c").exists()
