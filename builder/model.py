"""The decoder as a torch module, used only for its graph: traced offline without weights, never run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ostinato.engines.io_table import step_inputs
from ostinato.engines.shards import WHOLE, Shard

from .config import DecoderConfig, frequency_divisors
from .shard import shard_sizes, vocab_rows


class Decoder(nn.Module):  # type: ignore[misc]
    """One rank's decoder: packed tokens in, sampled tokens out, in the order of `engines.io_table.rank_inputs`.

    Stages before the last give the hidden state instead, and stages after the first take it. Parameters are named
    as `checkpoint.weight_sources` names them; `rope_cos` and `rope_sin` are [rows, head_size] f32 tables, of which one
    step takes its rows once for all layers. `embedding.first_id`, where slices share the vocabulary, is the id of the
    table's first row: the one number in which the graphs of a stage differ.
    """

    def __init__(self, config: DecoderConfig, rope_rows: int, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.whole, self.shard = config.sizes, shard
        own = replace(config, sizes=shard_sizes(config.sizes, shard))
        hidden, rows = config.sizes.hidden_size, vocab_rows(config.sizes, shard)
        self.tied = config.tied
        if shard.is_first_stage or (shard.is_last_stage and config.tied):
            self.embedding = nn.Embedding(rows, hidden)
        if shard.is_first_stage and shard.tensor_parallel > 1:
            self.embedding.register_buffer("first_id", torch.empty((), dtype=torch.int32))
        layers = shard.layers(config.sizes.num_layers)
        self.layers = nn.ModuleDict({str(number): Layer(own, shard.tensor_parallel) for number in layers})
        if shard.is_last_stage:
            self.final_norm = nn.RMSNorm(hidden, config.rms_eps)
        if shard.is_last_stage and not config.tied:
            self.head = nn.Linear(hidden, rows, bias=False)
        self.register_buffer("rope_cos", torch.empty(rope_rows, config.sizes.head_size))
        self.register_buffer("rope_sin", torch.empty(rope_rows, config.sizes.head_size))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        names = [tensor.name for tensor in step_inputs(self.whole, self.shard)]
        step = dict(zip(names, inputs, strict=False))
        first_cache, first_sampling = len(step), len(step) + 2 * len(self.layers)
        caches, sampling = inputs[first_cache:first_sampling], inputs[first_sampling:]
        hidden = self._embedded(step["input_ids"]) if self.shard.is_first_stage else step["hidden_in"]  # [T, hidden]
        # One row of angles a token, broadcast over heads: [T, 1, 1, head]. With this fourth axis, CPU compilers
        # know a rotary embedding when they see one, and make it one node.
        cos = nn.functional.embedding(step["positions"], self.rope_cos)[:, None, None]
        sin = nn.functional.embedding(step["positions"], self.rope_sin)[:, None, None]
        paging = tuple(step[name] for name in ("slot_mapping", "query_starts", "context_lens", "block_tables"))
        written: list[Tensor] = []
        for layer, key_cache, value_cache in zip(self.layers.values(), caches[::2], caches[1::2], strict=True):
            hidden, new_keys, new_values = layer(hidden, (cos, sin), (key_cache, value_cache), paging)
            written += [new_keys, new_values]
        if not self.shard.is_last_stage:
            return (hidden, *written)
        # Logits only where a token is drawn; `embedding` exports as one Gather, plain indexing as three nodes.
        sampled = nn.functional.embedding(step["logits_indices"], hidden)  # [S, hidden]
        return (*fused_sampling(self._logits(sampled), sampling), *written)

    def _embedded(self, ids: Tensor) -> Tensor:
        """[T, hidden]. A rank gives zeros for ids that another one holds, so that the sum is the embedding."""
        if self.shard.tensor_parallel == 1:
            return self.embedding(ids)
        rows = ids - self.embedding.first_id
        nearest = rows.clamp(0, self.embedding.num_embeddings - 1)
        own = torch.where((nearest == rows)[:, None], self.embedding(nearest), 0.0)
        return all_reduce(own, self.shard.tensor_parallel)

    def _logits(self, sampled: Tensor) -> Tensor:
        """[S, hidden] → [S, V]: every rank's logits side by side, without the rows that fill up the last ranks."""
        head = self.embedding.weight if self.tied else self.head.weight
        logits = nn.functional.linear(self.final_norm(sampled), head)  # [S, rows]
        if self.shard.tensor_parallel == 1:
            return logits
        gathered = all_gather(logits[None], self.shard.tensor_parallel)  # [ranks, S, rows]
        return gathered.transpose(0, 1).flatten(1)[:, : self.whole.vocab_size]


class Layer(nn.Module):  # type: ignore[misc]
    """One decoder layer; q, k, v are one matrix, gate and up another, to keep the nodes of a step few.

    `config`: with the sizes of one rank. Its heads and its share of the MLP give one summand of the output each.
    """

    def __init__(self, config: DecoderConfig, tensor_parallel: int) -> None:
        super().__init__()
        sizes = config.sizes
        self.tensor_parallel = tensor_parallel
        self.config = config
        self.q_width = sizes.num_q_heads * sizes.head_size
        self.kv_width = sizes.num_kv_heads * sizes.head_size
        self.attention_norm = nn.RMSNorm(sizes.hidden_size, config.rms_eps)
        self.qkv = nn.Linear(sizes.hidden_size, self.q_width + 2 * self.kv_width, bias=config.qkv_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(sizes.head_size, config.rms_eps)
            self.k_norm = nn.RMSNorm(sizes.head_size, config.rms_eps)
        self.attention_out = nn.Linear(self.q_width, sizes.hidden_size, bias=config.output_bias)
        self.mlp_norm = nn.RMSNorm(sizes.hidden_size, config.rms_eps)
        self.gate_up = nn.Linear(sizes.hidden_size, 2 * sizes.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=config.mlp_bias)

    def forward(
        self,
        hidden: Tensor,  # [T, hidden]
        angles: tuple[Tensor, Tensor],  # 2 × [T, 1, 1, head]
        caches: tuple[Tensor, Tensor],  # 2 × [N, Hkv, block, head]
        paging: tuple[Tensor, ...],  # slot_mapping, query_starts, context_lens, block_tables
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self._rotated(self.qkv(self.attention_norm(hidden)), angles)
        attended, new_keys, new_values = paged_attention((query, key, value), caches, paging, self.config)
        hidden = hidden + all_reduce(self.attention_out(attended), self.tensor_parallel)
        gate, up = self.gate_up(self.mlp_norm(hidden)).split(self.config.sizes.intermediate_size, -1)
        summand = self.down(nn.functional.silu(gate) * up)
        return hidden + all_reduce(summand, self.tensor_parallel), new_keys, new_values

    def _rotated(self, qkv: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Split into q, k, v and turn q and k; together where no norm stands between, to halve the nodes."""
        sizes = self.config.sizes
        if not self.config.qk_norm:
            query_key, value = qkv.split([self.q_width + self.kv_width, self.kv_width], -1)
            turned = rotate(query_key.view(-1, sizes.num_q_heads + sizes.num_kv_heads, 1, sizes.head_size), angles)
            query, key = turned.reshape(-1, self.q_width + self.kv_width).split([self.q_width, self.kv_width], -1)
            return query, key, value
        query, key, value = qkv.split([self.q_width, self.kv_width, self.kv_width], -1)
        query = rotate(self.q_norm(query.view(-1, sizes.num_q_heads, 1, sizes.head_size)), angles)
        key = rotate(self.k_norm(key.view(-1, sizes.num_kv_heads, 1, sizes.head_size)), angles)
        return query.reshape(-1, self.q_width), key.reshape(-1, self.kv_width), value


def rotate(heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of [T, heads, 1, head] by [T, 1, 1, head] angles; the halves of a head are the pairs."""
    cos, sin = angles
    half = heads.shape[-1] // 2
    first, second = heads.split([half, half], -1)  # sizes, not a count: compilers look for exactly that
    return heads * cos + torch.cat([-second, first], -1) * sin


def paged_attention(
    qkv: tuple[Tensor, Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    paging: tuple[Tensor, ...],
    config: DecoderConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """One `ostinato::PagedAttention` node: ([T, Hq*D], and both caches as written)."""
    sizes = config.sizes
    query = qkv[0]
    attributes = {
        "num_q_heads": sizes.num_q_heads,
        "num_kv_heads": sizes.num_kv_heads,
        "head_size": sizes.head_size,
        "scale": sizes.head_size**-0.5,
        "sliding_window": sizes.sliding_window,
        "logit_softcap": 0.0,
    }
    outputs: Any = torch.onnx.ops.symbolic_multi_out(
        "ostinato::PagedAttention",
        (*qkv, *caches, *paging),
        attributes,
        dtypes=(query.dtype, caches[0].dtype, caches[1].dtype),
        shapes=(query.shape, caches[0].shape, caches[1].shape),
        version=1,
    )
    return outputs[0], outputs[1], outputs[2]


def fused_sampling(logits: Tensor, sampling: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One `ostinato::FusedSampling` node: tokens [S], logprobs [S], top_ids [S, K], top_logprobs [S, K]."""
    rows, slots = logits.shape[0], sampling[-1].shape[0]
    outputs: Any = torch.onnx.ops.symbolic_multi_out(
        "ostinato::FusedSampling",
        (logits, *sampling),
        {},
        dtypes=(torch.int32, torch.float32, torch.int32, torch.float32),
        shapes=((rows,), (rows,), (rows, slots), (rows, slots)),
        version=1,
    )
    return tuple(outputs)


def all_reduce(summand: Tensor, ranks: int) -> Tensor:
    """One `ostinato::AllReduce` node where there are several ranks."""
    return summand if ranks == 1 else _collective("AllReduce", summand, ranks, summand.shape)


def all_gather(own: Tensor, ranks: int) -> Tensor:
    """One `ostinato::AllGather` node: [1, ...] → [ranks, ...]."""
    return _collective("AllGather", own, ranks, (ranks, *own.shape[1:]))


def _collective(operator: str, own: Tensor, ranks: int, shape: Sequence[Any]) -> Tensor:
    return torch.onnx.ops.symbolic(
        f"ostinato::{operator}", (own,), {"group_size": ranks}, dtype=own.dtype, shape=shape, version=1
    )


def rope_tables(config: DecoderConfig, rows: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, 2 × [rows, head_size] f32, in the float32 steps that models are trained with."""
    head_size = config.sizes.head_size
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / config.rope.theta**exponents / torch.tensor(frequency_divisors(config.rope, head_size))
    angles = torch.arange(rows, dtype=torch.float32)[:, None] * frequencies[None, :]
    both_halves = torch.cat([angles, angles], dim=-1)
    return both_halves.cos(), both_halves.sin()
