"""Tiny checkpoints and the bundles built of them, once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato.builder.checkpoint import Checkpoint
from ostinato.builder.pipeline import build, read_checkpoint
from ostinato.engines.bundle import Bundle
from ostinato.engines.recipe import Recipe
from ostinato.engines.sizes import Limits

from ..tiny import write_tiny

BLOCK_SIZE = 8
LIMITS = Limits(BLOCK_SIZE, 4, 64, 96, 256, (1, 2, 4), (1, 4, 16, 64))

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama untied, biases, llama3 rope": (
        "llama",
        {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            },
        },
    ),
    "mistral window 8": ("mistral", {"sliding_window": 8}),
    "qwen2 bias, linear rope": (
        "qwen2",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "qwen3 wide heads": ("qwen3", {"head_dim": 32}),
}  # fmt: skip


class Silent:
    """Progress that nobody watches; remembers the stages."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, name: str, total_bytes: int = 0) -> None:
        self.stages.append(name)

    def advance(self, num_bytes: int) -> None: ...

    def detail(self, text: str) -> None: ...


def tiny_recipe(checkpoint: Path, weights: str = "float32") -> Recipe:
    return Recipe("tiny", str(checkpoint), "cpu", weights, "float32", LIMITS)


Pair = tuple[Any, Bundle]  # a transformers model, and the float32 bundle of the same weights


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A name of MODELS → its pair; `bundle.path.parent / "checkpoint"` is where it came from."""
    made: dict[str, Pair] = {}

    def make(name: str) -> Pair:
        if name not in made:
            architecture, overrides = MODELS[name]
            folder = tmp_path_factory.mktemp("tiny")
            model = write_tiny(folder / "checkpoint", architecture, **overrides)
            made[name] = model, build(tiny_recipe(folder / "checkpoint"), folder / "bundle", Silent()).bundle
        return made[name]

    return make


@pytest.fixture(scope="session")
def llama(pair_of: Callable[[str], Pair]) -> Pair:
    return pair_of("llama tied")


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tiny models as graphs for GPU targets (a `gpu_graphs.GpuGraphs`)."""
    from .gpu_graphs import GpuGraphs

    return GpuGraphs(tmp_path_factory.mktemp("graphs"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A tiny tied Llama, opened."""
    folder = tmp_path_factory.mktemp("checkpoint") / "checkpoint"
    write_tiny(folder, "llama", tie_word_embeddings=True)
    return read_checkpoint(folder)
