"""The sizes a build is made for: frozen, validated when made, kept in the manifest (offline; read once at start)."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import RecipeError

MAX_LOGPROBS = 20  # K
MAX_LOGIT_BIAS = 1024  # M, entries a request
_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_q_heads", "num_kv_heads", "head_size",
    "max_positions",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSizes:
    """Shapes of a decoder. Counts are per model, not per shard."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_size: int
    max_positions: int
    sliding_window: int = 0  # tokens a query sees, itself included; 0 = all

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise RecipeError(f"the model's {name} is {getattr(self, name)}, wanted is 1 or more: check the config")
        if self.sliding_window < 0:
            raise RecipeError(f"the model's sliding_window is {self.sliding_window}: check the config, 0 means none")
        if self.head_size % 2:
            raise RecipeError(f"heads of size {self.head_size} have no two halves to rotate: check the config")
        if self.num_q_heads % self.num_kv_heads:
            raise RecipeError(
                f"{self.num_q_heads} query heads are not a multiple of {self.num_kv_heads} KV heads: check the config"
            )


@dataclass(frozen=True)
class Limits:
    """What one step and one pool may hold.

    `max_rows`: requests in a step. `max_step_tokens`: tokens in a step (decode rows and prefill chunks together).
    `max_context`: prompt + output tokens of one request. `kv_tokens`: tokens that the KV pool holds.
    `row_buckets`, `token_buckets`: counts that a step is padded up to, ascending; the last equals the maximum.
    """

    block_size: int
    max_rows: int
    max_step_tokens: int
    max_context: int
    kv_tokens: int
    row_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("block_size", "max_rows", "max_step_tokens", "max_context", "kv_tokens"):
            if getattr(self, name) < 1:
                raise RecipeError(f"limits.{name} is {getattr(self, name)}: give 1 or more")
        for name, buckets, top in (
            ("row_buckets", self.row_buckets, self.max_rows),
            ("token_buckets", self.token_buckets, self.max_step_tokens),
        ):
            if list(buckets) != sorted(set(buckets)) or not buckets or buckets[0] < 1 or buckets[-1] != top:
                raise RecipeError(f"limits.{name} is {list(buckets)}: give ascending counts from 1 that end with {top}")
        if self.max_step_tokens < self.max_rows:
            raise RecipeError(
                f"limits.max_step_tokens {self.max_step_tokens} is below max_rows {self.max_rows}: a step of decode "
                "rows would not fit; raise max_step_tokens"
            )
        if self.max_context > self.kv_tokens:
            raise RecipeError(
                f"limits.max_context {self.max_context} does not fit the pool of {self.kv_tokens} tokens: "
                "raise kv_tokens or lower max_context"
            )

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block 0 included."""
        return -(-self.kv_tokens // self.block_size) + 1

    @property
    def max_blocks_per_row(self) -> int:
        """P, the width of a block table."""
        return -(-self.max_context // self.block_size)

    @property
    def num_state_lines(self) -> int:
        """R: line 0 for pads, one a live request, and the last for scored prompt tokens, which is never written."""
        return self.max_rows + 2


def bucket_for(count: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `count`."""
    for bucket in buckets:
        if count <= bucket:
            return bucket
    raise ValueError(f"{count} exceeds the largest bucket {buckets[-1]}")
