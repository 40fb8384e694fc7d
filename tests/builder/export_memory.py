"""Exports one shard in a process of its own; prints its bytes, and by how much memory grew in and after the trace."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from ostinato.builder.export import onnx_from_config
from ostinato.builder.hf_checkpoint import read_hf_folder
from ostinato.builder.quantize import store_weights
from ostinato.builder.weights import parameters_of, write_model
from ostinato.engines.shards import Shards

ROPE_ROWS = 64


def peak_bytes() -> int:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(checkpoint_folder: Path, out: Path, tensor_parallel: int) -> None:
    start = peak_bytes()
    checkpoint, shard = read_hf_folder(checkpoint_folder), Shards(tensor_parallel).shard(1)
    model = onnx_from_config(checkpoint.config, 32, ROPE_ROWS, shard)
    traced = peak_bytes()
    model = store_weights(model, parameters_of(checkpoint, ROPE_ROWS, shard), "bfloat16")
    print(write_model(model, out, lambda _: None), traced - start, peak_bytes() - traced)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
