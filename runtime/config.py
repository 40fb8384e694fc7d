"""What a caller may choose when a bundle is opened; the bundle's manifest decides the rest (read once at start)."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import Any

from ostinato.engines.errors import RecipeError
from ostinato.engines.manifest import Manifest
from ostinato.engines.recipe import PACKED_WEIGHTS
from ostinato.engines.sizes import Limits
from ostinato.engines.targets import GPU_TARGETS


@dataclass(frozen=True)
class RuntimeConfig:
    """None keeps what the bundle was built with. `num_threads` None means every core this process may use.

    `strict_graphs`: on a GPU, refuse decode steps that no captured graph serves, instead of running them eagerly.
    `jump_ahead`: where steps follow one another, as on a CPU, take tokens that a grammar forces without sampling them.
    None: only where a token in a chunk leaves the same in the cache as one alone: on x86, and if it is not rounded.
    """

    max_rows: int | None = None
    max_step_tokens: int | None = None
    max_context: int | None = None
    kv_tokens: int | None = None
    prefix_cache: bool = True
    num_threads: int | None = None
    strict_graphs: bool = False
    jump_ahead: bool | None = None

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_step_tokens", "max_context", "kv_tokens", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RecipeError(f"{name} is {value}: give 1 or more, or none for the default")

    @property
    def threads(self) -> int:
        return self.num_threads or len(os.sched_getaffinity(0))

    def limits(self, manifest: Manifest) -> Limits:
        """The bundle's limits with the caller's choices; a pool smaller than one full context lowers the context."""
        built = manifest.limits
        self._check_built(manifest)
        if self.strict_graphs and manifest.target not in GPU_TARGETS:
            raise RecipeError(
                f"strict graphs are for GPU bundles, {manifest.name} is for target {manifest.target}: drop them"
            )
        kv_tokens = self.kv_tokens or built.kv_tokens
        max_context = self.max_context or min(built.max_context, kv_tokens)
        max_step_tokens = self.max_step_tokens or built.max_step_tokens
        max_rows = self.max_rows or min(built.max_rows, max_step_tokens)
        return Limits(
            block_size=built.block_size,
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            max_context=max_context,
            kv_tokens=kv_tokens,
            row_buckets=_cut(built.row_buckets, max_rows),
            token_buckets=_token_buckets(manifest, max_step_tokens),
        )

    def _check_built(self, manifest: Manifest) -> None:
        """Engines and kernels of a GPU bundle were compiled for what they were built with, and for less.

        On a CPU only the tables of angles end there.
        """
        names = ["max_context"]
        if manifest.target in GPU_TARGETS:
            names += ["max_rows", "max_step_tokens"]
        if manifest.target == "trt" and manifest.tensorrt.operators == "inside":
            names.append("kv_tokens")  # the engine's own
        for name in names:
            built = getattr(manifest.limits, name)
            if (asked := getattr(self, name) or 0) > built:
                raise RecipeError(
                    f"{name} is {asked}, the bundle was built for {built}: give less, or build it with --set "
                    f"limits.{name}={asked}"
                )


def _token_buckets(manifest: Manifest, top: int) -> tuple[int, ...]:
    """OpenVINO multiplies one token by packed weights in another way than several: there one is padded to two.

    So a row alone gives the same logits as the row in a batch, for about a hundredth of a lone row's step.
    """
    buckets = _cut(manifest.limits.token_buckets, top)
    is_padded = manifest.target == "cpu" and manifest.weights in PACKED_WEIGHTS
    return buckets[1:] if is_padded and buckets[0] == 1 < top else buckets


def _cut(buckets: tuple[int, ...], top: int) -> tuple[int, ...]:
    return (*(bucket for bucket in buckets if bucket < top), top)


def add_arguments(parser: ArgumentParser) -> None:
    """The options that every command that opens a bundle shares."""
    group = parser.add_argument_group("engine", "What is not given is as the bundle was built.")
    group.add_argument("--max-rows", type=int, metavar="N", help="requests in one step")
    group.add_argument(
        "--max-step-tokens", type=int, metavar="N", help="tokens in one step; a longer prompt takes several"
    )
    group.add_argument("--max-context", type=int, metavar="N", help="prompt and output tokens of one request")
    group.add_argument(
        "--kv-tokens", type=int, metavar="N", help="tokens whose keys and values are held, of all requests"
    )
    group.add_argument(
        "--prefix-cache", choices=("on", "off"), help="compute equal beginnings of prompts once (default: on)"
    )
    group.add_argument(
        "--strict-graphs",
        action="store_true",
        default=None,
        help="on a GPU, refuse decode steps that no captured CUDA graph serves (default: run them, slower)",
    )
    group.add_argument(
        "--jump-ahead",
        choices=("on", "off"),
        help="on a CPU, do not sample what a grammar forces (default: on where answers stay the same)",
    )
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all that this process may use)")


def given_options(args: Namespace) -> dict[str, Any]:
    """RuntimeConfig's fields that the command line names."""
    options = {
        "max_rows": args.max_rows,
        "max_step_tokens": args.max_step_tokens,
        "max_context": args.max_context,
        "kv_tokens": args.kv_tokens,
        "prefix_cache": None if args.prefix_cache is None else args.prefix_cache == "on",
        "num_threads": args.threads,
        "strict_graphs": args.strict_graphs,
        "jump_ahead": None if args.jump_ahead is None else args.jump_ahead == "on",
    }
    return {name: value for name, value in options.items() if value is not None}


def config_from_args(args: Namespace) -> RuntimeConfig:
    return RuntimeConfig(**given_options(args))
