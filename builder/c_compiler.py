"""Compiles the C kernels of the `x86` target into one library, with the compiler that a wheel carries (offline).

`ziglang` is clang with the headers of every libc: the library it makes runs on any Linux since glibc 2.17, wherever it
was built.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import ostinato.plugins
from ostinato.engines.decoder_record import KERNEL_FILE
from ostinato.engines.errors import BuildError
from ostinato.engines.manifest import digest_of

from .kernel_cache import KernelCache

SOURCES = Path(*ostinato.plugins.__path__) / "x86"
_TARGET = ("-target", "x86_64-linux-gnu.2.17", "-mcpu=x86_64_v4+avx512vnni")
# No fast-math: a row's bits must not hang on how a loop was vectorized. Products and sums fuse only where it says so.
_FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-sanitize=undefined", "-fvisibility=hidden", "-fPIC", "-pthread")
_STRICT = ("-Wall", "-Wextra", "-Werror")
_LINKING = ("-shared", "-s")
_MAX_SECONDS = 600
_MAX_FAULTS = 3  # of the compiler's that an error tells


def compile_kernels(folder: Path, sources: Path = SOURCES, cache: KernelCache | None = None) -> Path:
    """Write KERNEL_FILE into `folder` and return its path; the same sources are compiled once, and kept in the cache.

    `cache`: None for the user's own. Raises BuildError with the compiler's own words where it refuses, and where it is
    not installed.
    """
    cache = cache or KernelCache()
    contents = {file.name: file.read_bytes() for file in sorted(sources.glob("*.[ch]"))}
    identity = _identity(contents)
    content = cache.fetch(identity)
    if content is None:
        content = _compiled(contents, sources)
        cache.keep(identity, content)
    library = folder / KERNEL_FILE
    library.write_bytes(content)
    return library


def _identity(contents: Mapping[str, bytes]) -> str:
    """A digest of everything that decides the library's bytes."""
    try:
        compiler = version("ziglang")
    except PackageNotFoundError:
        compiler = "not installed"  # compiling says what to do about it
    sources = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    return digest_of({"sources": sources, "compiler": compiler, "options": [*_TARGET, *_FLAGS, *_LINKING]})


def _compiled(contents: Mapping[str, bytes], sources: Path) -> bytes:
    """The library. Files are named relative to a folder of their own, so that no place on this disk gets into it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "x86"
        folder.mkdir()
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        names = [name for name in contents if name.endswith(".c")]
        if not names:
            raise BuildError(f"{sources} holds no C file: install ostinato again")
        done = _run([*names, "-o", KERNEL_FILE], folder, _environment(Path(scratch)))
        library = folder / KERNEL_FILE
        if done.returncode or not library.is_file():
            raise BuildError(_refusal(done, sources))
        return library.read_bytes()


def _run(arguments: list[str], folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ziglang", "cc", *_TARGET, *_FLAGS, *_STRICT, *_LINKING, *arguments]
    try:
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_MAX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"the C compiler did not end in {_MAX_SECONDS} s: is the machine overloaded?") from None


def _refusal(done: subprocess.CompletedProcess[str], sources: Path) -> str:
    if "No module named ziglang" in done.stderr:
        return "ziglang, whose clang compiles the kernels, is not installed: run `pip install 'ostinato[build]'`"
    lines = done.stderr.strip().splitlines()
    faults = [line for line in lines if "error:" in line][:_MAX_FAULTS] or lines[-1:] or ["it said nothing"]
    return f"the C compiler refused {sources} (exit code {done.returncode}): {'; '.join(faults)}"


def _environment(scratch: Path) -> Mapping[str, str]:
    """Nothing of the caller's: an own cache, so that nothing is left behind and nobody else's is trusted."""
    caches = {name: str(scratch / name.lower()) for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    return {"PATH": "/usr/bin:/bin", "HOME": str(scratch), "TMPDIR": str(scratch), **caches}
