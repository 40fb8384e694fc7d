"""StatefulSampling's ONNX function body: gathers of a row's lines around `ostinato::FusedSampling` (offline).

A model that uses it carries `fused_sampling_function()` too. K is the length of `logprob_slots` and must not exceed V.
"""

from __future__ import annotations

import onnx

from ostinato.engines.io_table import BIAS_PAD, IN_PROMPT

from .operator_schema import DOMAIN, VERSION
from .stateful_sampling import STATEFUL_SAMPLING

_BODY = """
{
  axis = Constant <value_ints = [1]> ()
  none = Constant <value = int32 {0}> ()
  one = Constant <value = int32 {1}> ()
  minus_one = Constant <value = int32 {-1}> ()
  blank = Constant <value_float = nan> ()
  is_pad = LessOrEqual (state_rows, none)
  is_live = Not (is_pad)

  # The row's bias; a pad of the state is a pad of FusedSampling.
  lines = Max (state_rows, none)
  bias_pad = Constant <value = int32 {BIAS_PAD}> ()
  state_ids = Gather <axis = 0> (bias_ids, lines)
  is_bias_pad = Equal (state_ids, bias_pad)
  row_ids = Where (is_bias_pad, minus_one, state_ids)
  row_values = Gather <axis = 0> (bias_values, lines)

  # The row's counts: the prompt's tokens carry IN_PROMPT.
  in_prompt = Constant <value = int32 {IN_PROMPT}> ()
  output_bits = Constant <value = int32 {OUTPUT_BITS}> ()
  row_counts = Gather <axis = 0> (counts, lines)
  is_in_prompt = GreaterOrEqual (row_counts, in_prompt)
  prompt_counts = Cast <to = 6> (is_in_prompt)
  output_counts = BitwiseAnd (row_counts, output_bits)

  # The row's mask; a pad's row of masks may be any number.
  live_masks = Where (is_live, mask_rows, minus_one)
  is_free = Less (live_masks, none)
  mask_lines = Max (live_masks, none)
  masks = Gather <axis = 0> (allowed, mask_lines)
  free_column = Unsqueeze (is_free, axis)
  row_masks = Where (free_column, minus_one, masks)

  fused_tokens, fused_logprobs, fused_ids, fused_top = ostinato.FusedSampling (
    logits, uniforms, temperature, top_k, top_p, min_p, repetition, presence, frequency,
    row_masks, row_ids, row_values, prompt_counts, output_counts, logprob_slots)
  tokens = Where (is_pad, minus_one, fused_tokens)

  # Blank what was not asked for.
  asked = Where (is_live, num_logprobs, minus_one)
  asked_none = Less (asked, none)
  logprobs = Where (asked_none, blank, fused_logprobs)
  K = Shape (logprob_slots)
  zero_64 = Constant <value_int = 0> ()
  one_64 = Constant <value_int = 1> ()
  K_64 = Squeeze (K)
  slots_64 = Range (zero_64, K_64, one_64)
  slots = Cast <to = 6> (slots_64)
  asked_column = Unsqueeze (asked, axis)
  is_past = GreaterOrEqual (slots, asked_column)
  top_ids = Where (is_past, minus_one, fused_ids)
  top_logprobs = Where (is_past, blank, fused_top)

  # Count the token; line 0 gets nothing.
  is_legal = GreaterOrEqual (tokens, none)
  is_counted = And (is_legal, is_live)
  addend = Cast <to = 6> (is_counted)
  counted_tokens = Max (tokens, none)
  line_column = Unsqueeze (lines, axis)
  token_column = Unsqueeze (counted_tokens, axis)
  places = Concat <axis = 1> (line_column, token_column)
  places_64 = Cast <to = 7> (places)
  counts_out = ScatterND <reduction = "add"> (counts, places_64, addend)
}
"""


def stateful_sampling_function() -> onnx.FunctionProto:
    """The function `ostinato::StatefulSampling`, version 1."""
    numbers = {"{BIAS_PAD}": BIAS_PAD, "{IN_PROMPT}": IN_PROMPT, "{OUTPUT_BITS}": IN_PROMPT - 1}
    body = _BODY
    for name, number in numbers.items():
        body = body.replace(name, f"{{{number}}}")
    function = onnx.parser.parse_function(STATEFUL_SAMPLING.signature() + body)
    function.opset_import.append(onnx.helper.make_opsetid(DOMAIN, VERSION))
    return function
