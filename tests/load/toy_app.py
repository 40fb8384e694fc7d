"""What runs in the process of `toy_process` (per test)."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from ostinato.engines.errors import BundleError, OstinatoError
from ostinato.runtime.batch import Batch
from ostinato.runtime.bridge import Bridge
from ostinato.runtime.door import Served
from ostinato.runtime.metrics import Metrics
from ostinato.runtime.plan import Plan
from ostinato.runtime.serve_config import ServeConfig
from ostinato.runtime.serve_limits import ServeLimits
from ostinato.runtime.server import run
from ostinato.runtime.server_app import create_app
from tests.fakes import Done, PosLM, make_limits
from tests.load.toy_process import Toy
from tests.serving import MODEL, VOCAB_SIZE, make_intake, make_loop, toy_tokenizer


class SlowLM(PosLM):
    """PosLM at a set pace."""

    def __init__(self, toy: Toy) -> None:
        limits = make_limits(max_rows=toy.max_rows, num_blocks=16 * toy.max_rows)
        super().__init__(limits, VOCAB_SIZE)
        self._toy = toy

    def run(self, batch: Batch) -> Done:
        time.sleep(self._toy.step_seconds)
        return super().run(batch)


def serve_toy(folder: Path, port: int, toy: Toy) -> int:
    limits = make_limits(max_rows=toy.max_rows, num_blocks=16 * toy.max_rows)
    executor = SlowLM(toy)

    def load() -> Served:
        if toy.fails_to_load:
            raise BundleError("no bundle at nowhere: build one")
        loop = make_loop(limits, executor)
        plain = loop.scheduler.plan

        def plan() -> Plan | None:
            if toy.dies_at and executor.num_steps >= toy.dies_at:
                raise AssertionError("the books are broken")
            return plain()

        loop.scheduler.plan = plan  # type: ignore[method-assign]
        bridge = Bridge(loop, make_intake(limits), toy_tokenizer(folder), Metrics(), bounds)
        if toy.warms:
            bridge.grammars.warm()
        return Served(MODEL, bridge)

    bounds = ServeLimits(drain_seconds=toy.drain_seconds, max_waiting=toy.max_waiting, body_seconds=toy.body_seconds)
    try:
        run(create_app(load, ServeConfig(port=port, metrics_port=None, limits=bounds)))
    except OstinatoError as error:
        print(f"toy: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(serve_toy(Path(sys.argv[1]), int(sys.argv[2]), Toy(**json.loads(sys.argv[3]))))
