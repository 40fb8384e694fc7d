"""`ostinato plan`: whether a recipe fits a GPU, and how fast it can be at best, before a build (once per call)."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.engines.argument_parser import ArgumentParser
from ostinato.engines.errors import RecipeError
from ostinato.engines.recipe import Recipe, read_recipe
from ostinato.engines.targets import GPU_TARGETS

from .config import DecoderConfig
from .config_source import decoder_config
from .gpu_plan import GpuPlan, plan_for, size_text, usual_context
from .gpus import GPUS, Gpu, gpu_named
from .memory_plan import USABLE, Fit
from .recipe_arguments import add_config, add_recipe

_MIB = 2**20


def plan(argv: list[str]) -> int:
    """`ostinato plan RECIPE --gpu NAME [--set …] [--config FILE] [--context N]`; 0 if it fits, 1 if it does not."""
    parser = ArgumentParser(
        prog="ostinato plan", description="Say whether a recipe fits a GPU, and how fast a step can be at best."
    )
    add_recipe(parser)
    add_config(parser)
    parser.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)} (default: the recipe's gpu)")
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens that each decoding request has cached (default: 1024)"
    )
    arguments = parser.parse_args(argv)
    recipe = read_recipe(arguments.recipe, arguments.set)
    name = arguments.gpu or recipe.gpu
    if not name:
        raise RecipeError(f"{arguments.recipe} names no gpu: give --gpu with one of {', '.join(GPUS)}")
    gpu = gpu_named(name)
    if recipe.target not in GPU_TARGETS:
        raise RecipeError(f"the recipe is for target {recipe.target}: plan is for GPU targets, give --set target=rtx")
    config = decoder_config(recipe, arguments.config)
    context = usual_context(recipe) if arguments.context is None else arguments.context
    if not 0 <= context < recipe.limits.max_context:
        raise RecipeError(
            f"--context is {context}: give 0 to {recipe.limits.max_context - 1}, max_context less a token"
        )
    planned = plan_for(config, recipe, gpu, context)
    console = Console()
    for line in (_model(recipe, config, arguments.config), _form(recipe, gpu)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(memory_view(recipe, planned.fit), step_view(planned))
    for fault in planned.faults:
        console.print(f"does not fit: {fault}", style="bold red", highlight=False, markup=False, soft_wrap=True)
    if not planned.faults:
        console.print(f"fits: {size_text(-planned.fit.missing_bytes)} to spare beside the pool that the limits ask for")
    return 1 if planned.faults else 0


def _model(recipe: Recipe, config: DecoderConfig, file: Path | None) -> str:
    """Whose figures these are: a recipe that is only borrowed gives its limits and precisions, not its model."""
    sizes = config.sizes
    model = f"{sizes.architecture}, {sizes.num_layers} layers, hidden {sizes.hidden_size}"
    return f"{recipe.name}: {model}" if file is None else f"{file}: {model}; all else from recipe {recipe.name}"


def _form(recipe: Recipe, gpu: Gpu) -> str:
    shards = recipe.shards
    count = f"{shards.num_ranks} × {gpu.name}" if shards.num_ranks > 1 else gpu.name
    cut = f" ({shards.tensor_parallel} slices × {shards.pipeline_parallel} stages)" if shards.num_ranks > 1 else ""
    return f"target {recipe.target}, weights {recipe.weights}, KV cache {recipe.kv_cache}, on {count}{cut}"


def memory_view(recipe: Recipe, found: Fit) -> Table:
    memory, limits = found.memory, found.limits
    of = "memory of the rank that takes most" if recipe.shards.num_ranks > 1 else "memory"
    table = Table(of, "", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.columns[1].justify = "right"
    largest, most = max(memory.activation_bytes.items(), key=lambda entry: entry[1])
    for name, value in (
        ("weights, rope tables", size_text(memory.weight_bytes)),
        ("sampling state", size_text(memory.state_bytes)),
        ("kernels' scratch", size_text(memory.scratch_bytes)),
        (f"activations ({largest}), in part estimated", size_text(most)),
        (f"{len(memory.activation_bytes)} captured graphs, estimated", size_text(memory.graph_reserve_bytes)),
        (f"{USABLE:.0%} of the GPU", size_text(found.usable_bytes)),
        ("left for KV blocks", size_text(max(0, found.usable_bytes - memory.fixed_bytes))),
        ("a KV block", f"{memory.kv_bytes_per_block / 2**10:.1f} KiB for {limits.block_size} tokens"),
        ("blocks: room / asked for", f"{found.blocks:,} / {memory.num_blocks:,}"),
        ("tokens: room / asked for", f"{found.tokens:,} / {limits.kv_tokens:,}"),
        (f"rows of {limits.max_context:,} tokens: room / at most", f"{found.rows_at_max_context} / {limits.max_rows}"),
    ):  # fmt: skip
        table.add_row(name, value)
    return table


def step_view(planned: GpuPlan) -> Table:
    headers = ("step", "activations\nMiB", "memory\nms", "compute\nms", "link\nms", "predicted\nms", "tokens/s")
    table = Table(*headers, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.no_wrap, column.justify = True, "left" if column is table.columns[0] else "right"
    for one in planned.predictions:
        table.add_row(
            one.key,
            f"{planned.fit.memory.activation_bytes[one.key] / _MIB:.1f}",
            f"{one.memory_ms:.3f}",
            f"{one.compute_ms:.3f}",
            f"{one.link_ms:.3f}",
            f"{one.total_ms:.3f}",
            f"{1e3 * int(one.key.split()[1]) / one.total_ms:,.0f}",
        )
    table.caption = (
        f"predicted, not measured: a roofline, with {planned.context} tokens of context in each decode row and none "
        "before a prefill, and without the time to start kernels and transfers"
    )
    return table
