"""`ostinato plan`: whether a recipe fits a GPU, and how fast it can be at best, before a build (once per call)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ostinato.engines.errors import RecipeError
from ostinato.engines.recipe import COMPUTE_CAPABILITIES, GPU_TARGETS, Recipe, read_recipe

from .config import DecoderConfig
from .config_source import decoder_config
from .gpus import GPUS, Gpu, gpu_named
from .launch_plan import step_shapes
from .memory_plan import USABLE, Fit, fit, memory_table
from .roofline import StepPrediction, predict_step

_MIB, _GIB = 2**20, 2**30
_USUAL_CONTEXT = 1024


def plan(argv: list[str]) -> int:
    """`ostinato plan RECIPE --gpu NAME [--set …] [--config FILE] [--context N]`; 0 if it fits, 1 if it does not."""
    parser = argparse.ArgumentParser(
        prog="ostinato plan", description="Say whether a recipe fits a GPU, and how fast a step can be at best."
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a TOML file, such as engines/recipes/….toml")
    parser.add_argument("--gpu", required=True, metavar="NAME", help=f"one of {', '.join(GPUS)}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a recipe key")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a config.json in place of the checkpoint")
    parser.add_argument("--context", type=int, metavar="N", help="tokens that a decode row has cached (default: 1024)")
    arguments = parser.parse_args(argv)
    gpu, recipe = gpu_named(arguments.gpu), read_recipe(arguments.recipe, arguments.set)
    if recipe.target not in GPU_TARGETS:
        raise RecipeError(f"the recipe is for target {recipe.target}: plan is for GPU targets, give --set target=rtx")
    config = decoder_config(recipe, arguments.config)
    context = arguments.context if arguments.context is not None else min(_USUAL_CONTEXT, recipe.limits.max_context - 1)
    if not 0 <= context < recipe.limits.max_context:
        raise RecipeError(
            f"--context is {context}: give 0 to {recipe.limits.max_context - 1}, max_context less a token"
        )
    found = fit(memory_table(config, recipe), recipe.limits, gpu)
    predictions = [predict_step(config, recipe, gpu, step, context) for step in step_shapes(recipe.limits)]
    faults = faults_of(config, recipe, gpu, found)
    console = Console()
    console.print(memory_view(recipe, gpu, found), step_view(found, predictions, context))
    for fault in faults:
        console.print(f"does not fit: {fault}", style="bold red", highlight=False)
    if not faults:
        console.print(f"fits: {_size(-found.missing_bytes)} to spare beside the pool that the limits ask for")
    return 1 if faults else 0


def faults_of(config: DecoderConfig, recipe: Recipe, gpu: Gpu, found: Fit) -> list[str]:
    """Why this build would not run on this GPU, and what to change; empty if it would."""
    faults = []
    capability, limits = gpu.compute_capability, recipe.limits
    if capability not in COMPUTE_CAPABILITIES[recipe.target]:
        others = [target for target in GPU_TARGETS if capability in COMPUTE_CAPABILITIES[target]]
        faults.append(
            f"{gpu.name} has compute capability {capability}, which target {recipe.target} has no engines for: "
            f"choose target {' or '.join(others)}"
        )
    elif capability not in recipe.compute_capabilities:
        faults.append(
            f"{gpu.name} has compute capability {capability}, the recipe builds for "
            f"{', '.join(recipe.compute_capabilities)}: add {capability} to compute_capabilities"
        )
    if limits.max_context > config.sizes.max_positions:
        faults.append(
            f"limits.max_context is {limits.max_context}, the model has {config.sizes.max_positions} positions: "
            "lower it"
        )
    if not found.fits:
        faults.append(f"{_size(found.missing_bytes)} too much for {gpu.name}: {_advice(found)}")
    return faults


def _advice(found: Fit) -> str:
    limits = found.limits
    if found.tokens < limits.block_size:
        return "nothing remains for KV blocks: raise shards.tensor_parallel, or choose a GPU with more memory"
    if found.tokens < limits.max_context:
        return f"lower limits.kv_tokens and limits.max_context to {found.tokens}, or raise shards.tensor_parallel"
    return f"lower limits.kv_tokens to {found.tokens}, choose a smaller kv_cache, or raise shards.tensor_parallel"


def memory_view(recipe: Recipe, gpu: Gpu, found: Fit) -> Table:
    memory, limits, shards = found.memory, found.limits, recipe.shards
    ranks = f"tp {shards.tensor_parallel} × pp {shards.pipeline_parallel}"
    title = f"{recipe.name}, {recipe.target}, {recipe.weights}, KV cache {recipe.kv_cache}, {ranks} on {gpu.name}"
    table = Table("memory of the rank that takes most", "", title=title, title_justify="left")
    table.columns[1].justify = "right"
    largest, most = max(memory.activation_bytes.items(), key=lambda entry: entry[1])
    for name, value in (
        ("weights, rope tables", _size(memory.weight_bytes)),
        ("sampling state", _size(memory.state_bytes)),
        ("kernels' scratch", _size(memory.scratch_bytes)),
        (f"activations ({largest}), in part estimated", _size(most)),
        (f"{len(memory.activation_bytes)} captured graphs, estimated", _size(memory.graph_reserve_bytes)),
        (f"{USABLE:.0%} of the GPU", _size(found.usable_bytes)),
        ("left for KV blocks", _size(max(0, found.usable_bytes - memory.fixed_bytes))),
        ("a KV block", f"{memory.kv_bytes_per_block / 2**10:.1f} KiB for {limits.block_size} tokens"),
        ("blocks: room / asked for", f"{found.blocks:,} / {memory.num_blocks:,}"),
        ("tokens: room / asked for", f"{found.tokens:,} / {limits.kv_tokens:,}"),
        (f"rows of {limits.max_context:,} tokens: room / at most", f"{found.rows_at_max_context} / {limits.max_rows}"),
    ):  # fmt: skip
        table.add_row(name, value)
    return table


def step_view(found: Fit, predictions: Sequence[StepPrediction], context: int) -> Table:
    table = Table("step", "MiB", "memory ms", "compute", "link", "predicted", "tokens/s")
    for column in table.columns:
        column.no_wrap, column.justify = True, "left" if column is table.columns[0] else "right"
    for one in predictions:
        table.add_row(
            one.key,
            f"{found.memory.activation_bytes[one.key] / _MIB:.1f}",
            f"{one.memory_ms:.3f}",
            f"{one.compute_ms:.3f}",
            f"{one.link_ms:.3f}",
            f"{one.total_ms:.3f}",
            f"{1e3 * int(one.key.split()[1]) / one.total_ms:,.0f}",
        )
    table.caption = (
        f"predicted, not measured: a roofline, with {context} tokens of context in each decode row and none before a "
        "prefill; MiB: activations"
    )
    return table


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"
