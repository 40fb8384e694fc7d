"""The straight line from a recipe to a bundle (offline)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ostinato.engines.bundle import Bundle, list_files, open_bundle, publish, put_in_place, unfinished_bundle
from ostinato.engines.errors import BuildError, BundleError
from ostinato.engines.manifest import FILE_NAME, Manifest, read_manifest
from ostinato.engines.memory_table import LatencyTable
from ostinato.engines.recipe import Recipe
from ostinato.engines.targets import GPU_TARGETS, TARGETS
from ostinato.plugins.source_digest import source_digest

from .build_cache import BuildCache
from .checkpoint import Checkpoint, check_tensors
from .gguf_checkpoint import read_gguf
from .gpu_plan import plan_for, usual_context
from .gpus import gpu_named
from .hf_checkpoint import read_hf_folder
from .identity import Ingredients, ingredients_of, toolchain_versions
from .lock import Pins
from .memory_plan import memory_table
from .rank_operators import block_bytes
from .rank_result import RankResult
from .shard import shard_sizes
from .source import CACHE, resolve_source
from .tokenizer_files import write_tokenizer
from .trt_presence import require_library


class Progress(Protocol):
    """Hears how far a build is."""

    def stage(self, name: str, total_bytes: int = 0) -> None:
        """A named stage begins (and the one before it is done)."""
        ...

    def advance(self, num_bytes: int) -> None:
        """So much of the stage's total is done."""
        ...

    def detail(self, text: str) -> None:
        """What the stage is at, for whoever watches now."""
        ...


@dataclass(frozen=True)
class Built:
    """A bundle, what it was made of, and whether it was already there or in the build cache."""

    bundle: Bundle
    ingredients: Ingredients
    is_reused: bool = False
    is_cached: bool = False


def build(
    recipe: Recipe,
    out: Path,
    progress: Progress,
    *,
    force: bool = False,
    cache: Path = CACHE,
    max_build_memory: int | None = None,
    bundles: BuildCache | None = None,
    pins: Pins | None = None,
) -> Built:
    """Build `recipe` into the folder `out`; a bundle of the same identity that is already there is left as it is.

    `max_build_memory`: bytes of host memory that compiling engines may hold; more is refused before it is taken.
    `bundles`: finished bundles to take this one from, or to add it to. `pins`: what the build must be made of.
    Raises RecipeError, CheckpointError, BuildError or BundleError; then `out` is as it was.
    """
    progress.stage("checkpoint")
    source = resolve_source(recipe.checkpoint, recipe.sha256, cache)
    ingredients = ingredients_of(recipe, source)
    if pins is not None:
        pins.check_ingredients(ingredients)
    if not force and (held := _held(out, ingredients.identity, pins)):
        return Built(held, ingredients, is_reused=True)
    with unfinished_bundle(out) as folder:
        if not force and bundles is not None and bundles.fetch(ingredients.identity, folder):
            return Built(_placed(folder, out, pins), ingredients, is_cached=True)
        manifest = _write(recipe, ingredients.identity, source, folder, progress, max_build_memory)
        if pins is not None:
            pins.check_graphs(manifest)
        built = Built(publish(folder, out, manifest), ingredients)
        if bundles is not None:
            bundles.keep(built.bundle)
        return built


def _write(
    recipe: Recipe, identity: str, source: Path, folder: Path, progress: Progress, max_build_memory: int | None
) -> Manifest:
    """Every file of the bundle but its manifest, which is returned."""
    require_library(recipe.target)
    checkpoint = read_checkpoint(source)
    _check_fit(recipe, checkpoint)
    latency = _planned_latency(recipe, checkpoint)
    ranks = _write_ranks(recipe, checkpoint, folder, progress, max_build_memory)
    progress.stage("tokenizer")
    (folder / "tokenizer").mkdir()
    write_tokenizer(source, folder / "tokenizer")
    progress.stage("publish")
    return _manifest(recipe, identity, checkpoint, ranks, latency, folder)


def _write_ranks(
    recipe: Recipe, checkpoint: Checkpoint, folder: Path, progress: Progress, max_build_memory: int | None
) -> tuple[RankResult, ...]:
    """Every rank's folder. Imported here: torch and ONNX, which a bundle that is there does not need."""
    if TARGETS[recipe.target].has_decoder:
        from .x86 import write_rank

        rank = folder / "rank0"
        rank.mkdir()
        return (write_rank(recipe, checkpoint, rank, progress),)
    from .ranks import write_ranks

    return write_ranks(recipe, checkpoint, folder, progress, max_build_memory)


def _manifest(
    recipe: Recipe,
    identity: str,
    checkpoint: Checkpoint,
    ranks: tuple[RankResult, ...],
    latency: LatencyTable,
    folder: Path,
) -> Manifest:
    sizes, is_gpu = checkpoint.config.sizes, recipe.target in GPU_TARGETS
    return Manifest(
        name=recipe.name,
        target=recipe.target,
        identity=identity,
        hardware=ranks[0].hardware,
        weights=recipe.weights,
        kv_cache=recipe.kv_cache,
        sizes=sizes,
        limits=recipe.limits,
        eos_ids=checkpoint.eos_ids,
        bos_id=checkpoint.bos_id,
        weight_bytes=sum(rank.weight_bytes for rank in ranks),
        kv_bytes_per_block=sum(block_bytes(shard_sizes(sizes, shard), recipe) for shard in recipe.shards.all()),
        toolchain=toolchain_versions(recipe.target) | dict(ranks[0].toolchain),
        notes=tuple(dict.fromkeys(note for rank in ranks for note in rank.notes)),
        files=list_files(folder),
        compute_capabilities=recipe.compute_capabilities,
        shards=recipe.shards,
        tensorrt=recipe.tensorrt,
        plugin_digest=source_digest() if is_gpu else "",
        engines=tuple(rank.engines for rank in ranks) if is_gpu else (),
        memory=memory_table(checkpoint.config, recipe) if is_gpu else None,
        latency=latency,
    )


def _planned_latency(recipe: Recipe, checkpoint: Checkpoint) -> LatencyTable:
    """Predicted step times on the recipe's GPU, if it names one. Raises BuildError if the build does not fit it."""
    if not recipe.gpu:
        return {}
    planned = plan_for(checkpoint.config, recipe, gpu_named(recipe.gpu), usual_context(recipe))
    if planned.faults:
        raise BuildError(f"the build does not fit: {'; '.join(planned.faults)}")
    return planned.latency()


def read_checkpoint(source: Path) -> Checkpoint:
    """Open a folder or a GGUF and check that it holds the model, the whole model and nothing else."""
    checkpoint = read_hf_folder(source) if source.is_dir() else read_gguf(source)
    check_tensors(checkpoint)
    return checkpoint


def _check_fit(recipe: Recipe, checkpoint: Checkpoint) -> None:
    limit, positions = recipe.limits.max_context, checkpoint.config.sizes.max_positions
    if limit > positions:
        raise BuildError(f"limits.max_context is {limit}, the model has {positions} positions: lower max_context")
    if not checkpoint.eos_ids:
        raise BuildError(
            f"{checkpoint.path} names no end-of-sequence token: set eos_token_id in its generation_config.json"
        )


def _held(out: Path, identity: str, pins: Pins | None) -> Bundle | None:
    """The whole bundle of that identity at `out`, or None."""
    if not (out / FILE_NAME).is_file():
        return None
    try:
        if read_manifest(out / FILE_NAME).identity != identity:
            return None
        held = open_bundle(out)
    except BundleError:  # stale or damaged: build it again
        return None
    if pins is not None:
        pins.check_graphs(held.manifest)
    return held


def _placed(folder: Path, out: Path, pins: Pins | None) -> Bundle:
    """Publish what the build cache gave: whole, and checked."""
    manifest = read_manifest(folder / FILE_NAME)
    if pins is not None:
        pins.check_graphs(manifest)
    put_in_place(folder, out)
    return Bundle(out, manifest)
