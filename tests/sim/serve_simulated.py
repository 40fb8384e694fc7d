"""`ostinato serve`, with a GPU bundle on the simulated device (run as a process: BUNDLE and serve's options)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ostinato.engines.bundle import open_bundle
from ostinato.engines.recipe import GPU_TARGETS
from ostinato.runtime.config import add_arguments, config_from_args
from ostinato.runtime.libraries import REAL
from ostinato.runtime.server import serve

from .sim_bundle import simulated


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--port", type=int, required=True)
    add_arguments(parser)
    args = parser.parse_args(argv)
    config, libraries = config_from_args(args), REAL
    manifest = open_bundle(args.bundle, verify_digests=False).manifest
    if manifest.target in GPU_TARGETS:
        libraries = simulated(args.bundle, limits=config.limits(manifest)).libraries()
    return serve(args.bundle, config, "127.0.0.1", args.port, libraries)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
