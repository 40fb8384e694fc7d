"""What a step's sampling takes where its state is kept on the device (made per step)."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.plugins.sampling_rows import F32, I32


@dataclass(frozen=True, slots=True)
class StateLine:
    """What sampling keeps of a request that joins: to be written to the device's `line` before the step.

    None where the line's old content does no harm: `counts` of a request without penalties, biases where neither it
    nor any request before it in that line had one.
    """

    line: int
    bias_ids: I32 | None  # [M] ascending; BIAS_PAD past the last
    bias_values: F32 | None  # [M]
    counts: I32 | None  # [V], as `engines.io_table.STATE_INPUTS` says


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Arguments of one StatefulSampling call, named as in `engines.io_table`; S live lines, W = ⌈V/32⌉.

    Neutral values as in SamplingRows. `state_rows`: the request's line of the state, from 1; a scored prompt token has
    the last line, whose bias is never written. `mask_rows`: a line of `masks` followed by the late ones; -1 allows
    everything. `num_late_masks`: lines that the desk knows only when the step before is done.
    """

    uniforms: F32  # [S] in [0, 1)
    temperature: F32  # [S]
    top_k: I32  # [S]
    top_p: F32  # [S]
    min_p: F32  # [S]
    repetition: F32  # [S]
    presence: F32  # [S]
    frequency: F32  # [S]
    state_rows: I32  # [S]
    mask_rows: I32  # [S]
    num_logprobs: I32  # [S]
    masks: I32  # [known masks, W]
    num_late_masks: int
    joined: tuple[StateLine, ...]
