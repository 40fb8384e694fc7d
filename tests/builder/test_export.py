"""The exported graph, run by ONNX Runtime over paged caches, says what transformers says of the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ..tiny import VOCAB_SIZE
from .conftest import BLOCK_SIZE, MODELS, Pair
from .paged_runner import PagedRunner


@pytest.fixture(params=list(MODELS))
def pair(request: pytest.FixtureRequest, pair_of: Callable[[str], Pair]) -> Pair:
    return pair_of(request.param)


def _reference(model: Any, tokens: list[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def test_ragged_prefill_and_decode_equal_transformers(pair: Pair) -> None:
    model, bundle = pair
    runner = PagedRunner(bundle.rank_dir() / "model.onnx", bundle.manifest.sizes, block_size=BLOCK_SIZE)
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, VOCAB_SIZE, size=length).tolist() for length in (40, 23, 9)]
    # Each step: how many tokens every request brings. Chunks cross blocks, rows join late, decode shares with prefill.
    steps = [(13, 0, 0), (1, 17, 0), (14, 1, 8), (1, 3, 1), (9, 1, 0), (1, 0, 0), (1, 1, 0)]
    done = [0, 0, 0]
    found: list[list[Any]] = [[], [], []]
    for counts in steps:
        rows = [(r, texts[r][done[r] : done[r] + count]) for r, count in enumerate(counts) if count]
        logits = runner.step(rows)["logits"]
        begin = 0
        for r, tokens in rows:
            found[r].append(logits[begin : begin + len(tokens)])
            begin += len(tokens)
            done[r] += len(tokens)
    assert done == [len(text) for text in texts]
    for r, text in enumerate(texts):
        np.testing.assert_allclose(np.concatenate(found[r]), _reference(model, text), atol=1e-4, rtol=1e-4)


def test_greedy_tokens_equal_transformers(pair: Pair) -> None:
    model, bundle = pair
    runner = PagedRunner(bundle.rank_dir() / "model.onnx", bundle.manifest.sizes, block_size=BLOCK_SIZE)
    prompt = [5, 250, 17, 99, 31, 8, 64, 200, 3, 77, 128]
    text = list(prompt)
    next_token = int(runner.step([(0, prompt)])["tokens"][-1])
    for _ in range(16):
        text.append(next_token)
        next_token = int(runner.step([(0, [next_token])])["tokens"][-1])
    wanted = _reference(model, text).argmax(-1)[len(prompt) - 1 : -1].tolist()
    assert text[len(prompt) :] == wanted
