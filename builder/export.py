"""Traces the decoder into one ONNX graph whose weights are still only names (offline)."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ostinato.engines.io_table import Tensor, engine_inputs
from ostinato.engines.sizes import ModelSizes

from .config import DecoderConfig
from .model import Decoder

OPSET = 23  # the first with RMSNormalization
# Any distinct sizes above 1 do: the trace only needs dimensions that it can't take for each other or for constants.
_EXAMPLE = {"T": 11, "B": 3, "B+1": 4, "S": 2, "N": 5, "P": 7, "M": 6, "K": 8}


def onnx_from_config(config: DecoderConfig, block_size: int, rope_rows: int) -> ir.Model:
    """The whole portable graph; parameters and the two rope tables are graph inputs without data, after the others.

    Traced on tensors that have a shape and no memory, so no weight is loaded and none can be taken for another.
    """
    with _quiet_exporter(), FakeTensorMode():
        decoder = Decoder(config, rope_rows).eval().requires_grad_(False)
        inputs = engine_inputs(config.sizes, block_size)
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
