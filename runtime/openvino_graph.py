"""A bundle's ONNX graph as an OpenVINO model whose paged attention is the plugin's own (once at start).

FusedSampling is where the graph is cut: its logits become the model's output and the host kernel takes over there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import op, opset13
from openvino.frontend.onnx import ConversionExtension

from ostinato.engines.bundle import Bundle
from ostinato.engines.errors import BundleError
from ostinato.engines.io_table import STEP_INPUTS, cache_inputs
from ostinato.engines.recipe import PACKED_WEIGHTS

DOMAIN = "ostinato"
# Inputs 13 to 27 of the plugin's operator: (value, dtype) that switches each feature off.
UNUSED_INPUTS: tuple[tuple[Any, Any], ...] = (
    ([], np.int32),  # score aggregation window
    ([], np.int32),  # rotated block indices
    ([], np.int32),  # rotation deltas
    ([], np.float32),  # rotation table
    ([], np.float32),  # sparse attention threshold
    (0, np.int32),  # sparse attention block
    (0, np.int32),  # sparse attention stride
    ([], np.float32),  # attention sinks
    (0, np.int32),  # adaptive eviction: start, and five tables
    ([], np.int32),
    ([], np.int32),
    ([], np.int32),
    ([], np.int32),
    ([], np.uint8),
    ([], np.int32),
)
PACKED_SUFFIXES = (".codes", ".scale", ".zero", ".shape")
PRECISIONS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "u8"}  # recipe word → OpenVINO property


def read_graph(core: ov.Core, bundle: Bundle) -> ov.Model:
    """Read rank 0's graph: its inputs are the table's step and cache tensors, its one output is `logits` [S, V] f32."""
    core.add_extension(ConversionExtension("PagedAttention", DOMAIN, _paged_attention))
    core.add_extension(ConversionExtension("FusedSampling", DOMAIN, _cut_at_logits))
    path = bundle.rank_dir() / "model.onnx"
    try:
        whole = core.read_model(path)
    except RuntimeError as error:
        raise BundleError(f"OpenVINO can't read {path}: {_first_line(error)}; build the bundle again") from None
    return _step_model(whole, bundle, path)


def _step_model(whole: ov.Model, bundle: Bundle, path: Path) -> ov.Model:
    _unshare_packed_weights(whole)
    caches = {tensor.name for tensor in cache_inputs(bundle.manifest.sizes, bundle.manifest.limits.block_size)}
    wanted = caches | {tensor.name for tensor in STEP_INPUTS} - {"slot_mapping"}  # OpenVINO derives slots itself
    found = {name: node for node in whole.get_parameters() for name in node.output(0).get_names() & wanted}
    if missing := sorted(wanted - set(found)):
        raise BundleError(f"{path} lacks the inputs {', '.join(missing)}: build the bundle again")
    for name in caches:  # the plugin picks dtype and padding of its cache
        found[name].set_element_type(ov.Type.dynamic)
        found[name].set_partial_shape(ov.PartialShape([-1, -1, -1, -1]))
    logits = whole.output("tokens").get_node().input_value(0)
    model = ov.Model(
        [opset13.result(logits, name="logits")], [found[name] for name in sorted(wanted)], bundle.manifest.name
    )
    model.validate_nodes_and_infer_types()
    return model


def _unshare_packed_weights(model: ov.Model) -> None:
    """Give each reader of a packed weight a constant of its own.

    A tied embedding is read by a Gather and by the head; a constant that both share would be unpacked to float32.
    """
    for node in model.get_ops():
        name = node.get_friendly_name()
        if node.get_type_name() == "Constant" and name.endswith(PACKED_SUFFIXES):
            readers = [reader for reader in node.output(0).get_target_inputs() if _reads_data(reader)]
            for reader in readers[1:]:
                own = opset13.constant(np.array(node.data))
                reader.replace_source_output(own.output(0))


def _reads_data(reader: Any) -> bool:
    return bool(reader.get_node().get_type_name() != "ShapeOf")


def compile_graph(core: ov.Core, model: ov.Model, bundle: Bundle, num_threads: int) -> ov.CompiledModel:
    """Compile for this CPU. Float32 weights stay exact; packed weights multiply with activations quantized by 32.

    Raises BundleError where the CPU lacks the bundle's precision.
    """
    manifest = bundle.manifest
    if "bfloat16" in (manifest.weights, manifest.kv_cache) and "BF16" not in core.get_property(
        "CPU", "OPTIMIZATION_CAPABILITIES"
    ):
        raise BundleError(
            f"{bundle.path} computes in bfloat16, which this CPU has no instructions for: "
            "build with --set weights=int8 --set kv_cache=float16, or run it on a CPU with AMX or AVX512_BF16"
        )
    properties: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(num_threads),
        "INFERENCE_PRECISION_HINT": "bf16" if manifest.weights == "bfloat16" else "f32",
        "KV_CACHE_PRECISION": PRECISIONS[manifest.kv_cache],
        # By channel, a block is quantized anew at each append: the same step run twice would give other logits.
        "KEY_CACHE_QUANT_MODE": "BY_TOKEN",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "32" if manifest.weights in PACKED_WEIGHTS else "0",
    }
    return core.compile_model(model, "CPU", properties)


def _cut_at_logits(node: Any) -> list[Any]:
    return [node.get_input(0)] * 4


def _paged_attention(node: Any) -> list[Any]:
    """Our nine inputs become the plugin's first thirteen; the features that follow those are not used."""
    q, k, v, key_cache, value_cache, _slots, query_starts, context_lens, block_tables = (
        node.get_input(index) for index in range(9)
    )
    blocks, block_starts = _ragged_blocks(block_tables, query_starts)
    no_slopes = _constant([], np.float32)
    inputs = [q, k, v, key_cache, value_cache, context_lens, query_starts, blocks, block_starts]
    inputs += [
        _constant(node.get_attribute("scale"), np.float32),
        _constant(node.get_attribute("sliding_window"), np.int32),
        no_slopes,
        _max_context(query_starts, context_lens),
    ]
    attention = op._PagedAttentionExtension(inputs + [_constant(value, dtype) for value, dtype in UNUSED_INPUTS])
    info = attention.get_rt_info()  # the plugin sizes its cache by these
    info["num_k_heads"] = info["num_v_heads"] = node.get_attribute("num_kv_heads")
    info["k_head_size"] = info["v_head_size"] = node.get_attribute("head_size")
    return [attention.output(0)] * 3  # the caches change in place: their outputs are cut off with the rest


def _ragged_blocks(block_tables: Any, query_starts: Any) -> tuple[Any, Any]:
    """A padded table [B, P] is a ragged list of blocks whose rows start every P entries: [B * P] and [B + 1]."""
    zero, one = _constant(0, np.int32), _constant(1, np.int32)
    width = opset13.gather(opset13.shape_of(block_tables, "i32"), one, zero)
    num_starts = opset13.gather(opset13.shape_of(query_starts, "i32"), zero, zero)
    starts = opset13.multiply(opset13.range(zero, num_starts, one, "i32"), width)
    return opset13.reshape(block_tables, _constant([-1], np.int32), special_zero=False).output(0), starts.output(0)


def _max_context(query_starts: Any, context_lens: Any) -> Any:
    """Tokens that the longest row holds after this step: a scalar that sizes the plugin's scratch."""
    starts = opset13.slice(query_starts, _constant([0], np.int32), _constant([-1], np.int32), _constant([1], np.int32))
    ends = opset13.slice(
        query_starts, _constant([1], np.int32), _constant([np.iinfo(np.int32).max], np.int32), _constant([1], np.int32)
    )
    lens = opset13.add(context_lens, opset13.subtract(ends, starts))
    return opset13.reduce_max(lens, _constant([0], np.int32), keep_dims=False).output(0)


def _constant(value: Any, dtype: Any) -> Any:
    return opset13.constant(np.array(value, dtype)).output(0)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
