"""Graph pass for GPU targets: sampling takes its device form, whose counts and bias stay on the device (offline)."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from ostinato.engines.io_table import DEVICE_SAMPLING_INPUTS, OUTPUTS, SAMPLING_INPUTS, STATE_INPUTS, Tensor
from ostinato.engines.sizes import MAX_LOGIT_BIAS, MAX_LOGPROBS
from ostinato.plugins.operator_schema import DOMAIN, VERSION
from ostinato.plugins.stateful_sampling import STATEFUL_SAMPLING

COUNTS_OUT = "counts.out"
_HOST_FORM = "FusedSampling"
_TYPES = {"int32": ir.DataType.INT32, "float32": ir.DataType.FLOAT}


def sample_on_device(model: ir.Model) -> ir.Model:
    """Replace FusedSampling by StatefulSampling, and the graph's sampling inputs by those of the device form.

    Outputs keep their names and places; the counts as changed come last, as `counts.out`. K and M become the numbers
    that kernels are compiled for. A pipeline stage that samples nothing only loses the inputs.
    """
    graph = model.graph
    node = next((node for node in graph if node.op_type == _HOST_FORM), None)
    if node is not None:
        _replace(graph, node)
    known = {tensor.name for tensor in SAMPLING_INPUTS}
    for value in [value for value in graph.inputs if value.name in known and not value.uses()]:
        graph.inputs.remove(value)
    return model


def _replace(graph: ir.Graph, node: ir.Node) -> None:
    logits = node.inputs[0]
    vocab_size = logits.shape[-1]
    assert isinstance(vocab_size, int), "logits have the model's own vocabulary"
    inputs = _values((*DEVICE_SAMPLING_INPUTS, *STATE_INPUTS), vocab_size)
    outputs = _values(OUTPUTS, vocab_size)
    counts = _values((tensor for tensor in STATE_INPUTS if tensor.name == "counts"), vocab_size)
    counts[0].name = COUNTS_OUT
    by_name = {value.name: value for value in inputs} | {"logits": logits}
    places = {id(value): place for place, value in enumerate(node.outputs)}
    device = ir.node(
        STATEFUL_SAMPLING.name,
        [by_name[name] for name in STATEFUL_SAMPLING.inputs],
        domain=DOMAIN,
        version=VERSION,
        name=STATEFUL_SAMPLING.name,
        outputs=[*outputs, *counts],
    )
    graph.insert_before(node, device)
    for index, value in enumerate(graph.outputs):
        if id(value) in places:
            graph.outputs[index] = outputs[places[id(value)]]
    graph.outputs.append(counts[0])
    graph.remove(node, safe=True)
    known = {tensor.name for tensor in SAMPLING_INPUTS}
    first = next(index for index, value in enumerate(graph.inputs) if value.name in known)
    for value in [value for value in graph.inputs if value.name in known]:
        graph.inputs.remove(value)
    for offset, value in enumerate(inputs):
        graph.inputs.insert(first + offset, value)


def _values(tensors: Iterable[Tensor], vocab_size: int) -> list[ir.Value]:
    """New values of the table's names and types; symbols that stand for the model's or the build's sizes are filled."""
    known = {"V": vocab_size, "W": -(-vocab_size // 32), "K": MAX_LOGPROBS, "M": MAX_LOGIT_BIAS}
    return [
        ir.Value(
            name=tensor.name,
            type=ir.TensorType(_TYPES[tensor.dtype]),
            shape=ir.Shape([size if isinstance(size, int) else known.get(size, size) for size in tensor.shape]),
        )
        for tensor in tensors
    ]
