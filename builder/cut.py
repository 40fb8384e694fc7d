"""Cuts a graph at our operators into segments of standard operators, in the order that they run (offline).

A node's level is the greatest level among what it reads; reading an operator's output adds one. Level by level, the
segment's nodes run first and the operators that read its outputs after them, so layers + 1 levels for a plain model:

    segment_00 ─▶ PagedAttention ─▶ segment_01 ─▶ … ─▶ segment_NN ─▶ StatefulSampling
        └── residual, rows of cosines and sines ──▶

What crosses a cut is the step's own: no table does, and no weight stands in two segments. A weight that two segments
read (a tied embedding) is shared: it is an input of both, and stored once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from ostinato.plugins.operator_schema import DOMAIN


@dataclass(frozen=True)
class Segment:
    """Standard nodes that run as one engine.

    `inputs`: graph inputs, values that cross a cut, and shared parameters. `outputs`: what operators, later segments
    or the graph's caller read. `parameters`: weights that stand inside; `constants` are the graph's own small ones.
    `names`: values that the engine calls something else than the graph does.
    """

    name: str
    nodes: tuple[ir.Node, ...]
    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]
    parameters: tuple[ir.Value, ...]
    constants: tuple[ir.Value, ...]
    names: Mapping[str, str] = field(default_factory=dict)

    def tensor(self, value: ir.Value) -> str:
        """What the engine calls a value."""
        return self.names.get(value.name, str(value.name))


@dataclass(frozen=True)
class Cut:
    """A graph in pieces. `parts`: segments and operator nodes, in order. `shared`: parameters bound from outside."""

    parts: tuple[Segment | ir.Node, ...]
    shared: tuple[ir.Value, ...]

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(part for part in self.parts if isinstance(part, Segment))

    @property
    def operators(self) -> tuple[ir.Node, ...]:
        return tuple(part for part in self.parts if isinstance(part, ir.Node))


def cut_at_operators(model: ir.Model, parameters: Collection[str], *, share_all: bool = False) -> Cut:
    """Cut `model`, whose nodes stand in an order that they can run in.

    `parameters`: the graph inputs that are weights or tables. `share_all`: bind every one of them from outside, so
    that engines hold no weight.
    """
    graph = model.graph
    levels = _levels(graph)
    by_level: dict[int, list[ir.Node]] = defaultdict(list)
    operators: dict[int, list[ir.Node]] = defaultdict(list)
    for node in graph:
        (operators if is_operator(node) else by_level)[levels[node]].append(node)
    held = {value.name: value for value in graph.inputs if value.name in parameters}
    readers = Counter(name for nodes in by_level.values() for name in {v.name for v in _reads(nodes) if v.name in held})
    shared = {name for name in held if readers[name] and (share_all or readers[name] > 1)}
    parts: list[Segment | ir.Node] = []
    width = max(2, len(str(len(by_level))))
    count = 0
    for level in range(max(levels.values(), default=0) + 1):
        if by_level[level]:
            parts.append(_segment(f"segment_{count:0{width}}", by_level[level], set(held) - shared))
            count += 1
        parts += operators[level]
    found = Cut(tuple(parts), tuple(held[name] for name in held if name in shared))
    _check(found)
    return found


def is_operator(node: ir.Node) -> bool:
    """One of ours, which no engine of standard operators holds."""
    return bool(node.domain == DOMAIN)


def _levels(graph: ir.Graph) -> dict[ir.Node, int]:
    levels: dict[ir.Node, int] = {}
    for node in graph:
        producers = [value.producer() for value in node.inputs if value is not None]
        levels[node] = max((levels[p] + is_operator(p) for p in producers if p is not None), default=0)
    return levels


def _reads(nodes: Collection[ir.Node]) -> list[ir.Value]:
    """What the nodes read and do not make themselves, each once, in order."""
    made = {id(value) for node in nodes for value in node.outputs}
    return list({v.name: v for node in nodes for v in node.inputs if v is not None and id(v) not in made}.values())


def _segment(name: str, nodes: list[ir.Node], inside: set[str]) -> Segment:
    members = set(nodes)
    reads = _reads(nodes)
    return Segment(
        name=name,
        nodes=tuple(nodes),
        inputs=tuple(v for v in reads if v.name not in inside and not v.is_initializer()),
        outputs=tuple(v for node in nodes for v in node.outputs if _leaves(v, members)),
        parameters=tuple(v for v in reads if v.name in inside),
        constants=tuple(v for v in reads if v.is_initializer()),
    )


def _leaves(value: ir.Value, members: set[ir.Node]) -> bool:
    return value.is_graph_output() or any(node not in members for node, _ in value.uses())


def _check(found: Cut) -> None:
    """Our own promise: no weight in two segments, and nothing of fixed size crosses a cut but what is shared."""
    homes = Counter(value.name for segment in found.segments for value in segment.parameters)
    assert all(count == 1 for count in homes.values()), f"weights in two segments: {homes.most_common(1)}"
    shared = {value.name for value in found.shared}
    for segment in found.segments:
        for value in segment.inputs:
            fixed = value.shape is not None and all(isinstance(size, int) for size in value.shape)
            assert value.shape is not None, f"{value.name} crosses a cut and has no shape"
            assert value.name in shared or not fixed, f"{value.name} is a table that crosses a cut"
