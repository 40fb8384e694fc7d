"""PagedAttention as a TensorRT plugin: keys and values are written into the given caches (offline; per capture)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorrt as trt

from ostinato.engines.io_table import QUANTIZED_CACHES

from .launch_table import Sizes
from .paged_attention import PAGED_ATTENTION
from .tensorrt_plugin import OperatorPlugin

DTYPE, CACHE_DTYPE = "dtype", "cache_dtype"  # of q, k, v and out; of the caches, as in a recipe's kv_cache
QUERY, KEY_CACHE, VALUE_CACHE, QUERY_STARTS = map(
    PAGED_ATTENTION.inputs.index, ("q", "key_cache", "value_cache", "query_starts")
)


class PagedAttentionPlugin(OperatorPlugin):
    """Steps are told apart by (tokens T, rows B)."""

    schema = PAGED_ATTENTION
    texts = (DTYPE, CACHE_DTYPE)
    aliases = {"key_cache_out": "key_cache", "value_cache_out": "value_cache"}  # noqa: RUF012

    def dtype_of(self, name: str) -> str:
        if name in ("q", "k", "v", "out"):
            return str(self._values[DTYPE])
        if "cache" in name:
            cache = str(self._values[CACHE_DTYPE])
            return "int8" if cache in QUANTIZED_CACHES else cache  # a plugin's tensors can't be uint8
        return "int32"

    def sizes_of(self, inputs: Sequence[Any]) -> Sizes:
        return int(inputs[QUERY][0]), int(inputs[QUERY_STARTS][0]) - 1

    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], expr_builder: Any) -> list[Any]:
        return [trt.DimsExprs(inputs[place]) for place in (QUERY, KEY_CACHE, VALUE_CACHE)]
