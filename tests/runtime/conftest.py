"""A server over a model that sees each token, one a test file."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.fakes import PosLM
from tests.http_calls import LIMITS
from tests.serving import VOCAB_SIZE, Running, serving


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("toy"), LIMITS, PosLM(LIMITS, VOCAB_SIZE)) as server:
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client
    running.await_idle()
