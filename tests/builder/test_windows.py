"""A sliding window survives the export: below, at, just above and far above it, logits are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.builder.hf_checkpoint import read_hf_folder
from ostinato.engines.shards import ONE_RANK

from ..tiny import VOCAB_SIZE, tiny_model, write_tiny
from .shard_runner import ShardRunner, write_ranks

WINDOW = 8
BLOCK_SIZE = 8
LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW)
TEXT = np.random.default_rng(5).integers(0, VOCAB_SIZE, size=LENGTHS[-1]).tolist()


def _reference(model: Any, length: int) -> Any:
    with torch.no_grad():
        return model(torch.tensor([TEXT[:length]])).logits[0].numpy()


@pytest.mark.parametrize(
    ("architecture", "overrides", "window"),
    [
        ("mistral", {"sliding_window": WINDOW}, WINDOW),
        ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}, WINDOW),
        ("qwen2", {"use_sliding_window": False, "sliding_window": WINDOW}, LENGTHS[-1]),
    ],
)
def test_lengths_around_the_window(tmp_path: Path, architecture: str, overrides: dict[str, Any], window: int) -> None:
    model = write_tiny(tmp_path / "checkpoint", architecture, num_hidden_layers=1, **overrides)
    sees_all = tiny_model(architecture, num_hidden_layers=1, sliding_window=None)  # the same weights
    checkpoint = read_hf_folder(tmp_path / "checkpoint")
    ranks = write_ranks(checkpoint, ONE_RANK, tmp_path / "ranks", BLOCK_SIZE)
    runner = ShardRunner(checkpoint.config.sizes, ONE_RANK, ranks, block_size=BLOCK_SIZE)
    for request, length in enumerate(LENGTHS):
        found = runner.step([(request, TEXT[:length])])["logits"]
        np.testing.assert_allclose(found, _reference(model, length), atol=1e-4, rtol=1e-4)
        outside = np.abs(found[-1] - _reference(sees_all, length)[-1]).max() > 1e-2
        assert outside == (length > window), length
