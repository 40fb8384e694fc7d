"""The decoder as a torch module, used only for its graph: traced offline without weights, never run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ostinato.engines.io_table import SAMPLING_INPUTS, STEP_INPUTS

from .config import DecoderConfig, frequency_divisors

# Where the step's inputs stand in the one flat list of graph inputs.
_NUM_STEP = len(STEP_INPUTS)
_NUM_SAMPLING = len(SAMPLING_INPUTS)


class Decoder(nn.Module):  # type: ignore[misc]
    """Packed tokens in, sampled tokens out, in the order of `engines.io_table`.

    Parameters are named as `checkpoint.weight_sources` names them; `rope_cos` and `rope_sin` are
    [rows, head_size] f32 tables, of which one step takes its rows once for all layers.
    """

    def __init__(self, config: DecoderConfig, rope_rows: int) -> None:
        super().__init__()
        sizes = config.sizes
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(sizes.num_layers))
        self.final_norm = nn.RMSNorm(sizes.hidden_size, config.rms_eps)
        if not config.tied:
            self.head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)
        self.tied = config.tied
        self.register_buffer("rope_cos", torch.empty(rope_rows, sizes.head_size))
        self.register_buffer("rope_sin", torch.empty(rope_rows, sizes.head_size))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        input_ids, positions, *paging, logits_indices = inputs[:_NUM_STEP]
        caches = inputs[_NUM_STEP:-_NUM_SAMPLING]
        hidden = self.embedding(input_ids)  # [T, hidden]
        # One row of angles a token, broadcast over heads: [T, 1, 1, head]. With this fourth axis, CPU compilers
        # know a rotary embedding when they see one, and make it one node.
        cos = nn.functional.embedding(positions, self.rope_cos)[:, None, None]
        sin = nn.functional.embedding(positions, self.rope_sin)[:, None, None]
        written: list[Tensor] = []
        for layer, key_cache, value_cache in zip(self.layers, caches[::2], caches[1::2], strict=True):
            hidden, new_keys, new_values = layer(hidden, (cos, sin), (key_cache, value_cache), tuple(paging))
            written += [new_keys, new_values]
        # Logits only where a token is drawn; `embedding` exports as one Gather, plain indexing as three nodes.
        sampled = nn.functional.embedding(logits_indices, hidden)  # [S, hidden]
        head = self.embedding.weight if self.tied else self.head.weight
        logits = nn.functional.linear(self.final_norm(sampled), head)  # [S, V]
        return (*fused_sampling(logits, inputs[-_NUM_SAMPLING:]), *written)


class Layer(nn.Module):  # type: ignore[misc]
    """One decoder layer; q, k, v are one matrix, gate and up another, to keep the nodes of a step few."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        sizes = config.sizes
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
        hidden = hidden + self.attention_out(attended)
        gate, up = self.gate_up(self.mlp_norm(hidden)).split(self.config.sizes.intermediate_size, -1)
        return hidden + self.down(nn.functional.silu(gate) * up), new_keys, new_values

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


def rope_tables(config: DecoderConfig, rows: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, 2 × [rows, head_size] f32, in the float32 steps that models are trained with."""
    head_size = config.sizes.head_size
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / config.rope.theta**exponents / torch.tensor(frequency_divisors(config.rope, head_size))
    angles = torch.arange(rows, dtype=torch.float32)[:, None] * frequencies[None, :]
    both_halves = torch.cat([angles, angles], dim=-1)
    return both_halves.cos(), both_halves.sin()
