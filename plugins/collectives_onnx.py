"""ONNX function bodies of the collectives: what comes out when every rank holds what this one does (offline).

For one rank both are the identity. For more, no graph of one rank can say what the others hold; the bodies still give
every value its true shape.
"""

from __future__ import annotations

import onnx

from .collectives import ALL_GATHER, ALL_REDUCE

_SUM_OF_EQUALS = """
{
  ranks = Constant <value_int: int = @group_size> ()
  factor = CastLike (ranks, x)
  y = Mul (x, factor)
}
"""
_ONE_AFTER_ANOTHER = """
{
  ranks = Constant <value_int: int = @group_size> ()
  zero = Constant <value_ints = [0]> ()
  first = Unsqueeze (ranks, zero)
  shape = Shape (x)
  rank = Shape (shape)
  one = Constant <value_ints = [1]> ()
  others = Sub (rank, one)
  ones = Expand (one, others)
  repeats = Concat <axis = 0> (first, ones)
  y = Tile (x, repeats)
}
"""


def all_reduce_function() -> onnx.FunctionProto:
    """The function `ostinato::AllReduce`, version 1."""
    return onnx.parser.parse_function(ALL_REDUCE.signature() + _SUM_OF_EQUALS)


def all_gather_function() -> onnx.FunctionProto:
    """The function `ostinato::AllGather`, version 1."""
    return onnx.parser.parse_function(ALL_GATHER.signature() + _ONE_AFTER_ANOTHER)
