"""A decoder's layers in torch, in place of TensorRT's segments between our kernels (in tests).

Every result goes into memory that is there before, so that a capture meets no allocation. Rotation is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ostinato.engines.sizes import ModelSizes

EPSILON = 1e-5


@dataclass(frozen=True)
class Cuts:
    """Tensors between layers and kernels, for a step's tokens and rows."""

    input_ids: Any
    logits_indices: Any
    q: Any
    k: Any
    v: Any
    out: Any
    logits: Any


class Layers:
    """Random weights and the memory that passes within a step of up to `tokens`; made on torch's current stream."""

    def __init__(self, sizes: ModelSizes, dtype: str, device: str, tokens: int, rows: int) -> None:
        import torch

        self._torch = torch
        kind = getattr(torch, dtype)
        generator = torch.Generator(device).manual_seed(7)
        hidden, inter = sizes.hidden_size, sizes.intermediate_size
        q, kv = sizes.num_q_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size

        def matrix(inputs: int, outputs: int) -> Any:
            numbers = torch.randn(inputs, outputs, generator=generator, device=device)
            return (numbers * inputs**-0.5).to(kind)

        def memory(*shape: int, of: Any = kind) -> Any:
            return torch.empty(*shape, dtype=of, device=device)

        self._embedding = torch.randn(sizes.vocab_size, hidden, generator=generator, device=device)
        self._layers = [
            {
                "q": matrix(hidden, q), "k": matrix(hidden, kv), "v": matrix(hidden, kv), "o": matrix(q, hidden),
                "gate": matrix(hidden, inter), "up": matrix(hidden, inter), "down": matrix(inter, hidden),
            }
            for _ in range(sizes.num_layers)
        ]  # fmt: skip
        self._head = matrix(hidden, sizes.vocab_size)
        full = torch.float32
        self._residual, self._square = memory(tokens, hidden, of=full), memory(tokens, hidden, of=full)
        self._scale = memory(tokens, 1, of=full)
        self._normed, self._back = memory(tokens, hidden), memory(tokens, hidden)
        self._gate, self._up, self._curve = (memory(tokens, inter) for _ in range(3))
        self._sampled = memory(rows, hidden, of=full)

    @property
    def weight_bytes(self) -> int:
        """Of what a step's products read."""
        matrices = [self._head, *(matrix for layer in self._layers for matrix in layer.values())]
        return sum(matrix.numel() * matrix.element_size() for matrix in matrices)

    def embed(self, cuts: Cuts) -> None:
        count = len(cuts.input_ids)
        self._torch.index_select(self._embedding, 0, cuts.input_ids, out=self._residual[:count])

    def before_attention(self, layer: int, cuts: Cuts) -> None:
        normed = self._norm(self._residual[: len(cuts.q)])
        for name, target in (("q", cuts.q), ("k", cuts.k), ("v", cuts.v)):
            self._torch.mm(normed, self._layers[layer][name], out=target)

    def after_attention(self, layer: int, cuts: Cuts) -> None:
        count, weights = len(cuts.out), self._layers[layer]
        residual, back = self._residual[:count], self._back[:count]
        gate, up, curve = self._gate[:count], self._up[:count], self._curve[:count]
        self._torch.mm(cuts.out, weights["o"], out=back)
        residual.add_(back)
        normed = self._norm(residual)
        self._torch.mm(normed, weights["gate"], out=gate)
        self._torch.mm(normed, weights["up"], out=up)
        self._torch.sigmoid(gate, out=curve)
        gate.mul_(curve).mul_(up)
        self._torch.mm(gate, weights["down"], out=back)
        residual.add_(back)

    def head(self, cuts: Cuts) -> None:
        rows = self._sampled[: len(cuts.logits_indices)]
        self._torch.index_select(self._residual, 0, cuts.logits_indices, out=rows)
        self._torch.mm(self._norm(rows), self._head, out=cuts.logits)

    def _norm(self, lines: Any) -> Any:
        count = len(lines)
        square, scale, normed = self._square[:count], self._scale[:count], self._normed[:count]
        self._torch.mul(lines, lines, out=square)
        self._torch.mean(square, dim=1, keepdim=True, out=scale)
        scale.add_(EPSILON).rsqrt_()
        self._torch.mul(lines, scale, out=square)
        normed.copy_(square)
        return normed
