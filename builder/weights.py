"""Weights on their way into a bundle: made one at a time, written aligned into one file beside the graph (offline)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ostinato.engines.errors import CheckpointError
from ostinato.engines.shards import WHOLE, Shard

from .checkpoint import F32, Checkpoint
from .model import rope_tables
from .shard import ParameterSlice, weight_slices

MODEL_FILE, WEIGHT_FILE = "model.onnx", "weights.bin"
ALIGNMENT = 64  # bytes: a cache line, and the widest vector load
_INLINE_BYTES = 1024  # smaller tensors stay in the graph file

Parameters = Mapping[str, Callable[[], F32]]


def parameters_of(checkpoint: Checkpoint, rope_rows: int, shard: Shard = WHOLE) -> Parameters:
    """Every parameter of a rank's decoder by name, as a function that makes it in float32.

    Only what the rank holds of a tensor is read. Raises BuildError where the model can't be cut so.
    """
    made: dict[str, Callable[[], F32]] = {
        name: partial(read_parameter, checkpoint, part)
        for name, part in weight_slices(checkpoint.config, shard).items()
    }
    for index, name in enumerate(("rope_cos", "rope_sin")):
        made[name] = partial(_rope_table, checkpoint, rope_rows, index)
    return made


def read_parameter(checkpoint: Checkpoint, wanted: ParameterSlice) -> F32:
    """One parameter in float32; refuses NaN and infinity in what it reads."""
    whole: F32 | None = None
    begin = 0
    for name, part in wanted.sources:
        read = checkpoint.read(name, part)
        if not np.isfinite(read).all():
            raise CheckpointError(f"{checkpoint.path}: {name} holds NaN or infinity: publish sound weights")
        if read.shape == wanted.shape:
            return read
        whole = np.zeros(wanted.shape, np.float32) if whole is None else whole
        whole[begin : begin + len(read)] = read
        begin += len(read)
    return np.zeros(wanted.shape, np.float32) if whole is None else whole


def _rope_table(checkpoint: Checkpoint, rows: int, index: int) -> F32:
    table: F32 = rope_tables(checkpoint.config, rows)[index].numpy()
    return table


def write_model(model: ir.Model, folder: Path, wrote: Callable[[int], None]) -> int:
    """Write MODEL_FILE and WEIGHT_FILE; returns the bytes of weights. `wrote` hears the bytes of each tensor.

    Tensors are evaluated one after another, so that memory holds one at a time.
    """
    total = 0
    with (folder / WEIGHT_FILE).open("wb") as file:
        for value in model.graph.initializers.values():
            tensor = value.const_value
            assert tensor is not None, f"{value.name} has no data"
            data = tensor.tobytes()
            total += len(data)
            wrote(len(data))
            if len(data) < _INLINE_BYTES:
                value.const_value = _inline(value, tensor, data)
                continue
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            offset = file.tell()
            file.write(data)
            value.const_value = ir.ExternalTensor(
                location=WEIGHT_FILE,
                offset=offset,
                length=len(data),
                dtype=tensor.dtype,
                shape=tensor.shape,
                name=value.name,
                base_dir=folder,
            )
    proto = ir.serde.serialize_model(model)
    (folder / MODEL_FILE).write_bytes(proto.SerializeToString(deterministic=True))
    return total


def _inline(value: ir.Value, tensor: Any, data: bytes) -> Any:
    """The same tensor with its bytes in the graph file."""
    proto = onnx.TensorProto(
        name=value.name, data_type=int(tensor.dtype), dims=list(tensor.shape.numpy()), raw_data=data
    )
    return ir.serde.deserialize_tensor(proto)
