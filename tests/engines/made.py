"""A manifest and an unfinished bundle with nothing real in them."""

from __future__ import annotations

import platform
from pathlib import Path

from ostinato.engines.bundle import list_files
from ostinato.engines.manifest import Manifest
from ostinato.engines.sizes import Limits, ModelSizes

SIZES = ModelSizes("llama", 320, 64, 96, 2, 4, 2, 16, 128, sliding_window=8)
LIMITS = Limits(8, 4, 64, 96, 256, (1, 2, 4), (1, 4, 16, 64))


def fill(folder: Path, content: bytes = b"weights" * 100) -> None:
    (folder / "rank0").mkdir()
    (folder / "rank0" / "weights.bin").write_bytes(content)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")


def manifest_of(folder: Path, machine: str = platform.machine()) -> Manifest:
    return Manifest(
        name="made",
        target="cpu",
        identity="0123456789abcdef",
        hardware={"machine": machine},
        weights="int8",
        kv_cache="float32",
        sizes=SIZES,
        limits=LIMITS,
        eos_ids=(256, 257),
        bos_id=None,
        weight_bytes=700,
        kv_bytes_per_block=4096,
        toolchain={"numpy": "2"},
        notes=("a note",),
        files=list_files(folder),
    )
