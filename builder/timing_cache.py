"""The tactics that TensorRT timed before, kept so that a build can be repeated; pinned by digest (offline)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from ostinato.engines.errors import BuildError
from ostinato.engines.tensorrt_options import TensorRTOptions

FILE_NAME = "timing.cache"


@dataclass(frozen=True)
class TimingCache:
    """`is_pinned`: the recipe names it, so that a build takes no tactic that is not in it."""

    content: bytes = b""
    is_pinned: bool = False

    def grown(self, content: bytes, is_rebuilt: bool) -> TimingCache:
        """After one engine: what the next starts from. One that had to be rebuilt is no longer the pinned one."""
        return replace(self, content=content, is_pinned=self.is_pinned and not is_rebuilt)


def starting_cache(options: TensorRTOptions, previous_rank: Path | None) -> TimingCache:
    """The pinned cache, or what the rank before has timed, or an empty one.

    Raises BuildError for a pinned file that is not there, or is another than the recipe says.
    """
    if options.timing_cache:
        return TimingCache(_pinned(Path(options.timing_cache), options.timing_cache_sha256), is_pinned=True)
    if previous_rank is not None and (path := previous_rank / FILE_NAME).is_file():
        return TimingCache(path.read_bytes())
    return TimingCache()


def pinning_note(path: Path, name: str) -> str:
    """How a recipe repeats this build."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"to repeat this build, pin tensorrt.timing_cache to {name}, timing_cache_sha256 {digest}"


def _pinned(path: Path, digest: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BuildError(
            f"tensorrt.timing_cache {path} can't be read ({error.strerror}): give the file, or drop the key"
        ) from None
    if (found := hashlib.sha256(content).hexdigest()) != digest:
        raise BuildError(
            f"tensorrt.timing_cache {path} has digest {found}, the recipe says {digest}: give the pinned file, or pin "
            "this one with timing_cache_sha256"
        )
    return content
