"""StatefulSampling: its oracle by hand, and its function body under ONNX Runtime against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from ostinato.engines.io_table import IN_PROMPT
from ostinato.plugins.fused_sampling_onnx import fused_sampling_function
from ostinato.plugins.operator_schema import DOMAIN, STANDARD_OPSET, VERSION
from ostinato.plugins.stateful_sampling import STATEFUL_SAMPLING, stateful_sampling
from ostinato.plugins.stateful_sampling_onnx import stateful_sampling_function
from tests.sampling_steps import Step, mixed_step, plain_step, with_pads

Array = NDArray[Any]


def run_body(step: Step) -> dict[str, Array]:
    dtypes = {name: onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in step.items()}
    inputs = [
        onnx.helper.make_tensor_value_info(name, dtypes[name], [f"{name}.{axis}" for axis in range(step[name].ndim)])
        for name in STATEFUL_SAMPLING.inputs
    ]
    node = onnx.helper.make_node(
        STATEFUL_SAMPLING.name, STATEFUL_SAMPLING.inputs, STATEFUL_SAMPLING.outputs, domain=DOMAIN
    )
    outputs = [onnx.ValueInfoProto(name=name) for name in STATEFUL_SAMPLING.outputs]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "sampling", inputs, outputs),
        functions=[fused_sampling_function(), stateful_sampling_function()],
        opset_imports=[onnx.helper.make_opsetid("", STANDARD_OPSET), onnx.helper.make_opsetid(DOMAIN, VERSION)],
        ir_version=10,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    results = session.run(list(STATEFUL_SAMPLING.outputs), {name: step[name] for name in STATEFUL_SAMPLING.inputs})
    return {name: np.asarray(result) for name, result in zip(STATEFUL_SAMPLING.outputs, results, strict=True)}


@pytest.mark.parametrize("seed", range(3))
def test_body_equals_oracle(seed: int) -> None:
    """Rows of every kind between poisoned pads. No weight of these is 0 in float32 and not in float64."""
    rng = np.random.default_rng(seed)
    rows = mixed_step(rng, 100, 250)
    step = with_pads(rows, rng.permutation(120)[:100])
    expected, found = stateful_sampling(step), run_body(step)
    assert np.count_nonzero(expected["tokens"] >= 0) > 70
    for name in ("tokens", "top_ids", "counts_out"):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5, rtol=0, err_msg=name)


def test_state_lines_and_masks_by_hand() -> None:
    """Three rows and a pad over shared state: bias, a prompt's token, an output's token, a mask, and the count."""
    logits = np.array([[3, 2, 1, 0]] * 4, np.float32)
    step = plain_step(
        logits,
        slots=3,
        temperature=0,
        state_rows=np.array([3, 1, 0, 2], np.int32),
        repetition=[1, 4, 9, 1],
        presence=[0, 0, 9, 2],
        mask_rows=[-1, -1, 77, 2],
        num_logprobs=[0, 1, 3, -1],
    )
    step["bias_ids"][3, 0], step["bias_values"][3, 0] = 3, 5  # row 0: token 3 wins
    step["counts"][1, 0] = IN_PROMPT  # row 1: token 0 is divided by 4, token 1 wins
    step["counts"][2, 1] = 1  # row 3: token 0 is masked, 1 is penalised, 2 wins
    step["allowed"][2] = 0b1110
    for sample in (stateful_sampling, run_body):
        result = sample(step)
        assert result["tokens"].tolist() == [3, 1, -1, 2]
        assert np.isnan(result["logprobs"]).tolist() == [False, False, True, True]
        assert result["top_ids"][:, 0].tolist() == [-1, 1, -1, -1]
        assert np.isnan(result["top_logprobs"]).sum() == result["top_logprobs"].size - 1
        grown = result["counts_out"] - step["counts"]
        assert np.argwhere(grown).tolist() == [[1, 1], [2, 2], [3, 3]]
        assert grown.sum() == 3
