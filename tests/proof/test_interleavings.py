"""Whatever order the device does its work in, as far as streams and events let it, every request gets the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proof.load import ORDERS, served
from tests.proof.tiny_proof import proof_bundle
from tests.scale import scaled

NUM_SEEDS = scaled(30, 240)
BUNCH = 10  # seeds that one test tries


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return proof_bundle(tmp_path_factory.mktemp("rtx"), "rtx")


def test_the_load_has_something_of_everything(path: Path) -> None:
    band = served(path, None)
    assert sum(is_guided for *_, is_guided in ORDERS) > 2
    assert any(params.has_penalties for _, params, *_ in ORDERS)
    assert any(params.logit_bias for _, params, *_ in ORDERS)
    assert {band.finish(number) for number in range(len(ORDERS))} == {"stop", "length"}
    assert band.scheduler.num_preemptions


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BUNCH))
def test_any_legal_order_gives_the_same(path: Path, first: int) -> None:
    wanted = served(path, None).events
    for seed in range(first, first + BUNCH):
        assert served(path, seed).events == wanted, seed
