"""Random decoders for the x86 kernels, written as a bundle's rank has them, and what NumPy computes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.builder.group_codes import with_rows
from ostinato.engines.decoder_record import (
    ALIGNMENT,
    FILE_NAME,
    LAYOUT_VERSION,
    WEIGHT_FILE,
    DecoderLayer,
    DecoderRecord,
    Matrix,
)
from ostinato.engines.sizes import ModelSizes
from ostinato.plugins.cache_codes import dequantize, quantize
from ostinato.plugins.x86_pack import (
    TILE,
    Bytes,
    Nibbles,
    alternate,
    bytes_of,
    group_of,
    num_groups,
    pack,
    weights,
)

F32 = NDArray[np.float32]
EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """What a random decoder is like; `bits` of its layers' matrices, the embedding has 8."""

    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    hidden_size: int = 64
    intermediate_size: int = 96
    vocab_size: int = 331
    num_layers: int = 2
    sliding_window: int = 0
    bits: Any = 4
    has_bias: bool = False
    has_qk_norm: bool = False
    is_tied: bool = True
    positions: int = 256

    @property
    def sizes(self) -> ModelSizes:
        return ModelSizes(
            "llama",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            max_positions=self.positions,
            sliding_window=self.sliding_window,
        )


def random_matrix(rng: np.random.Generator, rows: int, columns: int, bits: int) -> Bytes | Nibbles:
    """Weights of about 1 / sqrt(columns) around zero."""
    scales = (rng.uniform(0.5, 1.5, (rows, num_groups(columns))) * 3.5 / 255 / columns**0.5).astype(np.float32)
    if bits == 8:
        return Bytes(rng.integers(1, 256, (rows, columns)).astype(np.uint8), scales)
    factors = (rng.integers(2000, 4300, (rows, columns // 32)) * rng.choice([-1, 1], columns // 32)).astype(np.int16)
    offsets = (32896 - 7.5 * factors).astype(np.uint16)
    return Nibbles(rng.integers(0, 16, (rows, columns)).astype(np.uint8), factors, offsets, scales)


def numbers_of(x: F32) -> tuple[NDArray[np.int32], F32]:
    """Activations [T, K] as the kernels see them: whole numbers of 16 bits, and a scale [T, 1]."""
    top = np.abs(x).max(axis=-1, keepdims=True)
    factor = np.divide(np.float32(32512), top, out=np.zeros_like(top), where=top > 0)
    return np.rint(x * factor).astype(np.int32), top / np.float32(32512)


def multiplied(matrix: Bytes | Nibbles, x: F32) -> F32:
    """x [T, K] times a matrix, [T, N]: exact within a group of inputs, then group after group in float32."""
    whole = bytes_of(matrix) if isinstance(matrix, Nibbles) else matrix
    numbers, scales = numbers_of(x)
    signed, step = whole.codes.astype(np.float64) - 128, group_of(x.shape[-1])
    total = np.zeros((len(x), len(signed)), np.float32)
    for group, begin in enumerate(range(0, x.shape[-1], step)):
        part = numbers[:, begin : begin + step].astype(np.float64) @ signed[:, begin : begin + step].T
        wide = part.astype(np.float32).astype(np.float64) * whole.scales[:, group]  # exact, as in a fused product
        total = (wide + total).astype(np.float32)
    return total * scales


def _in_16_bits(x: NDArray[Any]) -> NDArray[Any]:
    """Queries, and a block's weights of softmax, as attention sees them."""
    step = np.abs(x).max(axis=-1, keepdims=True) / 32767
    rounded: NDArray[Any] = np.rint(np.divide(x, step, out=np.zeros_like(x), where=step > 0)) * step
    return rounded


@dataclass(frozen=True)
class Linear:
    """A matrix and what it adds."""

    matrix: Bytes | Nibbles
    bias: F32 | None

    def __call__(self, x: F32) -> F32:
        product = multiplied(self.matrix, x)
        return product if self.bias is None else product + self.bias


@dataclass
class _File:
    """weights.bin as it grows."""

    parts: list[bytes] = field(default_factory=list)
    size: int = 0

    def put(self, array: NDArray[Any]) -> int:
        octets = array.tobytes()
        offset = self.size
        padded = octets + b"\0" * (-len(octets) % ALIGNMENT)
        self.parts.append(padded)
        self.size += len(padded)
        return offset


class RandomDecoder:
    """A decoder of random weights. `logits` is the oracle; `write` makes what the kernels load."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        self._rng = np.random.default_rng(seed)
        hidden, q_width = shape.hidden_size, shape.num_q_heads * shape.head_size
        kv_width = shape.num_kv_heads * shape.head_size
        self.layers: list[dict[str, Any]] = [
            {
                "attention_norm": self._norm(hidden),
                "mlp_norm": self._norm(hidden),
                "q_norm": self._norm(shape.head_size) if shape.has_qk_norm else None,
                "k_norm": self._norm(shape.head_size) if shape.has_qk_norm else None,
                "qkv": self._linear(q_width + 2 * kv_width, hidden),
                "attention_out": self._linear(hidden, q_width),
                "gate_up": self._linear(2 * shape.intermediate_size, hidden),
                "down": self._linear(hidden, shape.intermediate_size),
            }
            for _ in range(shape.num_layers)
        ]
        self.embedding = random_matrix(self._rng, shape.vocab_size, hidden, 8)
        self.head = self.embedding if shape.is_tied else random_matrix(self._rng, shape.vocab_size, hidden, shape.bits)
        self.final_norm = self._norm(hidden)
        angles = np.arange(shape.positions)[:, None] / 100.0 ** (np.arange(0, shape.head_size, 2) / shape.head_size)
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def _norm(self, size: int) -> F32:
        return self._rng.uniform(0.5, 1.5, size).astype(np.float32)

    def _linear(self, rows: int, columns: int) -> Linear:
        bias = self._rng.normal(0, 0.3, rows).astype(np.float32) if self.shape.has_bias else None
        return Linear(random_matrix(self._rng, rows, columns, self.shape.bits), bias)

    def logits(self, ids: NDArray[np.int32]) -> F32:
        """Of every token of one row, [T, V]."""
        x: F32 = weights(self.embedding)[ids]
        for layer in self.layers:
            x = x + layer["attention_out"](self._attended(layer, layer["qkv"](_normed(x, layer["attention_norm"]))))
            gate, up = np.split(layer["gate_up"](_normed(x, layer["mlp_norm"])), 2, axis=1)
            x = x + layer["down"]((gate / (1 + np.exp(-gate)) * up).astype(np.float32))
        return Linear(self.head, None)(_normed(x, self.final_norm))

    def _attended(self, layer: dict[str, Any], qkv: F32) -> F32:
        s, tokens = self.shape, len(qkv)
        q, k, v = np.split(qkv.reshape(tokens, -1, s.head_size), [s.num_q_heads, s.num_q_heads + s.num_kv_heads], 1)
        if s.has_qk_norm:
            q, k = _normed(q, layer["q_norm"]), _normed(k, layer["k_norm"])
        group = s.num_q_heads // s.num_kv_heads
        codes, scales = (np.repeat(array, group, axis=1) for array in quantize(v, "int8"))
        keys, values = np.repeat(_cached(self._turned(k)), group, axis=1), codes.view(np.int8)
        queries = _in_16_bits(self._turned(q)).astype(np.float64)
        scores = np.einsum("qhd,khd->hqk", queries, keys.astype(np.float64)) / s.head_size**0.5
        ahead = np.arange(tokens)[:, None] - np.arange(tokens)
        is_seen = (ahead >= 0) & (ahead < (s.sliding_window or tokens))
        shares = np.where(is_seen, np.exp(scores - np.where(is_seen, scores, -np.inf).max(-1, keepdims=True)), 0)
        blocks = np.pad(shares * scales.T[:, None], ((0, 0), (0, 0), (0, -tokens % 32)))
        weighted = _in_16_bits(blocks.reshape(*blocks.shape[:2], -1, 32)).reshape(blocks.shape)[..., :tokens]
        out = np.einsum("hqk,khd->qhd", weighted, values.astype(np.float64)) / shares.sum(-1).T[..., None]
        return np.asarray(out, np.float32).reshape(tokens, -1)

    def _turned(self, x: F32) -> F32:
        cos, sin = self.cos[: len(x), None], self.sin[: len(x), None]
        first, second = np.split(x, 2, axis=-1)
        turned: F32 = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned

    def write(self, folder: Path) -> None:
        """decoder.json and weights.bin."""
        file = _File()
        cos, sin = file.put(self.cos), file.put(self.sin)
        embedding = _matrix(file, Linear(self.embedding, None))
        layers = tuple(_layer(file, layer) for layer in self.layers)
        head = None if self.shape.is_tied else _matrix(file, Linear(self.head, None))
        final_norm = file.put(self.final_norm)
        record = DecoderRecord(
            LAYOUT_VERSION, EPS, self.shape.positions, cos, sin, embedding, layers, final_norm, head, file.size
        )
        (folder / FILE_NAME).write_text(record.to_json())
        (folder / WEIGHT_FILE).write_bytes(b"".join(file.parts))


def _normed(x: F32, weight: F32) -> F32:
    mean = (x.astype(np.float32) ** 2).mean(axis=-1, keepdims=True)
    normed: F32 = x / np.sqrt(mean + np.float32(EPS)) * weight
    return normed


def _cached(heads: F32) -> F32:
    return dequantize(*quantize(heads, "int8"), "int8")


def _layer(file: _File, layer: dict[str, Any]) -> DecoderLayer:
    gate_up = layer["gate_up"]
    turns = Linear(with_rows(gate_up.matrix, alternate), None if gate_up.bias is None else alternate(gate_up.bias))
    norms = {
        name: None if layer[name] is None else file.put(layer[name])
        for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")
    }
    matrices = {
        name: _matrix(file, turns if name == "gate_up" else layer[name])
        for name in ("qkv", "attention_out", "gate_up", "down")
    }
    parts: dict[str, Any] = norms | matrices
    return DecoderLayer(**parts)


def _matrix(file: _File, linear: Linear) -> Matrix:
    rows, columns = linear.matrix.codes.shape
    bias = None if linear.bias is None else file.put(np.pad(linear.bias, (0, -rows % TILE)))
    bits: Any = linear.matrix.bits
    return Matrix(bits, rows, columns, file.put(pack(linear.matrix)), bias)
