"""Drives an exported graph in ONNX Runtime over paged caches, as a scheduler would: ragged steps, scattered blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from ostinato.engines.io_table import Tensor, cache_inputs
from ostinato.engines.sizes import ModelSizes

I32 = NDArray[np.int32]


class PagedRequests:
    """Requests by number; each owns blocks in a shuffled order, so that nothing is contiguous by luck."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self.free = list(np.random.default_rng(8).permutation(np.arange(1, num_blocks)))
        self.blocks: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def feeds(self, rows: list[tuple[int, list[int]]]) -> dict[str, Any]:
        """Step inputs for rows of (request, its new tokens), which are written to the requests' blocks; all sampled."""
        slots, starts, contexts, positions = [], [0], [], []
        for request, tokens in rows:
            begin = self.lengths.get(request, 0)
            contexts.append(begin)
            table = self.blocks.setdefault(request, [])
            while len(table) * self.block_size < begin + len(tokens):
                table.append(int(self.free.pop()))
            for position in range(begin, begin + len(tokens)):
                slots.append(table[position // self.block_size] * self.block_size + position % self.block_size)
                positions.append(position)
            starts.append(starts[-1] + len(tokens))
            self.lengths[request] = begin + len(tokens)
        width = max(len(self.blocks[request]) for request, _ in rows) + 1
        tables = [self.blocks[request] + [0] * (width - len(self.blocks[request])) for request, _ in rows]
        return {
            "input_ids": _i32([token for _, tokens in rows for token in tokens]),
            "positions": _i32(positions),
            "slot_mapping": _i32(slots),
            "query_starts": _i32(starts),
            "context_lens": _i32(contexts),
            "block_tables": _i32(tables),
            "logits_indices": _i32(range(starts[-1])),
        }


class PagedRunner:
    """The whole graph in one session."""

    def __init__(self, model_path: Path, sizes: ModelSizes, *, block_size: int, num_blocks: int = 48) -> None:
        model = onnx.load(model_path)
        logits = onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["S", sizes.vocab_size])
        model.graph.output.append(logits)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        self.sizes = sizes
        self.requests = PagedRequests(block_size, num_blocks)
        self.caches = garbage_caches(cache_inputs(sizes, block_size), num_blocks)

    def step(self, rows: list[tuple[int, list[int]]], **sampling: Any) -> dict[str, Any]:
        """Run one step: `rows` are (request, its new tokens); logits of every token come back as `logits`."""
        feeds = self.requests.feeds(rows)
        num_tokens = len(feeds["input_ids"])
        feeds |= self.caches | neutral_sampling(num_tokens, self.sizes.vocab_size) | sampling
        names = [output.name for output in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(names, feeds), strict=True))
        self.caches = {name: outputs[f"{name}.out"] for name in self.caches}
        return outputs


def garbage_caches(caches: Sequence[Tensor], num_blocks: int) -> dict[str, Any]:
    """Blocks hold garbage before they are written: only what the tables say may be read."""
    shape = [size if isinstance(size, int) else num_blocks for size in caches[0].shape]
    garbage = np.random.default_rng(7).normal(size=shape).astype(np.float32)
    return {tensor.name: garbage.copy() for tensor in caches}


def _i32(values: Any) -> I32:
    return np.asarray(list(values), dtype=np.int32)


def neutral_sampling(num_rows: int, vocab_size: int, num_logprobs: int = 1) -> dict[str, Any]:
    """Greedy, no penalty, everything allowed."""
    floats = {"uniforms": 0.5, "temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0}
    floats |= {"presence": 0.0, "frequency": 0.0}
    counts = np.zeros((num_rows, vocab_size), np.int32)
    return {name: np.full(num_rows, value, np.float32) for name, value in floats.items()} | {
        "top_k": np.zeros(num_rows, np.int32),
        "allowed": np.full((num_rows, -(-vocab_size // 32)), -1, np.int32),
        "bias_ids": np.full((num_rows, 1), -1, np.int32),
        "bias_values": np.zeros((num_rows, 1), np.float32),
        "prompt_counts": counts,
        "output_counts": counts,
        "logprob_slots": np.zeros(num_logprobs, np.int32),
    }
