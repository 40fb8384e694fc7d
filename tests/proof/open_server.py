"""The real server over a bundle on a simulated device, opened as `ostinato serve` opens it (made per test)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ostinato.runtime.bridge import Bridge
from ostinato.runtime.config import RuntimeConfig
from ostinato.runtime.door import Served
from ostinato.runtime.metrics import Metrics
from ostinato.runtime.server import Server
from ostinato.runtime.server_app import create_app
from ostinato.runtime.shop import Shop, open_shop
from tests.serving import ANY_PORTS, PATIENCE_SECONDS, Running, await_true
from tests.sim.sim_bundle import SimulatedRank
from tests.sim_desk import silent


class StartError(Exception):
    """The server stopped because its model could not be loaded."""


@contextmanager
def open_server(path: Path, rank: SimulatedRank, *, is_strict: bool = False) -> Iterator[Running]:
    """Serve as model "toy" until the block ends. Raises StartError."""
    shops: list[Shop] = []

    def load() -> Served:
        config = RuntimeConfig(strict_graphs=is_strict)
        shop = open_shop(path, config, silent, libraries=rank.libraries())
        shops.append(shop)
        return Served("toy", Bridge(shop.loop, shop.intake, shop.tokenizer, Metrics()))

    server = Server(create_app(load, ANY_PORTS))
    door = server.door
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        await_true(lambda: door.failure is not None or (server.started and door.trouble() is None), "no server")
        if door.failure is not None:
            raise StartError(str(door.failure)) from door.failure
        yield Running(server.url, shops[0].loop, door.find("toy"), door, server)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), "the server did not stop"
