"""A process that keeps three ranks busy until it is ended; tells the others' process ids (python -m … FOLDER)."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from ostinato.engines.shards import Shards

from .test_ranks import ROOT, drive, executor


def main() -> None:
    os.environ["PYTHONPATH"] = str(ROOT)
    ranks = executor(Path(sys.argv[1]), Shards(3, 1))
    print(*ranks.pids, flush=True)
    while True:
        drive(ranks, 10)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what runs in the background
    main()
