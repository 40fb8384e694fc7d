"""The x86 kernels compiled for tests, with what calls single ones from Python (once a process)."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

from ostinato.builder.c_compiler import SOURCES, compile_kernels

_FOLDER = tempfile.TemporaryDirectory(prefix="ostinato-kernels-")  # removed when the process ends


@cache
def compiled_kernels() -> Path:
    """kernels.so of a bundle, with `plugins/x86_probe.c` besides."""
    folder = Path(_FOLDER.name)
    sources = folder / "sources"
    shutil.copytree(SOURCES, sources)
    shutil.copy(Path(__file__).parent / "plugins" / "x86_probe.c", sources)
    return compile_kernels(folder, sources)
