"""The real server over a bundle on a simulated device, opened as `ostinato serve` opens it (made per test)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ostinato.runtime.bridge import Bridge
from ostinato.runtime.config import RuntimeConfig
from ostinato.runtime.door import Door, Served
from ostinato.runtime.metrics import Metrics
from ostinato.runtime.server import Server, create_app, server_config
from ostinato.runtime.shop import Shop, open_shop
from tests.serving import PATIENCE_SECONDS, Running, await_true
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

    app = create_app(load)
    door: Door = app.state.door
    server = Server(server_config(app, "127.0.0.1", 0), door)
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        await_true(lambda: door.failure is not None or (server.started and door.trouble() is None), "no server")
        if door.failure is not None:
            raise StartError(str(door.failure)) from door.failure
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        yield Running(f"http://{host}:{port}", shops[0].loop, door.find("toy"), door, server)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), "the server did not stop"
