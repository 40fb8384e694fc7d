"""Runs the graphs of all ranks together with ONNX Runtime: each is cut at its collectives, and all wait there.

rank 0   piece 0 ─▶ ┐        ┌─▶ piece 1 ─▶ ┐
                    AllReduce               AllReduce …      stage 0, then hidden states go to stage 1
rank 1   piece 0 ─▶ ┘        └─▶ piece 1 ─▶ ┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from ostinato.engines.shards import Shards
from ostinato.plugins.collectives import all_gather, all_reduce

_OUTCOMES = {"AllReduce": all_reduce, "AllGather": all_gather}
Values = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """What runs between two collectives, and the collective that it runs up to (None after the last)."""

    session: onnxruntime.InferenceSession | None  # None where a collective follows on another at once
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    collective: onnx.NodeProto | None


class Lockstep:
    """All ranks of a model. `folders`: rank → the folder that holds its model.onnx and weights."""

    def __init__(self, shards: Shards, folders: Sequence[Path]) -> None:
        self.shards = shards
        self.pieces = [
            cut(folder, {"logits"} if shard.is_last_stage else set())
            for shard, folder in zip(shards.all(), folders, strict=True)
        ]

    def run(self, feeds: Mapping[str, Any], caches: Sequence[Values]) -> Values:
        """One step. `feeds`: what every rank is given; `caches`: rank → its own caches, renewed in place.

        Returns what the last stage gives, its caches left out.
        """
        given: Values = dict(feeds)
        width = self.shards.tensor_parallel
        for first in range(0, self.shards.num_ranks, width):
            ranks = range(first, first + width)
            held: list[Values] = [given | caches[rank] for rank in ranks]
            self._run_stage(ranks, held)
            for values, rank in zip(held, ranks, strict=True):
                caches[rank].update({name: values[f"{name}.out"] for name in caches[rank]})
            if "hidden_out" in held[0]:
                given = {**feeds, "hidden_in": held[0]["hidden_out"]}
        return held[0]

    def _run_stage(self, ranks: range, held: list[Values]) -> None:
        for pieces in zip(*(self.pieces[rank] for rank in ranks), strict=True):
            for piece, values in zip(pieces, held, strict=True):
                if piece.session is not None:
                    found = piece.session.run(piece.outputs, {name: values[name] for name in piece.inputs})
                    values.update(zip(piece.outputs, found, strict=True))
            meet([piece.collective for piece in pieces], held)


def meet(collectives: Sequence[onnx.NodeProto | None], held: list[Values]) -> None:
    """One collective of all ranks, which must have come to the same one; None where the graphs end."""
    nodes = [node for node in collectives if node is not None]
    if not nodes:
        return
    kinds = {(node.op_type, node.attribute[0].i) for node in nodes}
    assert len(nodes) == len(held), "some ranks wait, others are done"
    assert kinds == {(nodes[0].op_type, len(held))}, kinds
    outcome = _OUTCOMES[nodes[0].op_type]([values[node.input[0]] for node, values in zip(nodes, held, strict=True)])
    for node, values in zip(nodes, held, strict=True):
        values[node.output[0]] = outcome


def cut(folder: Path, also_wanted: set[str]) -> list[Piece]:
    """Cut model.onnx at its collectives; `also_wanted` names inner values to keep."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    parts: list[tuple[list[onnx.NodeProto], onnx.NodeProto | None]] = []
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type in _OUTCOMES:
            parts.append((nodes, node))
            nodes = []
        else:
            nodes.append(node)
    parts.append((nodes, None))
    wanted = {value.name for value in model.graph.output} | also_wanted
    pieces: list[Piece] = []
    for part, collective in reversed(parts):  # backwards, so that it is known what later pieces want
        wanted |= set(collective.input) if collective else set()
        pieces.insert(0, _piece(model, part, collective, wanted, folder / f"piece_{len(pieces):03}.onnx"))
        wanted |= set(pieces[0].inputs)
    return pieces


def _piece(
    model: onnx.ModelProto, nodes: list[Any], collective: onnx.NodeProto | None, wanted: set[str], path: Path
) -> Piece:
    read = {name for node in nodes for name in node.input}
    made = [name for node in nodes for name in node.output]
    stored = [tensor for tensor in model.graph.initializer if tensor.name in read]
    inputs = tuple(sorted(read - set(made) - {tensor.name for tensor in stored}))
    outputs = tuple(name for name in made if name in wanted)
    session = _session(model, nodes, stored, (inputs, outputs), path) if nodes else None
    return Piece(session, inputs, outputs, collective)


def _session(
    model: onnx.ModelProto, nodes: list[Any], stored: list[Any], ends: tuple[tuple[str, ...], ...], path: Path
) -> onnxruntime.InferenceSession:
    """A part of a model by itself, in a file beside the weights."""
    known = {value.name: value for value in model.graph.input}
    # Only type and rank count; what a cut brings is float32.
    inputs = [known.get(name) or _floats(name) for name in ends[0]]
    graph = onnx.helper.make_graph(nodes, "piece", inputs, [_untyped(name) for name in ends[1]], stored)
    used = {node.op_type for node in nodes}
    part = onnx.helper.make_model(
        graph,
        opset_imports=model.opset_import,
        ir_version=model.ir_version,
        functions=[function for function in model.functions if function.name in used],
    )
    path.write_bytes(part.SerializeToString())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])


def _floats(name: str) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)


def _untyped(name: str) -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto(name=name)
