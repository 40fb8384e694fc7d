"""StatefulSampling: FusedSampling as devices run it, its schema and its NumPy oracle (offline, and in tests).

    bias_ids, bias_values, counts: the line state_rows[s] ─┐
    allowed: the line mask_rows[s], everything for -1 ─────┴─ FusedSampling ─ token ─ counts[state_rows[s], token] += 1

What stays the same while a request lives is kept on the device, one line a request: its bias, and how often each
token stands in its output, plus IN_PROMPT for the tokens of its prompt.

A row whose state line is 0 is a pad: of it nothing else is read (its logits may be NaN, its mask row any number),
line 0 never changes, and it reports token -1, logprob NaN, ids -1 and logprobs NaN. K is the length of
`logprob_slots`. A row fills as many of the K slots as it asked for; in the slots past that, and in every slot of a row
that asked for none, ids are -1 and logprobs NaN. The chosen token's logprob is NaN in a row that asked for none (-1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.io_table import BIAS_PAD, DEVICE_SAMPLING_INPUTS, IN_PROMPT, OUTPUTS, STATE_INPUTS

from .fused_sampling import NO_TOKEN, fused_sampling
from .operator_schema import OperatorSchema
from .sampling_rows import I32, SamplingRows

Array = NDArray[Any]

STATEFUL_SAMPLING = OperatorSchema(
    name="StatefulSampling",
    inputs=("logits", *(tensor.name for tensor in (*DEVICE_SAMPLING_INPUTS, *STATE_INPUTS))),
    outputs=(*(tensor.name for tensor in OUTPUTS), "counts_out"),
)


def stateful_sampling(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Sample every row of `logits` [S, V]; shapes and dtypes of the rest as in `io_table`, by the schema's names.

    `counts_out` is a new array here; a kernel updates `counts` in place. `num_logprobs` must not exceed K.
    """
    count, width = len(inputs["state_rows"]), len(inputs["logprob_slots"])
    live = np.flatnonzero(inputs["state_rows"] > 0)
    lines = inputs["state_rows"][live]
    assert (inputs["num_logprobs"][live] <= width).all()
    outputs: dict[str, Array] = {
        "tokens": np.full(count, NO_TOKEN, np.int32),
        "logprobs": np.full(count, np.nan, np.float32),
        "top_ids": np.full((count, width), NO_TOKEN, np.int32),
        "top_logprobs": np.full((count, width), np.nan, np.float32),
        "counts_out": inputs["counts"].copy(),
    }
    sampled = fused_sampling(inputs["logits"][live].astype(np.float32), _gathered_rows(inputs, live))
    used = sampled.top_ids.shape[1]
    outputs["tokens"][live], outputs["logprobs"][live] = sampled.tokens, sampled.logprobs
    outputs["top_ids"][live, :used], outputs["top_logprobs"][live, :used] = sampled.top_ids, sampled.top_logprobs
    legal = sampled.tokens != NO_TOKEN
    np.add.at(outputs["counts_out"], (lines[legal], sampled.tokens[legal]), 1)
    return outputs


def _gathered_rows(inputs: Mapping[str, Array], live: NDArray[np.int64]) -> SamplingRows:
    """FusedSampling's arguments for the rows `live`, from their lines of the state."""
    lines, mask_rows = inputs["state_rows"][live], inputs["mask_rows"][live]
    everything = np.full(inputs["allowed"].shape[1], -1, np.int32)
    masks: list[I32] = [inputs["allowed"][row] if row >= 0 else everything for row in mask_rows]
    counts = inputs["counts"][lines]
    bias_ids = inputs["bias_ids"][lines]
    return SamplingRows(
        **{tensor.name: inputs[tensor.name][live] for tensor in DEVICE_SAMPLING_INPUTS if _is_plain(tensor.name)},
        allowed=np.stack(masks) if masks else inputs["allowed"][:0],
        bias_ids=np.where(bias_ids == BIAS_PAD, -1, bias_ids),
        bias_values=inputs["bias_values"][lines],
        prompt_counts=list((counts >= IN_PROMPT).astype(np.int32)),
        output_counts=list(counts & (IN_PROMPT - 1)),
    )


def _is_plain(name: str) -> bool:
    """Whether FusedSampling takes the input as it is."""
    return name in SamplingRows.__dataclass_fields__ and name != "allowed"
