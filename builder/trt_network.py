"""A graph as a TensorRT network: parsed, our operators as plugins, collectives as native layers (offline).

TensorRT's parser has no collective. Each stands in the graph as an Identity of a known name; once parsed, a native
layer is put before it, so the Identity keeps its readers, its name and, if it is an output, its mark:

    x ─▶ Identity "all_reduce_0" ─▶ …      becomes      x ─▶ DistCollective ─▶ Identity "all_reduce_0" ─▶ …
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorrt as trt

from ostinato.engines.errors import BuildError

from .engine_job import EngineJob
from .trt_collective import Collective
from .trt_journal import Journal

_NO_ROOT = -1
_EVERY_RANK: list[int] = []  # of the communicator that the runtime sets, which is the tensor-parallel group's
_OPERATIONS = {
    "AllReduce": (trt.CollectiveOperation.ALL_REDUCE, trt.ReduceOperation.SUM),
    "AllGather": (trt.CollectiveOperation.ALL_GATHER, trt.ReduceOperation.NONE),
}


def parse_network(builder: Any, job: EngineJob, collectives: Mapping[str, Collective], journal: Journal) -> Any:
    """The strongly typed network of the job's ONNX file; `collectives` by the Identities' names."""
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, journal)
    if not parser.parse_from_file(str(job.model)):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        reason = "; ".join(f"{error.node_name()}: {error.desc()}" for error in errors) or journal.reason
        raise BuildError(
            f"{job.name}: TensorRT {trt.__version__} can't read the graph ({reason}): report it, or build for rtx"
        )
    _place_collectives(network, collectives)
    return network


def _place_collectives(network: Any, collectives: Mapping[str, Collective]) -> None:
    layers = {layer.name: layer for layer in map(network.get_layer, range(network.num_layers))}
    for name, collective in collectives.items():
        if name not in layers:
            raise BuildError(f"TensorRT's parser dropped {name}, which stands for a collective: build with tp 1")
        operation, reduction = _OPERATIONS[collective.operator]
        placeholder = layers[name]
        layer = network.add_dist_collective(placeholder.get_input(0), operation, reduction, _NO_ROOT, _EVERY_RANK)
        if layer is None:
            raise BuildError(f"TensorRT refuses {collective.operator} for {name}: build with tp 1")
        layer.name = f"{name}.{collective.operator}"
        layer.num_ranks = collective.group_size
        placeholder.set_input(0, layer.get_output(0))
