"""Traced graphs, kept on disk between processes and runs: a trace takes seconds, and targets share it (in tests)."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

import onnx_ir as ir
import torch

from ostinato.builder.config import DecoderConfig
from ostinato.builder.export import stage_onnx
from ostinato.builder.identity import _source_digests
from ostinato.engines.manifest import digest_of
from ostinato.engines.shards import Shard

FOLDER = Path(tempfile.gettempdir()) / f"ostinato-traces-{os.getuid()}"


def kept_stage(config: DecoderConfig, block_size: int, rope_rows: int, shard: Shard) -> ir.Model:
    """Takes the place of `export.stage_onnx`; whoever changes the graph takes a copy first, as `for_rank` does."""
    sources = digest_of(_source_digests() | {"torch": torch.__version__})
    stage = (shard.tensor_parallel, shard.pipeline_parallel, shard.stage)
    return _kept(config, block_size, rope_rows, stage, shard, sources)


@cache
def _kept(
    config: DecoderConfig, block_size: int, rope_rows: int, stage: tuple[int, ...], shard: Shard, sources: str
) -> ir.Model:
    named = {"config": repr(config), "sizes": repr((block_size, rope_rows, stage)), "sources": sources}
    path = FOLDER / f"{digest_of(named)[:32]}.onnx"
    if not path.exists():
        FOLDER.mkdir(mode=0o700, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        ir.save(stage_onnx(config, block_size, rope_rows, shard), beside)
        beside.replace(path)  # another process may have been at it too
    return ir.load(path)
