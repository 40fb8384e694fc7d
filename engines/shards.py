"""How a model is spread over ranks: tensor-parallel slices times pipeline stages (offline; read once at start)."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import RecipeError


@dataclass(frozen=True)
class Shard:
    """One rank's part: slice `tp_rank` of `tensor_parallel`, stage `stage` of `pipeline_parallel`."""

    tp_rank: int
    tensor_parallel: int
    stage: int
    pipeline_parallel: int

    @property
    def rank(self) -> int:
        return self.stage * self.tensor_parallel + self.tp_rank

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pipeline_parallel - 1

    def kv_heads(self, num_kv_heads: int) -> range:
        """The KV heads of this slice; where there are more slices than heads, neighbours hold the same one."""
        first = self.tp_rank * num_kv_heads // self.tensor_parallel
        return range(first, first + max(1, num_kv_heads // self.tensor_parallel))

    def layers(self, num_layers: int) -> range:
        """The layers of this stage; the first stages take what does not divide evenly."""
        share, rest = divmod(num_layers, self.pipeline_parallel)
        start = self.stage * share + min(self.stage, rest)
        return range(start, start + share + (self.stage < rest))


WHOLE = Shard(tp_rank=0, tensor_parallel=1, stage=0, pipeline_parallel=1)


@dataclass(frozen=True)
class Shards:
    """Counts of a recipe: rank = stage * tensor_parallel + slice."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel"):
            if getattr(self, name) < 1:
                raise RecipeError(f"shards.{name} is {getattr(self, name)}: give 1 or more")

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def shard(self, rank: int) -> Shard:
        stage, tp_rank = divmod(rank, self.tensor_parallel)
        return Shard(tp_rank, self.tensor_parallel, stage, self.pipeline_parallel)

    def all(self) -> tuple[Shard, ...]:
        return tuple(self.shard(rank) for rank in range(self.num_ranks))


ONE_RANK = Shards()
