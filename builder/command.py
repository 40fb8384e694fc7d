"""`ostinato build` and `ostinato verify`: arguments in, exit code out (once per call)."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ostinato.engines.argument_parser import ArgumentParser
from ostinato.engines.bundle import STORE, Bundle, open_bundle
from ostinato.engines.bundle_advice import as_typed
from ostinato.engines.errors import BuildError
from ostinato.engines.manifest import FILE_NAME, Manifest
from ostinato.engines.recipe import Recipe, read_recipe
from ostinato.engines.targets import GPU_TARGETS, TARGETS

from .build_cache import BuildCache
from .bundle_process import BundleProcess
from .lock import lock_of, lock_path, read_pins, write_lock
from .pipeline import Built, read_checkpoint
from .pipeline import build as build_bundle
from .progress import ConsoleProgress
from .prompts import QUESTIONS
from .recipe_arguments import add_recipe, recipe_for
from .source import resolve_source
from .termination import orderly_termination
from .verdict_report import save_verdict, verdict_view
from .verify import NUM_TOKENS, Verdict, schedules_for
from .verify import verify as verify_bundle


def build(argv: list[str]) -> int:
    """`ostinato build RECIPE [--set key=value …] [--out FOLDER] [--force] …`; 0 when the bundle is there."""
    parser = ArgumentParser(prog="ostinato build", description="Build a bundle from a recipe.")
    add_recipe(parser)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to put it (default: engines/store/NAME)")
    parser.add_argument("--force", action="store_true", help="build even if the same bundle is there already")
    parser.add_argument(
        "--no-cache", action="store_true", help="neither take the bundle from the cache of earlier builds nor add it"
    )
    parser.add_argument(
        "--max-build-memory",
        type=_bytes,
        metavar="BYTES",
        help="GPU targets: host memory that building engines may take, such as 2GiB (default: no bound)",
    )
    locking = parser.add_mutually_exclusive_group()
    locking.add_argument(
        "--lock", action="store_true", help="write what the build was made of, and its digests, beside the recipe"
    )
    locking.add_argument("--locked", action="store_true", help="refuse to build anything else than what --lock wrote")
    arguments = parser.parse_args(argv)
    recipe = read_recipe(arguments.recipe, arguments.set)
    out = arguments.out or STORE / recipe.name
    console = Console()
    with orderly_termination(), ConsoleProgress(console).shown() as progress:
        built = build_bundle(
            recipe,
            out,
            progress,
            force=arguments.force,
            max_build_memory=arguments.max_build_memory,
            bundles=None if arguments.no_cache else BuildCache(),
            pins=read_pins(lock_path(arguments.recipe)) if arguments.locked else None,
        )
    if arguments.lock:
        path, lock = lock_path(arguments.recipe), lock_of(built.ingredients, built.bundle.manifest)
        write_lock(path, lock)
        console.print(f"locked in {path}: {lock.told()}", highlight=False, soft_wrap=True)
    _print_built(console, as_typed(out), built)
    return 0


def _print_built(console: Console, out: Path, built: Built) -> None:
    """What there is now, or one line if that was there before."""
    if built.is_reused:
        identity = built.bundle.manifest.identity[:16]
        told = f"{out} already holds this bundle, {identity}: nothing to do (--force builds it again)"
        console.print(told, highlight=False, soft_wrap=True)
        return
    if built.is_cached:
        console.print(f"{out} comes from the build cache (--force builds it again)", highlight=False, soft_wrap=True)
    console.print(_summary(out, built.bundle.manifest))


def _bytes(text: str) -> int:
    """A count of bytes, with KiB, MiB or GiB behind it or not."""
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    number, unit = (text[:-3], units[text[-3:]]) if text[-3:] in units else (text, 1)
    try:
        count = int(float(number) * unit)
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give bytes, or KiB, MiB or GiB, such as 2GiB")
    return count


def verify(argv: list[str]) -> int:
    """`ostinato verify RECIPE|BUNDLE [--set …] [--bundle FOLDER] [--json FILE]`; 1 if the bundle is bad, else 0."""
    parser = ArgumentParser(prog="ostinato verify", description="Compare a built bundle with transformers in float32.")
    add_recipe(parser, or_bundle=True)
    parser.add_argument(
        "--bundle", type=Path, metavar="FOLDER", help="the bundle's folder, with a RECIPE (default: engines/store/NAME)"
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=len(QUESTIONS),
        metavar="N",
        help=f"how many of {len(QUESTIONS)} prompts (default: all)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also put the figures into this file, under the bundle's name"
    )
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.prompts <= len(QUESTIONS):
        parser.error(f"--prompts is {arguments.prompts}: give 1 to {len(QUESTIONS)}")
    recipe, bundle = _to_verify(arguments)
    console = Console()
    with ConsoleProgress(console).shown() as progress:
        verdict = _verify(recipe, bundle, arguments.prompts, progress)
    console.print(verdict_view(bundle.manifest, verdict))
    if arguments.json:
        save_verdict(arguments.json, bundle.manifest, verdict, shlex.join(["ostinato", "verify", *argv]))
    return 0 if verdict.is_good else 1


def _to_verify(arguments: argparse.Namespace) -> tuple[Recipe, Bundle]:
    given: Path = arguments.recipe
    if not (given / FILE_NAME).is_file():
        recipe = read_recipe(given, arguments.set)
        return recipe, open_bundle(arguments.bundle or STORE / recipe.name)
    if arguments.bundle is not None:
        raise BuildError(
            f"{given} is a bundle, and so is {arguments.bundle}: give the recipe and --bundle, or one bundle"
        )
    bundle = open_bundle(given)
    return read_recipe(recipe_for(bundle.manifest, given), arguments.set), bundle


def _verify(recipe: Recipe, bundle: Bundle, num_prompts: int, progress: ConsoleProgress) -> Verdict:
    manifest = bundle.manifest
    if manifest.target in GPU_TARGETS:
        raise BuildError(
            f"{bundle.path} is for target {manifest.target}, whose logits stay on the GPU: verify a bundle of the same "
            "checkpoint for target cpu"
        )
    found, wanted = (manifest.weights, manifest.kv_cache), (recipe.weights, recipe.kv_cache)
    if found != wanted:
        raise BuildError(
            f"{bundle.path} has weights and KV cache in {' and '.join(found)}, the recipe says {' and '.join(wanted)}: "
            "build it again, or give --bundle or --set"
        )
    from .reference import chat_prompts, load_reference  # transformers: `build` does without

    progress.stage("reference")
    reference = load_reference(read_checkpoint(resolve_source(recipe.checkpoint, recipe.sha256)))
    room = manifest.limits.max_context - NUM_TOKENS
    prompts = chat_prompts(bundle.tokenizer_dir, QUESTIONS[:num_prompts], room)
    if not prompts:
        raise BuildError(f"no prompt fits into {room} tokens: raise limits.max_context, or give --prompts 1 or more")
    schedules = schedules_for(manifest.limits.max_rows, manifest.limits.max_step_tokens)
    exact = found == ("float32", "float32")
    is_alike = TARGETS[manifest.target].rows_are_alike
    return verify_bundle(BundleProcess(bundle.path), reference, prompts, schedules, exact, progress.stage, is_alike)


def _summary(out: Path, manifest: Manifest) -> Table:
    sizes, limits = manifest.sizes, manifest.limits
    pool = manifest.kv_bytes_per_block * limits.num_blocks
    needs = ", ".join(f"{key} {value}" for key, value in sorted(manifest.hardware.items()))
    table = Table(show_header=False, title=str(out), title_justify="left")
    for key, value in (
        ("identity", manifest.identity[:16]),
        ("target", f"{manifest.target}; needs {needs}"),
        ("model", f"{sizes.architecture}, {sizes.num_layers} layers, vocabulary {sizes.vocab_size}"),
        ("weights", f"{manifest.weights}, {_mebibytes(manifest.weight_bytes)}"),
        ("KV cache", f"{manifest.kv_cache}, {_mebibytes(pool)} for {limits.kv_tokens} tokens"),
        ("limits", f"{limits.max_rows} rows, {limits.max_step_tokens} tokens a step, context {limits.max_context}"),
        ("end tokens", ", ".join(map(str, manifest.eos_ids))),
        *(("note", note) for note in manifest.notes),
    ):
        table.add_row(key, value)
    return table


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
