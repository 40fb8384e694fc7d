"""Sampling that keeps its state, as a GPU's executor has it: the oracle over lines in host memory (run per step)."""

from __future__ import annotations

import numpy as np

from ostinato.engines.io_table import BIAS_PAD, IN_PROMPT
from ostinato.engines.sizes import MAX_LOGIT_BIAS, MAX_LOGPROBS
from ostinato.plugins.sampling_rows import F32, I32, Sampled
from ostinato.plugins.stateful_sampling import stateful_sampling
from ostinato.runtime.device_rows import DeviceRows

ROWS = (
    "uniforms", "temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency", "state_rows",
    "mask_rows", "num_logprobs",
)  # fmt: skip


class DeviceSampler:
    """The state of R = max_rows + 2 lines. Counts that nobody wrote are garbage; biases are empty at first."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.bias_ids = np.full((max_rows + 2, MAX_LOGIT_BIAS), BIAS_PAD, np.int32)
        self.bias_values = np.zeros((max_rows + 2, MAX_LOGIT_BIAS), np.float32)
        self.counts = np.random.default_rng(0).integers(0, IN_PROMPT, (max_rows + 2, vocab_size), np.int32)
        self.num_joined = 0

    def sample(self, logits: F32, rows: DeviceRows, late_masks: I32 | None = None) -> Sampled:
        """Write who joins, then sample `logits` [S, V]."""
        self.num_joined += len(rows.joined)
        for state in rows.joined:
            assert 0 < state.line < len(self.counts) - 1, "the lines at both ends are never written"
            if state.bias_ids is not None and state.bias_values is not None:
                self.bias_ids[state.line], self.bias_values[state.line] = state.bias_ids, state.bias_values
            if state.counts is not None:
                self.counts[state.line] = state.counts
        late = rows.masks[:0] if late_masks is None else late_masks
        assert len(late) == rows.num_late_masks
        width = int((self.bias_ids != BIAS_PAD).sum(axis=1).max())  # past it are only pads, which take the oracle long
        outputs = stateful_sampling(
            {
                **{name: getattr(rows, name) for name in ROWS},
                "logits": logits,
                "allowed": np.concatenate([rows.masks, late]),
                "logprob_slots": np.zeros(MAX_LOGPROBS, np.int32),
                "bias_ids": self.bias_ids[:, :width],
                "bias_values": self.bias_values[:, :width],
                "counts": self.counts,
            }
        )
        self.counts = outputs["counts_out"]
        return Sampled(outputs["tokens"], outputs["logprobs"], outputs["top_ids"], outputs["top_logprobs"])
