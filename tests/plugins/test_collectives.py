"""Collectives: the ONNX bodies are the oracles' outcome for ranks that hold the same, so for one rank the identity."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from ostinato.plugins.collectives import ALL_GATHER, ALL_REDUCE, all_gather, all_reduce
from ostinato.plugins.collectives_onnx import all_gather_function, all_reduce_function
from ostinato.plugins.operator_schema import DOMAIN, OperatorSchema

CASES = [(ALL_REDUCE, all_reduce_function, all_reduce), (ALL_GATHER, all_gather_function, all_gather)]


def _model(schema: OperatorSchema, function: onnx.FunctionProto, group_size: int, dims: tuple[int, ...]) -> Any:
    node = onnx.helper.make_node(schema.name, ["x"], ["y"], domain=DOMAIN, group_size=group_size)
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT16, dims)
    graph = onnx.helper.make_graph([node], "one", [x], [onnx.ValueInfoProto(name="y")])
    imports = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(DOMAIN, 1)]
    return onnx.helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=10)


@pytest.mark.parametrize(("schema", "function", "oracle"), CASES)
@pytest.mark.parametrize("group_size", [1, 2, 4])
@pytest.mark.parametrize("dims", [(5,), (1, 3, 4)])
def test_the_body_is_the_outcome_of_equal_ranks(
    schema: OperatorSchema, function: Any, oracle: Any, group_size: int, dims: tuple[int, ...]
) -> None:
    x = np.random.default_rng(0).integers(-9, 9, size=dims).astype(np.float16)
    (y,) = ReferenceEvaluator(_model(schema, function(), group_size, dims)).run(None, {"x": x})
    np.testing.assert_array_equal(y, oracle([x] * group_size))
    assert y.dtype == np.float16
    if group_size == 1:
        np.testing.assert_array_equal(y, x)


def test_every_rank_counts_and_keeps_its_place() -> None:
    parts = [np.full((2, 3), rank, np.float32) for rank in (1, 10, 100)]
    np.testing.assert_array_equal(all_reduce(parts), np.full((2, 3), 111, np.float32))
    assert all_gather(parts)[:, 0].tolist() == [1, 1, 10, 10, 100, 100]
