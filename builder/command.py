"""`ostinato build` and `ostinato verify`: arguments in, exit code out (once per call)."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ostinato.engines.bundle import STORE, Bundle, open_bundle
from ostinato.engines.errors import BuildError
from ostinato.engines.recipe import Recipe, read_recipe

from .bundle_process import BundleProcess
from .pipeline import build as build_bundle
from .pipeline import read_checkpoint
from .progress import ConsoleProgress
from .prompts import QUESTIONS
from .reference import chat_prompts, load_reference
from .source import resolve_source
from .verify import MAX_MEAN_KL, MIN_TOP1, NUM_TOKENS, Verdict, schedules_for
from .verify import verify as verify_bundle


def build(argv: list[str]) -> int:
    """`ostinato build RECIPE [--set key=value …] [--out FOLDER] [--force]`; 0 when the bundle is there."""
    parser = argparse.ArgumentParser(prog="ostinato build", description="Build a bundle from a recipe.")
    _add_recipe(parser)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to put it (default: engines/store/NAME)")
    parser.add_argument("--force", action="store_true", help="build even if the same bundle is already there")
    arguments = parser.parse_args(argv)
    recipe = read_recipe(arguments.recipe, arguments.set)
    out = arguments.out or STORE / recipe.name
    console = Console()
    with ConsoleProgress(console).shown() as progress:
        built = build_bundle(recipe, out, progress, force=arguments.force)
    if built.is_reused:
        console.print(f"{out} already holds this bundle: nothing to do (--force builds it again)", highlight=False)
    console.print(_summary(built.bundle))
    return 0


def verify(argv: list[str]) -> int:
    """`ostinato verify RECIPE [--set key=value …] [--bundle FOLDER]`; 0 when the bundle is good, 1 when it is not."""
    parser = argparse.ArgumentParser(
        prog="ostinato verify", description="Compare a built bundle with transformers in float32."
    )
    _add_recipe(parser)
    parser.add_argument("--bundle", type=Path, metavar="FOLDER", help="the bundle (default: engines/store/NAME)")
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS), help="how many prompts (default: all)")
    arguments = parser.parse_args(argv)
    recipe = read_recipe(arguments.recipe, arguments.set)
    bundle = open_bundle(arguments.bundle or STORE / recipe.name)
    console = Console()
    with ConsoleProgress(console).shown() as progress:
        verdict = _verify(recipe, bundle, arguments.prompts, progress)
    console.print(_verdict_table(bundle, verdict))
    return 0 if verdict.is_good else 1


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a TOML file, such as engines/recipes/….toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a recipe key")


def _verify(recipe: Recipe, bundle: Bundle, num_prompts: int, progress: ConsoleProgress) -> Verdict:
    progress.stage("reference")
    reference = load_reference(read_checkpoint(resolve_source(recipe.checkpoint, recipe.sha256)))
    manifest = bundle.manifest
    room = manifest.limits.max_context - NUM_TOKENS
    prompts = chat_prompts(bundle.tokenizer_dir, QUESTIONS[:num_prompts], room)
    if not prompts:
        raise BuildError(f"no prompt fits into {room} tokens: raise limits.max_context, or give --prompts 1 or more")
    progress.stage("compare")
    schedules = schedules_for(manifest.limits.max_rows, manifest.limits.max_step_tokens)
    exact = manifest.weights == manifest.kv_cache == "float32"
    return verify_bundle(BundleProcess(bundle.path), reference, prompts, schedules, must_be_identical=exact)


def _verdict_table(bundle: Bundle, verdict: Verdict) -> Table:
    manifest = bundle.manifest
    title = (
        f"{manifest.name}: weights {manifest.weights}, KV cache {manifest.kv_cache}, against transformers in float32"
    )
    table = Table("check", "found", "wanted", "", title=title, title_justify="left")
    for result in verdict.schedules:
        share = result.num_identical / result.num_prompts
        found = (
            f"{result.num_identical} of {result.num_prompts} prompts ({share:.0%}) give the same {NUM_TOKENS} tokens"
        )
        note = f"; first difference: {result.first_difference}" if result.first_difference else ""
        wanted = "all" if verdict.must_be_identical else "no bound"
        good = share == 1 or not verdict.must_be_identical
        table.add_row(result.schedule.name, found + note, wanted, _word(good))
    positions = f" over {verdict.num_positions} positions"
    close, same = verdict.mean_kl <= MAX_MEAN_KL, verdict.top1 >= MIN_TOP1
    table.add_row("mean KL", f"{verdict.mean_kl:.5f} nats{positions}", f"at most {MAX_MEAN_KL}", _word(close))
    table.add_row("same best token", f"{verdict.top1:.2%}{positions}", f"at least {MIN_TOP1:.0%}", _word(same))
    table.add_row("verdict", "", "", "good" if verdict.is_good else "FAILED")
    return table


def _word(good: bool) -> str:
    return "ok" if good else "FAILED"


def _summary(bundle: Bundle) -> Table:
    manifest = bundle.manifest
    sizes, limits = manifest.sizes, manifest.limits
    pool = manifest.kv_bytes_per_block * limits.num_blocks
    table = Table(show_header=False, title=str(bundle.path), title_justify="left")
    for key, value in (
        ("identity", manifest.identity[:16]),
        ("target", f"{manifest.target} on {manifest.hardware.get('machine', 'any machine')}"),
        ("model", f"{sizes.architecture}, {sizes.num_layers} layers, vocabulary {sizes.vocab_size}"),
        ("weights", f"{manifest.weights}, {_mebibytes(manifest.weight_bytes)}"),
        ("KV cache", f"{manifest.kv_cache}, {_mebibytes(pool)} for {limits.kv_tokens} tokens"),
        ("limits", f"{limits.max_rows} rows, {limits.max_step_tokens} tokens a step, context {limits.max_context}"),
        ("ends with", ", ".join(map(str, manifest.eos_ids))),
        *(("note", note) for note in manifest.notes),
    ):
        table.add_row(key, value)
    return table


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
