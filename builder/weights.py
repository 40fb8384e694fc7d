"""Weights on their way into a bundle: made one at a time, written aligned into one file beside the graph (offline)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from .checkpoint import F32, Checkpoint, read_parameter, weight_sources
from .model import rope_tables

MODEL_FILE, WEIGHT_FILE = "model.onnx", "weights.bin"
ALIGNMENT = 64  # bytes: a cache line, and the widest vector load
_INLINE_BYTES = 1024  # smaller tensors stay in the graph file

Parameters = Mapping[str, Callable[[], F32]]


def parameters_of(checkpoint: Checkpoint, rope_rows: int) -> Parameters:
    """Every parameter of the decoder by name, as a function that makes it in float32."""
    made: dict[str, Callable[[], F32]] = {
        name: partial(read_parameter, checkpoint, tensors)
        for name, tensors in weight_sources(checkpoint.config).items()
    }
    for index, name in enumerate(("rope_cos", "rope_sin")):
        made[name] = partial(_rope_table, checkpoint, rope_rows, index)
    return made


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
