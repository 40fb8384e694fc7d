"""The kernels of target x86 are compiled once, and what the compiler refuses is told in its words."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from ostinato.builder.c_compiler import SOURCES, compile_kernels
from ostinato.builder.kernel_cache import MAX_ENTRIES, KernelCache
from ostinato.engines.errors import BuildError


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (
            "int f(void) { return missing + other; }",
            r"x86 \(exit code 1\): .*error: use of undeclared identifier 'missing'; .*'other'",
        ),
        (None, "holds no C file: install ostinato again"),
    ],
)
def test_what_the_compiler_refuses_is_told_in_its_words(tmp_path: Path, source: str | None, wanted: str) -> None:
    (tmp_path / "x86").mkdir()
    if source is not None:
        (tmp_path / "x86" / "a.c").write_text(source)
    with pytest.raises(BuildError, match=wanted) as caught:
        compile_kernels(tmp_path, tmp_path / "x86")
    assert "\n" not in str(caught.value)


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho '/usr/bin/python: No module named ziglang' >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    (tmp_path / "a.c").write_text("int a;")
    with pytest.raises(BuildError, match=r"is not installed: run `pip install 'ostinato\[build\]'`"):
        compile_kernels(tmp_path, tmp_path)


def test_kernels_are_compiled_once_for_the_same_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, compiled = KernelCache(tmp_path / "cache"), []

    def compile_anew(contents: Mapping[str, bytes], sources: Path) -> bytes:
        compiled.append(sources)
        return b"of %d files" % len(contents)

    monkeypatch.setattr("ostinato.builder.c_compiler._compiled", compile_anew)
    for _ in range(2):
        assert compile_kernels(tmp_path, cache=cache).read_bytes().startswith(b"of ")
    assert compiled == [SOURCES]
    (entry,) = cache.folder.iterdir()
    for damaged in (entry.read_bytes()[:-1], b"", entry.read_bytes() + b"x"):
        entry.write_bytes(damaged)
        compile_kernels(tmp_path, cache=cache)
    assert len(compiled) == 4
    shutil.copytree(SOURCES, tmp_path / "x86")
    (tmp_path / "x86" / "inline.h").write_text("// another\n")
    compile_kernels(tmp_path, tmp_path / "x86", cache)
    assert len(compiled) == 5
    assert len(list(cache.folder.iterdir())) == 2


def test_the_cache_of_kernels_is_bounded_and_never_in_the_way(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "cache")
    for number in range(MAX_ENTRIES + 3):
        cache.keep(str(number), b"library")
        assert cache.fetch("0" if number < MAX_ENTRIES else "16") == b"library"
    assert len(list(cache.folder.iterdir())) == MAX_ENTRIES
    assert cache.fetch("1") is None
    (tmp_path / "file").write_text("no folder")
    useless = KernelCache(tmp_path / "file")
    useless.keep("0", b"library")
    assert useless.fetch("0") is None
