"""`ostinato kernels`: compile a recipe's kernels for every architecture and say what each costs (once per call)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from ostinato.engines import recipe as recipes
from ostinato.engines.architectures import KERNEL_ARCHITECTURES
from ostinato.engines.argument_parser import ArgumentParser
from ostinato.engines.errors import RecipeError
from ostinato.engines.recipe import Recipe, read_recipe
from ostinato.engines.targets import GPU_TARGETS

from .config_source import decoder_config
from .kernel_compiler import compile_kernels
from .kernel_report import kernel_specs, report_record, resource_view, spills, traffic, traffic_view
from .progress import ConsoleProgress
from .rank_operators import RankOperators, rank_operators
from .recipe_arguments import add_config, add_recipe
from .termination import orderly_termination

DEMO = Path(recipes.__file__).parent / "recipes" / "smollm2-135m-rtx.toml"
_CONTEXT = 1024
_CAPABILITIES = {arch: capability for capability, arch in reversed(KERNEL_ARCHITECTURES.items())}  # the first of each


def kernels(argv: list[str]) -> int:
    """`ostinato kernels [RECIPE] [--set …] [--arch sm_86 …] [--out FOLDER] [--json]`; 0, or 1 if a kernel spills."""
    parser = ArgumentParser(
        prog="ostinato kernels", description="Compile a recipe's GPU kernels, and show what each takes."
    )
    add_recipe(parser, DEMO)
    add_config(parser)
    architectures = sorted(_CAPABILITIES, key=_number)
    parser.add_argument(
        "--arch",
        action="append",
        choices=architectures,
        metavar="ARCH",
        help=f"one of {', '.join(architectures)}; may be given again (default: all)",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the compiled kernels in this folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = parser.parse_args(argv)
    recipe = read_recipe(arguments.recipe, arguments.set)
    ranks = _ranks(recipe, arguments.config)
    specs = kernel_specs(ranks)
    capabilities = [_CAPABILITIES[arch] for arch in arguments.arch or architectures]
    progress = ConsoleProgress(Console(stderr=True))  # standard output is the report's
    with orderly_termination(), _folder(arguments.out) as folder, progress.shown():
        compiled = compile_kernels(specs, capabilities, folder, progress, spills_allowed=True)
    context = min(_CONTEXT, recipe.limits.max_context - 1)
    moved = traffic(ranks[-1], recipe, context)
    if arguments.json:
        print(json.dumps(report_record(recipe, specs, compiled, moved), indent=1, sort_keys=True))
    else:
        Console().print(resource_view(specs, compiled), traffic_view(moved, context))
    return 1 if spills(compiled) else 0


def _ranks(recipe: Recipe, config: Path | None) -> list[RankOperators]:
    """One rank of each pipeline stage: the slices of a stage have the same kernels."""
    if recipe.target not in GPU_TARGETS:
        raise RecipeError(f"the recipe is for target {recipe.target}, which has no GPU kernels: give --set target=rtx")
    sizes, shards = decoder_config(recipe, config).sizes, recipe.shards
    stages = range(shards.pipeline_parallel)
    return [rank_operators(sizes, recipe, shards.shard(stage * shards.tensor_parallel)) for stage in stages]


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecipeError(f"--out {out} can't be made a folder ({error.strerror}): give another") from None
        yield out
    else:
        with tempfile.TemporaryDirectory(prefix="ostinato-kernels-") as folder:
            yield Path(folder)


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_"))
