"""PagedAttention's ONNX function body in standard operators: the executable specification (offline).

Written in ONNX's own text syntax. It gathers whole block tables and masks, so it is for reading, for tests and for
`verify`; a target that serves has a kernel. Softmax runs in f32 whatever the inputs' and caches' types are.
"""

from __future__ import annotations

import onnx

from .paged_attention import PAGED_ATTENTION

_BODY = """
{
  # Sizes. L = B * P * block keys: every slot of every row's table, row after row.
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  rest = Constant <value_ints = [-1]> ()
  q_heads = Constant <value_int: int = @num_q_heads> ()
  kv_heads = Constant <value_int: int = @num_kv_heads> ()
  head_dim = Constant <value_int: int = @head_size> ()
  Hq = Unsqueeze (q_heads, zero)
  Hkv = Unsqueeze (kv_heads, zero)
  D = Unsqueeze (head_dim, zero)
  group = Div (Hq, Hkv)
  block = Shape <start = 2, end = 3> (key_cache)
  T = Shape <start = 0, end = 1> (q)
  B = Shape <start = 0, end = 1> (block_tables)
  P = Shape <start = 1, end = 2> (block_tables)
  row_keys = Mul (P, block)

  # Write: caches seen as [N * block, Hkv, D], one line a slot.
  slots = Unsqueeze (slot_mapping, one)
  slots_64 = Cast <to = 7> (slots)
  kv_shape = Concat <axis = 0> (rest, Hkv, D)
  k_lines = Reshape (k, kv_shape)
  v_lines = Reshape (v, kv_shape)
  k_cast = CastLike (k_lines, key_cache)
  v_cast = CastLike (v_lines, value_cache)
  keys_by_slot = Transpose <perm = [0, 2, 1, 3]> (key_cache)
  values_by_slot = Transpose <perm = [0, 2, 1, 3]> (value_cache)
  key_lines = Reshape (keys_by_slot, kv_shape)
  value_lines = Reshape (values_by_slot, kv_shape)
  new_keys = ScatterND (key_lines, slots_64, k_cast)
  new_values = ScatterND (value_lines, slots_64, v_cast)
  block_shape = Concat <axis = 0> (rest, block, Hkv, D)
  key_blocks = Reshape (new_keys, block_shape)
  value_blocks = Reshape (new_values, block_shape)
  key_cache_out = Transpose <perm = [0, 2, 1, 3]> (key_blocks)
  value_cache_out = Transpose <perm = [0, 2, 1, 3]> (value_blocks)

  # Read: the keys and values of every row's table, [L, Hkv, D].
  tables = Reshape (block_tables, rest)
  read_keys = Gather <axis = 0> (key_blocks, tables)
  read_values = Gather <axis = 0> (value_blocks, tables)
  flat_keys = Reshape (read_keys, kv_shape)
  flat_values = Reshape (read_values, kv_shape)
  keys = Cast <to = 1> (flat_keys)
  all_values = Cast <to = 1> (flat_values)

  # Who sees what. A key has an owner row and a position in it; so has a query.
  zero_64 = Squeeze (zero)
  one_64 = Squeeze (one)
  B_64 = Squeeze (B)
  T_64 = Squeeze (T)
  row_keys_64 = Squeeze (row_keys)
  rows = Range (zero_64, B_64, one_64)
  owners = Unsqueeze (rows, one)
  row_positions = Range (zero_64, row_keys_64, one_64)
  grid_shape = Concat <axis = 0> (B, row_keys)
  owner_grid = Expand (owners, grid_shape)
  position_grid = Expand (row_positions, grid_shape)
  key_owner = Reshape (owner_grid, rest)
  key_position = Reshape (position_grid, rest)

  starts = Cast <to = 7> (query_starts)
  contexts = Cast <to = 7> (context_lens)
  row_starts = Slice (starts, zero, B)
  B_and_one = Add (B, one)
  row_ends = Slice (starts, one, B_and_one)
  tokens = Range (zero_64, T_64, one_64)
  token_column = Unsqueeze (tokens, one)
  after_start = GreaterOrEqual (token_column, row_starts)
  before_end = Less (token_column, row_ends)
  is_member = And (after_start, before_end)
  member = Cast <to = 7> (is_member)
  offsets = Sub (contexts, row_starts)
  query_row = MatMul (member, owners)
  owned_count = ReduceSum <keepdims = 1> (member, one)
  is_owned = Greater (owned_count, zero)
  offset_column = Unsqueeze (offsets, one)
  query_offset = MatMul (member, offset_column)
  query_position = Add (token_column, query_offset)

  same_row = Equal (query_row, key_owner)
  not_later = LessOrEqual (key_position, query_position)
  window = Constant <value_int: int = @sliding_window> ()
  no_window = Equal (window, zero_64)
  oldest = Sub (query_position, window)
  in_window = Greater (key_position, oldest)
  near = Or (no_window, in_window)
  same_and_owned = And (same_row, is_owned)
  causal = And (same_and_owned, not_later)
  visible = And (causal, near)

  # Slots that no query of the row sees may hold anything, even NaN, and 0 * NaN is NaN: blank their values.
  visible_count = Cast <to = 7> (visible)
  seen_by = ReduceSum <keepdims = 0> (visible_count, zero)
  is_seen = Greater (seen_by, zero)
  last_two = Constant <value_ints = [1, 2]> ()
  is_seen_wide = Unsqueeze (is_seen, last_two)
  nothing = Constant <value_float = 0.0> ()
  values = Where (is_seen_wide, all_values, nothing)

  # Scores [Hkv, group, T, L]: query head h reads KV head h // group.
  q_f32 = Cast <to = 1> (q)
  q_shape = Concat <axis = 0> (T, Hkv, group, D)
  q_grouped = Reshape (q_f32, q_shape)
  q_by_head = Transpose <perm = [1, 2, 0, 3]> (q_grouped)
  keys_by_head = Transpose <perm = [1, 2, 0]> (keys)
  keys_wide = Unsqueeze (keys_by_head, one)
  products = MatMul (q_by_head, keys_wide)
  factor = Constant <value_float: float = @scale> ()
  scaled = Mul (products, factor)
  cap = Constant <value_float: float = @logit_softcap> ()
  has_cap = Greater (cap, nothing)
  unit = Constant <value_float = 1.0> ()
  divisor = Where (has_cap, cap, unit)
  ratio = Div (scaled, divisor)
  squashed = Tanh (ratio)
  stretched = Mul (squashed, divisor)
  scores = Where (has_cap, stretched, scaled)

  # A finite floor keeps a token that no row owns finite; its weights are then blanked.
  floor = Constant <value_float = -3.0e38> ()
  masked = Where (visible, scores, floor)
  softmax = Softmax <axis = -1> (masked)
  weights = Where (visible, softmax, nothing)
  values_by_head = Transpose <perm = [1, 0, 2]> (values)
  values_wide = Unsqueeze (values_by_head, one)
  attended = MatMul (weights, values_wide)
  by_token = Transpose <perm = [2, 0, 1, 3]> (attended)
  out_shape = Concat <axis = 0> (T, rest)
  out_f32 = Reshape (by_token, out_shape)
  out = CastLike (out_f32, q)
}
"""


def paged_attention_function() -> onnx.FunctionProto:
    """The function `ostinato::PagedAttention`, version 1; the node's attributes are the function's."""
    return onnx.parser.parse_function(PAGED_ATTENTION.signature() + _BODY)
