"""Stored precisions: what each form keeps, and that the graph reads back exactly what NumPy reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from ostinato.builder import passes
from ostinato.builder.checkpoint import weight_sources
from ostinato.builder.export import onnx_from_config
from ostinato.builder.hf_checkpoint import read_hf_folder
from ostinato.builder.quantize import FORMS, INT8_GROUP, UINT4_GROUP, precision_notes, store_weights
from ostinato.builder.weights import parameters_of, write_model
from ostinato.engines.errors import BuildError
from ostinato.engines.io_table import engine_inputs, engine_outputs
from ostinato.plugins.fused_sampling_onnx import fused_sampling_function
from ostinato.plugins.paged_attention_onnx import paged_attention_function

from ..tiny import write_tiny
from .conftest import BLOCK_SIZE
from .paged_runner import PagedRunner

ROPE_ROWS = 96


def _int8_group(w: Any) -> Any:
    x = w.reshape(-1, 32)
    scale = np.abs(x).max(1, keepdims=True) / np.float32(127)
    return (np.rint(x / scale) * scale).reshape(w.shape)


def _uint4_group(w: Any) -> Any:
    x = w.reshape(-1, 32)
    low, step = x.min(1, keepdims=True), (x.max(1, keepdims=True) - x.min(1, keepdims=True)) / np.float32(15)
    return (np.rint((x - low) / step) * step + low).reshape(w.shape)


def _bfloat16(w: Any) -> Any:
    return w.astype(ml_dtypes.bfloat16).astype(np.float32)


READ_BACK = {"int8": (_int8_group, _int8_group), "int4": (_uint4_group, _int8_group), "bfloat16": (_bfloat16,) * 2}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, bytes]:
    """(transformers model, checkpoint, the graph before its weights are stored)"""
    folder = tmp_path_factory.mktemp("quantize")
    model = write_tiny(folder, "llama", tie_word_embeddings=True)
    checkpoint = read_hf_folder(folder)
    sizes = checkpoint.config.sizes
    graph = passes.fold_constants(onnx_from_config(checkpoint.config, BLOCK_SIZE, ROPE_ROWS))
    graph = passes.name_interface(graph, engine_inputs(sizes, BLOCK_SIZE), engine_outputs(sizes, BLOCK_SIZE))
    graph = passes.name_values(graph)
    graph = passes.attach_functions(graph, [paged_attention_function(), fused_sampling_function()])
    return model, checkpoint, ir.serde.serialize_model(graph).SerializeToString()


@pytest.mark.parametrize("precision", list(FORMS))
def test_the_graph_computes_with_the_weights_as_stored(
    tmp_path: Path, traced: tuple[Any, Any, bytes], precision: str
) -> None:
    model, checkpoint, graph = traced
    stored = store_weights(
        ir.serde.deserialize_model(onnx.ModelProto.FromString(graph)), parameters_of(checkpoint, ROPE_ROWS), precision
    )
    write_model(stored, tmp_path, lambda _: None)
    linear, table = READ_BACK[precision]
    read_back = {
        name: torch.from_numpy((table if "embed" in name else linear)(tensor.numpy())) if tensor.dim() == 2 else tensor
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 58]
    with torch.no_grad():
        wanted = torch.func.functional_call(model, read_back, torch.tensor([text])).logits[0].numpy()
        unchanged = model(torch.tensor([text])).logits[0].numpy()
    runner = PagedRunner(tmp_path / "model.onnx", checkpoint.config.sizes, block_size=BLOCK_SIZE)
    found = runner.step([(0, text)])["logits"]
    np.testing.assert_allclose(found, wanted, atol=2e-4, rtol=1e-4)
    assert np.abs(found - unchanged).max() > 1e-3, "the weights were not quantized at all"


@pytest.mark.parametrize(("kind", "form"), [("Q4_1", UINT4_GROUP), ("Q8_0", INT8_GROUP)])
def test_a_form_keeps_the_published_format_that_it_claims_to(kind: str, form: Any) -> None:
    weight = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    weight[3, :32] = 0.5  # a group without a spread
    quantization = gguf.GGMLQuantizationType[kind]
    published = gguf.quants.dequantize(gguf.quants.quantize(weight, quantization), quantization)
    pieces = form.make(published)
    codes = pieces["codes"].astype(np.float32).reshape(64, 3, 32) - pieces.get("zero", 0)
    np.testing.assert_allclose((codes * pieces["scale"].reshape(64, 3, 1)).reshape(64, 96), published, atol=2e-6)


def test_zeros_stay_zeros_in_every_form() -> None:
    weight = np.zeros((2, 64), np.float32)
    for form in {form for pair in FORMS.values() for form in pair}:
        for piece, array in form.make(weight).items():
            assert np.isfinite(array.astype(np.float32)).all(), (form.name, piece)


def test_inputs_that_make_no_groups_are_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama", intermediate_size=48)
    checkpoint = read_hf_folder(tmp_path)
    weight = ir.Value(name="layers.0.down.weight", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape((64, 48)))
    model = ir.Model(ir.Graph([weight], [], nodes=[]), ir_version=10)
    with pytest.raises(BuildError, match=r"layers\.0\.down\.weight has 48 inputs"):
        store_weights(model, parameters_of(checkpoint, ROPE_ROWS), "int4")


def test_notes_say_what_is_not_held_exactly(traced: tuple[Any, Any, bytes]) -> None:
    checkpoint = traced[1]
    sources = weight_sources(checkpoint.config)
    assert precision_notes(checkpoint, sources, "float32") == ()
    (note,) = precision_notes(checkpoint, sources, "int8")
    assert note.startswith("15 weights published as float32 are stored as int8 with a scale for 32 inputs")
