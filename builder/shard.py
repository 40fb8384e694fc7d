"""How one rank takes its part of a checkpoint: the slicing table, and the sizes that are left (offline).

    parameter            part of one tensor-parallel slice          its layer then gives
    embedding, head      rows: ids of the vocabulary                a share to sum; logits to gather
    qkv, gate_up         rows: whole heads; intermediate            its own heads and intermediate
    attention_out, down  columns: the inputs that it has            a share to sum
    norms                everything                                 –

A pipeline stage holds the layers of its range; the first holds the embedding, the last the final norm and the head.
The scheme is that of Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.engines.errors import BuildError
from ostinato.engines.shards import WHOLE, Shard
from ostinato.engines.sizes import ModelSizes

from .checkpoint import Part, source_shapes, weight_sources
from .config import DecoderConfig

_BY_OUTPUTS, _BY_INPUTS, _BY_VOCABULARY = ("qkv", "gate_up"), ("attention_out", "down"), ("embedding", "head")


@dataclass(frozen=True)
class ParameterSlice:
    """One rank's decoder parameter: checkpoint tensors, or parts of them (None: all), stacked along axis 0.

    Rows of `shape` that the sources do not reach are zeros.
    """

    shape: tuple[int, ...]
    sources: tuple[tuple[str, Part | None], ...]


def shard_sizes(sizes: ModelSizes, shard: Shard) -> ModelSizes:
    """The sizes of one rank; heads, KV heads, intermediate and layers are its own.

    The vocabulary stays the model's: ids and gathered logits are; `vocab_rows` says what a table holds of it.
    Raises BuildError where the model can't be cut so.
    """
    _check(sizes, shard)
    return replace(
        sizes,
        intermediate_size=sizes.intermediate_size // shard.tensor_parallel,
        num_layers=len(shard.layers(sizes.num_layers)),
        num_q_heads=sizes.num_q_heads // shard.tensor_parallel,
        num_kv_heads=len(shard.kv_heads(sizes.num_kv_heads)),
    )


def vocab_rows(sizes: ModelSizes, shard: Shard) -> int:
    """Rows of the embedding and of the head on every rank; the last ranks fill up with zeros."""
    return -(-sizes.vocab_size // shard.tensor_parallel)


def first_id(sizes: ModelSizes, shard: Shard) -> int:
    """The token id of the first of those rows."""
    return shard.tp_rank * vocab_rows(sizes, shard)


def _check(sizes: ModelSizes, shard: Shard) -> None:
    parts, kv_heads = shard.tensor_parallel, sizes.num_kv_heads
    for what, count in (("query heads", sizes.num_q_heads), ("intermediate channels", sizes.intermediate_size)):
        if count % parts:
            raise BuildError(
                f"shards.tensor_parallel is {parts}, which does not divide the model's {count} {what}: "
                "choose one that does"
            )
    if kv_heads % parts and parts % kv_heads:
        raise BuildError(
            f"shards.tensor_parallel is {parts} for {kv_heads} KV heads: choose a divisor of {kv_heads}, or a "
            "multiple of it, which keeps every KV head on several ranks"
        )
    if shard.pipeline_parallel > sizes.num_layers:
        raise BuildError(
            f"shards.pipeline_parallel is {shard.pipeline_parallel} for {sizes.num_layers} layers: "
            "a stage would have none; choose fewer stages"
        )


def weight_slices(config: DecoderConfig, shard: Shard = WHOLE) -> dict[str, ParameterSlice]:
    """Decoder parameter → what a rank holds of it, for every parameter that its stage has."""
    _check(config.sizes, shard)
    shapes = source_shapes(config)
    return {
        name: _slice(name, {tensor: shapes[tensor] for tensor in tensors}, config.sizes, shard)
        for name, tensors in weight_sources(config).items()
        if _is_held(name, config, shard)
    }


def _is_held(name: str, config: DecoderConfig, shard: Shard) -> bool:
    """Whether a parameter belongs to a rank's stage. A tied table stands on the first stage and on the last."""
    module, *place = name.split(".")
    if module == "layers":
        return int(place[0]) in shard.layers(config.sizes.num_layers)
    if module == "embedding":
        return shard.is_first_stage or (shard.is_last_stage and config.tied)
    return shard.is_last_stage


def _slice(name: str, shapes: dict[str, tuple[int, ...]], sizes: ModelSizes, shard: Shard) -> ParameterSlice:
    """`shapes`: the tensors that make the parameter, in the order in which they are stacked."""
    *_, module, kind = name.split(".")
    if shard.tensor_parallel > 1 and module in _BY_VOCABULARY:
        return _by_vocabulary(shapes, sizes, shard)
    if shard.tensor_parallel > 1 and module in _BY_INPUTS:
        return _by_inputs(shapes, kind, shard)
    parts: dict[str, Part | None] = dict.fromkeys(shapes)
    if shard.tensor_parallel > 1 and module in _BY_OUTPUTS:
        parts = {tensor: _rows_of(tensor, shape[0], sizes, shard) for tensor, shape in shapes.items()}
    rows = sum(shapes[tensor][0] if part is None else part.stop - part.start for tensor, part in parts.items())
    _, *others = next(iter(shapes.values()))
    return ParameterSlice((rows, *others), tuple(parts.items()))


def _rows_of(tensor: str, num_rows: int, sizes: ModelSizes, shard: Shard) -> Part:
    """A share of the outputs; keys and values go by whole KV heads, of which several ranks may hold the same."""
    if tensor.split(".")[-2] in ("k_proj", "v_proj"):
        heads = shard.kv_heads(sizes.num_kv_heads)
        return Part(0, heads.start * sizes.head_size, heads.stop * sizes.head_size)
    return _share(0, num_rows, shard)


def _by_inputs(shapes: dict[str, tuple[int, ...]], kind: str, shard: Shard) -> ParameterSlice:
    """A share of the inputs. The outputs of all ranks are summed, so only one may add the bias: the first.

    The others hold a bias of zeros, so that all ranks of a stage run one graph.
    """
    ((tensor, shape),) = shapes.items()
    if kind == "bias":
        return ParameterSlice(shape, ((tensor, None),) if shard.tp_rank == 0 else ())
    part = _share(1, shape[1], shard)
    return ParameterSlice((shape[0], part.stop - part.start), ((tensor, part),))


def _by_vocabulary(shapes: dict[str, tuple[int, ...]], sizes: ModelSizes, shard: Shard) -> ParameterSlice:
    ((tensor, shape),) = shapes.items()
    rows, start = vocab_rows(sizes, shard), first_id(sizes, shard)
    stop = min(start + rows, sizes.vocab_size)
    return ParameterSlice((rows, shape[1]), ((tensor, Part(0, start, stop)),) if start < stop else ())


def _share(axis: int, size: int, shard: Shard) -> Part:
    width = size // shard.tensor_parallel
    return Part(axis, shard.tp_rank * width, (shard.tp_rank + 1) * width)
