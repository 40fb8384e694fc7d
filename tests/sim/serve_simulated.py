"""`ostinato serve`, with a GPU bundle on the simulated device (run as a process: BUNDLE and serve's options)."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from unittest import mock

from ostinato.engines.bundle import open_bundle
from ostinato.engines.errors import OstinatoError
from ostinato.engines.targets import GPU_TARGETS
from ostinato.runtime import ranks, server
from ostinato.runtime.config import add_arguments, config_from_args
from ostinato.runtime.libraries import REAL
from ostinato.runtime.rank import RankParts
from ostinato.runtime.serve_config import ServeConfig

from .rank_libraries import SIMULATED_PARTS
from .sim_bundle import simulated

ROOT = Path(__file__).parent.parent.parent
_PATIENCE_S = 60.0


def main(argv: list[str], parts: RankParts = SIMULATED_PARTS) -> int:
    """`parts`: of the ranks of a bundle that has several."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--metrics-port", type=int)
    add_arguments(parser)
    args = parser.parse_args(argv)
    config, libraries = config_from_args(args), REAL
    served = ServeConfig(bundle=args.bundle, port=args.port, metrics_port=args.metrics_port, engine=config)
    manifest = open_bundle(args.bundle, verify_digests=False).manifest
    if manifest.target in GPU_TARGETS:
        libraries = simulated(args.bundle, limits=config.limits(manifest)).libraries()
    os.environ["PYTHONPATH"] = str(ROOT)  # the other ranks' processes find these tests by it
    # A simulated step may take long on a machine that does other things, too; so may what comes after a loss.
    patient = partial(ranks.RanksExecutor, parts=parts, stall_s=_PATIENCE_S)
    with mock.patch.object(ranks, "RanksExecutor", patient), mock.patch.object(server, "LOST_SECONDS", _PATIENCE_S):
        try:
            return server.serve(served, libraries)
        except OstinatoError as error:  # as the command does
            print(f"ostinato serve: {error}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
