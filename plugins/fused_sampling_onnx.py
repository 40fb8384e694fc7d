"""FusedSampling's ONNX function body in standard operators: the executable specification (offline).

Written in ONNX's own text syntax, in the order of `fused_sampling`'s picture. It sorts whole rows, so it is for
reading, for tests and for `verify`; a target that serves has a kernel. K is the length of `logprob_slots`, and every
row reports K logprobs. Values are f32; running sums are in double, where adding 49,152 terms in turn loses nothing.
"""

from __future__ import annotations

import onnx

from .fused_sampling import FUSED_SAMPLING, GREEDY_BELOW, WORD_BITS

_BODY = """
{
  first_axis = Constant <value_ints = [0]> ()
  axis = Constant <value_ints = [1]> ()
  last_axis = Constant <value_ints = [2]> ()
  none = Constant <value = int32 {0}> ()
  no_token = Constant <value = int32 {-1}> ()
  nothing = Constant <value_float = 0.0> ()
  unit = Constant <value_float = 1.0> ()
  impossible = Constant <value_float = -inf> ()
  V = Shape <start = 1, end = 2> (logits)
  K = Shape (logprob_slots)

  # Logit bias; a pad adds 0 to token 0.
  is_pad = Less (bias_ids, none)
  bias_at = Where (is_pad, none, bias_ids)
  bias = Where (is_pad, nothing, bias_values)
  biased = ScatterElements <axis = 1, reduction = "add"> (logits, bias_at, bias)

  # Repetition of every token seen.
  all_counts = Add (prompt_counts, output_counts)
  seen = Greater (all_counts, none)
  repetition_column = Unsqueeze (repetition, axis)
  is_positive = Greater (biased, nothing)
  divided = Div (biased, repetition_column)
  multiplied = Mul (biased, repetition_column)
  weakened = Where (is_positive, divided, multiplied)
  repeated = Where (seen, weakened, biased)

  # Presence and frequency of the output's tokens.
  in_output = Greater (output_counts, none)
  in_output_f32 = Cast <to = 1> (in_output)
  counts_f32 = Cast <to = 1> (output_counts)
  presence_column = Unsqueeze (presence, axis)
  frequency_column = Unsqueeze (frequency, axis)
  for_presence = Mul (presence_column, in_output_f32)
  for_frequency = Mul (frequency_column, counts_f32)
  less_presence = Sub (repeated, for_presence)
  raw_adjusted = Sub (less_presence, for_frequency)

  # A row is in error where a logit is NaN or the greatest is infinite; zeros stand in for it until the end.
  is_nan = IsNaN (raw_adjusted)
  nan_count = Cast <to = 6> (is_nan)
  has_nan = ReduceMax <keepdims = 1> (nan_count, axis)
  is_broken = Greater (has_nan, none)
  without_nan = Where (is_nan, nothing, raw_adjusted)
  greatest = ReduceMax <keepdims = 1> (without_nan, axis)
  is_unbounded = IsInf (greatest)
  is_bad = Or (is_broken, is_unbounded)
  adjusted = Where (is_bad, nothing, raw_adjusted)
  reported = LogSoftmax <axis = 1> (adjusted)

  # Mask: token v is bit v % 32 of word v // 32.
  words = Cast <to = 12> (allowed)
  word_column = Unsqueeze (words, last_axis)
  bit = Constant <value = uint32[32] {BITS}> ()
  shifted = BitShift <direction = "RIGHT"> (word_column, bit)
  lowest = Constant <value = uint32 {1}> ()
  bits = BitwiseAnd (shifted, lowest)
  keep_rows = Constant <value_ints = [0, -1]> ()
  bit_lines = Reshape (bits, keep_rows)
  token_bits = Slice (bit_lines, first_axis, V, axis)
  is_allowed = Cast <to = 9> (token_bits)
  masked = Where (is_allowed, adjusted, impossible)

  # Ranks: TopK puts equal values in ascending order of id.
  ranked, ranked_ids = TopK <axis = 1, largest = 1, sorted = 1> (masked, V)
  best = Slice (ranked, first_axis, axis, axis)
  has_none = IsInf (best)
  is_error = Or (is_bad, has_none)

  # Temperature: weights relative to the best token's, which is 1.
  greedy_below = Constant <value_float = GREEDY_BELOW> ()
  is_greedy = Less (temperature, greedy_below)
  divisor = Where (is_greedy, unit, temperature)
  divisor_column = Unsqueeze (divisor, axis)
  finite_best = Where (has_none, nothing, best)
  distance = Sub (ranked, finite_best)
  scaled = Div (distance, divisor_column)
  weights = Exp (scaled)

  # top-k; greedy is k = 1.
  zero_64 = Squeeze (first_axis)
  one_64 = Squeeze (axis)
  V_64 = Squeeze (V)
  rank = Range (zero_64, V_64, one_64)
  top_k_64 = Cast <to = 7> (top_k)
  k_off = LessOrEqual (top_k_64, zero_64)
  k_given = Where (k_off, V_64, top_k_64)
  k_used = Where (is_greedy, one_64, k_given)
  k_column = Unsqueeze (k_used, axis)
  within_k = Less (rank, k_column)
  k_weights = Where (within_k, weights, nothing)

  # top-p: keep a rank when the mass before it falls short of p; the first rank always stays.
  k_weights_f64 = Cast <to = 11> (k_weights)
  k_mass = ReduceSum <keepdims = 1> (k_weights_f64, axis)
  mass_before = CumSum <exclusive = 1> (k_weights_f64, one_64)
  top_p_column = Unsqueeze (top_p, axis)
  p_off = GreaterOrEqual (top_p_column, unit)
  p_f64 = Cast <to = 11> (top_p_column)
  p_mass = Mul (p_f64, k_mass)
  falls_short = Less (mass_before, p_mass)
  is_first = Equal (rank, zero_64)
  short_or_first = Or (falls_short, is_first)
  within_p = Or (short_or_first, p_off)

  # min-p
  min_p_column = Unsqueeze (min_p, axis)
  within_min_p = GreaterOrEqual (k_weights, min_p_column)
  within = And (within_p, within_min_p)
  kept = Where (within, k_weights, nothing)

  # Draw, in vocabulary order.
  no_mass = Sub (kept, kept)
  by_id = ScatterElements <axis = 1> (no_mass, ranked_ids, kept)
  by_id_f64 = Cast <to = 11> (by_id)
  cumulative = CumSum (by_id_f64, one_64)
  total = ReduceSum <keepdims = 1> (by_id_f64, axis)
  uniform_column = Unsqueeze (uniforms, axis)
  uniform_f64 = Cast <to = 11> (uniform_column)
  target = Mul (uniform_f64, total)
  is_past = Greater (cumulative, target)
  is_past_i32 = Cast <to = 6> (is_past)
  drawn = ArgMax <axis = 1, keepdims = 1> (is_past_i32)
  drawn_i32 = Cast <to = 6> (drawn)
  token_column = Where (is_error, no_token, drawn_i32)
  tokens = Squeeze (token_column, axis)

  # Report.
  drawn_logprob = GatherElements <axis = 1> (reported, drawn)
  logprob_column = Where (is_error, impossible, drawn_logprob)
  logprobs = Squeeze (logprob_column, axis)
  top_values, top_indices = TopK <axis = 1, largest = 1, sorted = 1> (adjusted, K)
  top_reported = GatherElements <axis = 1> (reported, top_indices)
  top_indices_i32 = Cast <to = 6> (top_indices)
  top_ids = Where (is_error, no_token, top_indices_i32)
  top_logprobs = Where (is_error, impossible, top_reported)
}
"""


def fused_sampling_function() -> onnx.FunctionProto:
    """The function `ostinato::FusedSampling`, version 1. K must not exceed V."""
    body = _BODY.replace("GREEDY_BELOW", str(GREEDY_BELOW)).replace("BITS", ", ".join(map(str, range(WORD_BITS))))
    return onnx.parser.parse_function(FUSED_SAMPLING.signature() + body)
