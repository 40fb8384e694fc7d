"""Ranks of target `trt` without a GPU: a builder that records every call, and kernels that nothing runs (in tests)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ostinato.builder.checkpoint import Checkpoint
from ostinato.builder.export import for_rank, stage_onnx
from ostinato.builder.rank_graph import device_graph
from ostinato.builder.rank_result import RankResult
from ostinato.builder.shard import shard_sizes
from ostinato.builder.weights import parameters_of
from ostinato.engines.program import KernelCall, KernelInfo, Program, program_from_json
from ostinato.engines.recipe import Recipe
from ostinato.engines.shards import Shards
from ostinato.engines.tensorrt_options import TensorRTOptions
from ostinato.plugins.kernel_launch import KernelSpec

from ..cuda_driver import FakeDriver
from ..tensorrt_fakes import Builder, Network
from ..tensorrt_standin import standin
from .conftest import LIMITS, Silent

trt = standin()

from ostinato.builder import trt as target  # noqa: E402

FLAG = trt.BuilderFlag
FEED = KernelCall("feed", "FeedTokens", {"input_ids": "input_ids", "feed_rows": "feed_rows", "last_tokens": "tokens"})


def recipe_of(shards: Shards | None = None, kv_cache: str = "float16", **options: Any) -> Recipe:
    return Recipe(
        "tiny", "checkpoint", "trt", "float16", kv_cache, LIMITS,
        compute_capabilities=("9.0",),
        shards=shards or Shards(),
        tensorrt=TensorRTOptions(**{"operators": "inside", **options}),
    )  # fmt: skip


TRACED: dict[tuple[Shards, int], Any] = {}  # a trace takes seconds, a copy none


def traced(checkpoint: Checkpoint, shards: Shards, rank: int) -> Any:
    stage = shards.shard(rank).stage
    if (shards, stage) not in TRACED:
        TRACED[shards, stage] = stage_onnx(checkpoint.config, LIMITS.block_size, LIMITS.max_context, shards.shard(rank))
    return for_rank(TRACED[shards, stage], checkpoint.config, shards.shard(rank))


def stand_in_kernels(specs: Iterable[KernelSpec], capabilities: Sequence[str], folder: Path, progress: Any) -> Any:
    """Cubins that nothing runs: the compiler has its own tests."""
    (folder / "sm_90").mkdir(parents=True)
    infos = {}
    for spec in specs:
        (folder / "sm_90" / f"{spec.name}.cubin").write_bytes(b"cubin")
        infos[spec.name] = KernelInfo(spec.function, spec.num_warps, 0, 2, 32, 0)
    return {"sm_90": infos}


class Listener(Silent):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def detail(self, text: str) -> None:
        self.heard.append(text)


def written(
    recipe: Recipe,
    checkpoint: Checkpoint,
    folder: Path,
    rank: int = 0,
    driver: FakeDriver | None = None,
    progress: Silent | None = None,
) -> tuple[RankResult, Path]:
    shard = recipe.shards.shard(rank)
    parameters = parameters_of(checkpoint, LIMITS.max_context, shard)
    graph, stored = device_graph(traced(checkpoint, recipe.shards, rank), checkpoint.config, recipe, shard, parameters)
    sizes = shard_sizes(checkpoint.config.sizes, shard)
    out = folder / f"rank{rank}"
    out.mkdir()
    tools = target.Tools(stand_in_kernels, driver or FakeDriver())
    return target.write_rank(recipe, graph, stored, shard, sizes, out, progress or Silent(), tools), out


def program_at(folder: Path) -> Program:
    path = folder / "program.json"
    return program_from_json(path.read_text(), path)


def network() -> Network:
    found = Builder.made[-1].network
    assert found is not None
    return found


def config() -> Any:
    return Builder.made[-1].config
