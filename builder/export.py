"""Traces the decoder into one ONNX graph whose weights are still only names (offline)."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ostinato.engines.io_table import Tensor, rank_inputs
from ostinato.engines.shards import WHOLE, Shard
from ostinato.engines.sizes import ModelSizes

from .config import DecoderConfig
from .model import Decoder
from .shard import first_id

FIRST_ID = "embedding.first_id"
OPSET = 23  # the first with RMSNormalization
# Any distinct sizes above 1 do: the trace only needs dimensions that it can't take for each other or for constants.
_EXAMPLE = {"T": 11, "B": 3, "B+1": 4, "S": 2, "N": 5, "P": 7, "M": 6, "K": 8}


def onnx_from_config(config: DecoderConfig, block_size: int, rope_rows: int, shard: Shard = WHOLE) -> ir.Model:
    """The portable graph of one rank; parameters and the two rope tables are graph inputs without data, after the
    others.

    Traced on tensors that have a shape and no memory, so no weight is loaded and none can be taken for another.
    Raises BuildError where the model can't be cut so.
    """
    return for_rank(stage_onnx(config, block_size, rope_rows, shard), config, shard)


def stage_onnx(config: DecoderConfig, block_size: int, rope_rows: int, shard: Shard) -> ir.Model:
    """The graph that all ranks of a stage share: it takes time to trace, and `for_rank` makes each rank's of it."""
    with _quiet_exporter(), FakeTensorMode():
        decoder = Decoder(config, rope_rows, shard).eval().requires_grad_(False)
        inputs = rank_inputs(config.sizes, block_size, shard)
        program = torch.onnx.export(
            decoder,
            tuple(_example(tensor, config.sizes) for tensor in inputs),
            dynamo=True,
            dynamic_shapes=(tuple(_dynamic(tensor) for tensor in inputs),),
            opset_version=OPSET,
            optimize=False,  # its constant folding would ask for the weights' values: see passes.fold_constants
            verbose=False,
        )
    return _weights_as_inputs(program.model)


def for_rank(stage: ir.Model, config: DecoderConfig, shard: Shard) -> ir.Model:
    """A copy of a stage's graph that knows which ids of the vocabulary its rank holds."""
    model = stage.clone()
    for value in [value for value in model.graph.inputs if value.name == FIRST_ID]:
        model.graph.inputs.remove(value)
        value.const_value = ir.tensor(np.array(first_id(config.sizes, shard), np.int32), name=FIRST_ID)
        model.graph.initializers[FIRST_ID] = value
    return model


def _example(tensor: Tensor, sizes: ModelSizes) -> Any:
    known = _EXAMPLE | {"V": sizes.vocab_size, "W": -(-sizes.vocab_size // 32)}
    shape = [size if isinstance(size, int) else known[size] for size in tensor.shape]
    return torch.zeros(shape, dtype=torch.int32 if tensor.dtype == "int32" else torch.float32)


def _dynamic(tensor: Tensor) -> dict[int, Any]:
    """Which axes vary between steps; V and W are the model's own."""
    return {
        axis: torch.export.Dim.DYNAMIC
        for axis, size in enumerate(tensor.shape)
        if isinstance(size, str) and size not in ("V", "W")
    }


def _weights_as_inputs(model: ir.Model) -> ir.Model:
    """Turn initializers without memory into graph inputs: passes then see values that they can't fold."""
    for name in list(model.graph.initializers):
        value = model.graph.initializers.pop(name)
        value.const_value = None
        model.graph.inputs.append(value)
    return model


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Hide the exporter's notices about its own libraries: none is about the model."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
