"""Whatever is flipped, cut, swapped, removed or added in a bundle, it is refused with what was found and expected."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ostinato.engines.bundle import open_bundle
from ostinato.engines.errors import BundleError
from ostinato.engines.manifest import FILE_NAME

from .made import make, make_gpu, make_x86, sealed

_BOTH = re.compile(
    r"has digest \w+, the manifest says \w+|was changed|is not JSON|can't be read|not laid out|schema version"
)


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _refused(path: Path, match: str | re.Pattern[str]) -> str:
    with pytest.raises(BundleError, match=match) as caught:
        open_bundle(path)
    assert "\n" not in str(caught.value)  # it fits one line of a log
    return str(caught.value)


@pytest.mark.parametrize("build", [make, make_gpu, make_x86])
def test_300_single_flipped_bytes(tmp_path: Path, build: Callable[[Path], object]) -> None:
    build(tmp_path / "b")
    rng = random.Random(7)
    files = _files(tmp_path / "b")
    if build is make_gpu:
        kinds = {".json", ".bin", ".engine", ".onnx", ".cubin"}
        assert {file.suffix for file in files} == kinds
        assert {"manifest.json", "program.json", "tokenizer.json"} <= {file.name for file in files}
    for trial in range(300):
        file = files[trial % len(files)]
        sound = file.read_bytes()
        place = rng.randrange(len(sound))
        flip = rng.choice([1 << rng.randrange(8), rng.randrange(1, 256)])
        file.write_bytes(sound[:place] + bytes([sound[place] ^ flip]) + sound[place + 1 :])
        message = _refused(tmp_path / "b", _BOTH)
        assert file.name in message
        file.write_bytes(sound)
    open_bundle(tmp_path / "b")


def test_every_byte_of_a_manifest_counts(tmp_path: Path) -> None:
    make(tmp_path / "b")
    file = tmp_path / "b" / FILE_NAME
    sound = file.read_bytes()
    for place in range(0, len(sound), 7):
        for other in (b" ", b"\n", b"0"):
            if sound[place : place + 1] != other:
                file.write_bytes(sound[:place] + other + sound[place + 1 :])
                _refused(tmp_path / "b", "build the bundle again")


def test_truncated_files(tmp_path: Path) -> None:
    trials = _cut_every_file(make(tmp_path / "a").path) + _cut_every_file(make_gpu(tmp_path / "b").path)
    trials += _cut_every_file(make_x86(tmp_path / "c").path)
    assert trials >= 50


def _cut_every_file(path: Path) -> int:
    """Cut to nothing, to one byte, in half and by one byte; returns how many cuts that were."""
    trials = 0
    for file in _files(path):
        sound = file.read_bytes()
        for keep in sorted({0, 1, len(sound) // 2, len(sound) - 1}):
            file.write_bytes(sound[:keep])
            if file.name == FILE_NAME:
                _refused(path, "is not JSON|not laid out")
            else:
                _refused(path, f"{file.name} has {keep} bytes, the manifest says {len(sound)}")
            trials += 1
        file.write_bytes(sound)
    open_bundle(path)
    return trials


def test_removed_files_and_folders(tmp_path: Path) -> None:
    make_gpu(tmp_path / "b")
    for file in _files(tmp_path / "b"):
        file.rename(tmp_path / "aside")
        _refused(tmp_path / "b", "no finished bundle" if file.name == FILE_NAME else f"{file.name} is missing")
        (tmp_path / "aside").rename(file)
    for rank in range(2):
        (tmp_path / "b" / f"rank{rank}").rename(tmp_path / "aside")
        _refused(tmp_path / "b", f"no folder rank{rank}, the bundle is for 2 ranks")
        (tmp_path / "aside").rename(tmp_path / "b" / f"rank{rank}")
    open_bundle(tmp_path / "b")


def test_swapped_ranks_are_named(tmp_path: Path) -> None:
    make_gpu(tmp_path / "b")
    ranks = tmp_path / "b" / "rank0", tmp_path / "b" / "rank1"
    _swap(*ranks)
    _refused(tmp_path / "b", r"it is rank1/\S+, wanted is rank0/\S+: were folders swapped\?")
    _swap(*ranks)
    for name in (
        "segment_01.engine",
        "program.json",
        "weights.bin",
        "graphs/segment_00.onnx",
        "kernels/sm_86/attend_0.cubin",
    ):
        _swap(ranks[0] / name, ranks[1] / name)
        _refused(tmp_path / "b", f"it is rank1/{name}, wanted is rank0/{name}")
        _swap(ranks[0] / name, ranks[1] / name)
    shutil.rmtree(ranks[1])
    shutil.copytree(ranks[0], ranks[1])
    _refused(tmp_path / "b", r"it is rank0/\S+, wanted is rank1/\S+")


def _swap(first: Path, second: Path) -> None:
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


@pytest.mark.parametrize(
    "name", ["extra.txt", "rank0/extra.engine", "tokenizer/added_tokens.json", "rank7/program.json"]
)
def test_a_file_that_the_manifest_does_not_list_is_refused(tmp_path: Path, name: str) -> None:
    make_gpu(tmp_path / "b")
    (tmp_path / "b" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "b" / name).write_text("{}")
    _refused(tmp_path / "b", f"holds 1 files that its manifest does not list, such as '{name}'")


def test_links_and_special_files_are_refused(tmp_path: Path) -> None:
    make_gpu(tmp_path / "b")
    engine, outside = tmp_path / "b" / "rank0" / "segment_00.engine", tmp_path / "outside"
    engine.rename(outside)
    engine.symlink_to(outside)
    _refused(tmp_path / "b", "segment_00.engine is a link")
    engine.unlink()
    os.mkfifo(engine)
    _refused(tmp_path / "b", "segment_00.engine is a link or a special file")
    engine.unlink()
    outside.rename(engine)
    (tmp_path / "b" / "rank1").rename(tmp_path / "rank1")
    (tmp_path / "b" / "rank1").symlink_to(tmp_path / "rank1")
    _refused(tmp_path / "b", "rank1 is a link")


@pytest.mark.parametrize("name", ["manifest.json", "rank0/segment_00.engine"])
def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    make_gpu(tmp_path / "b")
    (tmp_path / "b" / name).unlink()
    (tmp_path / "b" / name).mkdir()
    _refused(tmp_path / "b", "is missing|no finished bundle")


def test_a_forged_rank_count_is_refused(tmp_path: Path) -> None:
    make_gpu(tmp_path / "b")
    file = tmp_path / "b" / FILE_NAME
    table = json.loads(file.read_text())
    table["shards"]["pipeline_parallel"] = 10**9
    file.write_text(sealed(table))
    _refused(tmp_path / "b", "lists no file of rank 2, the bundle is for 2000000000 ranks")


def test_a_whole_bundle_opens_from_elsewhere_and_through_a_link(tmp_path: Path) -> None:
    made = make_gpu(tmp_path / "b")
    (tmp_path / "b").rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    assert open_bundle(tmp_path / "link").manifest == made.manifest
