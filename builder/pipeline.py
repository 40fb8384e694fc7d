"""The straight line from a recipe to a bundle (offline)."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ostinato.engines.bundle import Bundle, list_files, open_bundle, publish, unfinished_bundle
from ostinato.engines.errors import BuildError, BundleError
from ostinato.engines.io_table import engine_inputs, engine_outputs
from ostinato.engines.manifest import FILE_NAME, Manifest, manifest_from_json
from ostinato.engines.recipe import Recipe
from ostinato.engines.sizes import ModelSizes
from ostinato.plugins.fused_sampling_onnx import fused_sampling_function
from ostinato.plugins.paged_attention_onnx import paged_attention_function

from . import passes
from .checkpoint import Checkpoint, check_tensors, weight_sources
from .export import onnx_from_config
from .gguf_checkpoint import read_gguf
from .hf_checkpoint import read_hf_folder
from .identity import bundle_identity, toolchain_versions
from .quantize import precision_notes, store_weights
from .source import CACHE, resolve_source
from .tokenizer_files import write_tokenizer
from .weights import parameters_of, write_model

_CACHE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
_INT8_SCALE_BYTES = 8  # beside each head's slot: a float32 scale and zero point


class Progress(Protocol):
    """Hears how far a build is."""

    def stage(self, name: str, total_bytes: int = 0) -> None:
        """A named stage begins (and the one before it is done)."""
        ...

    def advance(self, num_bytes: int) -> None:
        """So much of the stage's total is done."""
        ...


@dataclass(frozen=True)
class Built:
    """A bundle, and whether it was already there."""

    bundle: Bundle
    is_reused: bool


def build(recipe: Recipe, out: Path, progress: Progress, *, force: bool = False, cache: Path = CACHE) -> Built:
    """Build `recipe` into the folder `out`; a bundle of the same identity that is already there is left as it is.

    Raises RecipeError, CheckpointError, BuildError or BundleError; then `out` is as it was.
    """
    progress.stage("checkpoint")
    source = resolve_source(recipe.checkpoint, recipe.sha256, cache)
    identity = bundle_identity(recipe, source)
    if not force and (held := _held(out, identity)):
        return Built(held, is_reused=True)
    with unfinished_bundle(out) as folder:
        checkpoint = read_checkpoint(source)
        _check_fit(recipe, checkpoint)
        rank = folder / "rank0"
        rank.mkdir()
        weight_bytes, notes = _write_rank(recipe, checkpoint, rank, progress)
        progress.stage("tokenizer")
        (folder / "tokenizer").mkdir()
        write_tokenizer(source, folder / "tokenizer")
        progress.stage("publish")
        manifest = Manifest(
            name=recipe.name,
            target=recipe.target,
            identity=identity,
            hardware={"machine": platform.machine()},
            weights=recipe.weights,
            kv_cache=recipe.kv_cache,
            sizes=checkpoint.config.sizes,
            limits=recipe.limits,
            eos_ids=checkpoint.eos_ids,
            bos_id=checkpoint.bos_id,
            weight_bytes=weight_bytes,
            kv_bytes_per_block=kv_bytes_per_block(checkpoint.config.sizes, recipe),
            toolchain=toolchain_versions(),
            notes=notes,
            files=list_files(folder),
        )
        return Built(publish(folder, out, manifest), is_reused=False)


def read_checkpoint(source: Path) -> Checkpoint:
    """Open a folder or a GGUF and check that it holds the model, the whole model and nothing else."""
    checkpoint = read_hf_folder(source) if source.is_dir() else read_gguf(source)
    check_tensors(checkpoint)
    return checkpoint


def _write_rank(
    recipe: Recipe, checkpoint: Checkpoint, folder: Path, progress: Progress
) -> tuple[int, tuple[str, ...]]:
    """Graph and weights of the one rank; returns the bytes of weights and notes on their precision."""
    progress.stage("graph")
    sizes, block_size = checkpoint.config.sizes, recipe.limits.block_size
    rope_rows = recipe.limits.max_context
    model = onnx_from_config(checkpoint.config, block_size, rope_rows)
    progress.stage("passes")
    model = passes.fold_constants(model)
    model = passes.name_interface(model, engine_inputs(sizes, block_size), engine_outputs(sizes, block_size))
    model = passes.name_values(model)
    model = passes.drop_notes(model)
    model = passes.attach_functions(model, [paged_attention_function(), fused_sampling_function()])
    stored = store_weights(model, parameters_of(checkpoint, rope_rows), recipe.weights)
    progress.stage("weights", sum(value.const_value.nbytes for value in stored.graph.initializers.values()))
    notes = precision_notes(checkpoint, weight_sources(checkpoint.config), recipe.weights)
    return write_model(stored, folder, progress.advance), notes


def _check_fit(recipe: Recipe, checkpoint: Checkpoint) -> None:
    limit, positions = recipe.limits.max_context, checkpoint.config.sizes.max_positions
    if limit > positions:
        raise BuildError(f"limits.max_context is {limit}, the model has {positions} positions: lower max_context")
    if not checkpoint.eos_ids:
        raise BuildError(
            f"{checkpoint.path} names no end-of-sequence token: set eos_token_id in its generation_config.json"
        )


def kv_bytes_per_block(sizes: ModelSizes, recipe: Recipe) -> int:
    """Bytes of one block of keys and values over all layers."""
    slot = sizes.head_size * _CACHE_BYTES[recipe.kv_cache] + (_INT8_SCALE_BYTES if recipe.kv_cache == "int8" else 0)
    return 2 * sizes.num_layers * sizes.num_kv_heads * recipe.limits.block_size * slot


def _held(out: Path, identity: str) -> Bundle | None:
    """The whole bundle of that identity at `out`, or None."""
    path = out / FILE_NAME
    if not path.is_file():
        return None
    try:
        if manifest_from_json(path.read_text(), path).identity == identity:
            return open_bundle(out)
    except BundleError:  # stale or damaged: build it again
        return None
    return None
