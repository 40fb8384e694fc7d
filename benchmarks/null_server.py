"""The real server over a model that costs nothing: a bundle's tokenizer, text of its tokens, steps at a set pace.

python benchmarks/null_server.py engines/store/smollm2-135m PORT [STATISTICS]: the child of serving_cost.py. With
STATISTICS, it writes there where the asyncio thread spent its time.
"""

from __future__ import annotations

import cProfile
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from workload import WORDS

from ostinato.engines.bundle import open_bundle
from ostinato.engines.manifest import Manifest
from ostinato.engines.sizes import Limits
from ostinato.plugins.sampling_rows import I32, Sampled
from ostinato.runtime.batch import Batch, Packer
from ostinato.runtime.bridge import Bridge
from ostinato.runtime.door import Served
from ostinato.runtime.executor import StepRules
from ostinato.runtime.garbage import settle_garbage
from ostinato.runtime.intake import Intake
from ostinato.runtime.loop import Loop
from ostinato.runtime.metrics import Metrics
from ostinato.runtime.pages import Pages
from ostinato.runtime.scheduler import Scheduler
from ostinato.runtime.serve_config import ServeConfig
from ostinato.runtime.server import run
from ostinato.runtime.server_app import create_app
from ostinato.runtime.tokenizer import Tokenizer

STEP_SECONDS = 0.01  # so that each token comes alone, as from a model: what comes together is written together


class NullExecutor:
    """Says the tokens of a text over and over."""

    trouble: str | None = None
    coverage = None

    def __init__(self, limits: Limits, token_ids: list[int]) -> None:
        self.rules = StepRules([0] * (limits.max_rows + 1))
        self._token_ids = np.array(token_ids, np.int32)

    def run(self, batch: Batch) -> Said:
        at = batch.positions[batch.logits_indices] % len(self._token_ids)
        count = batch.num_sampled
        nothing = np.full(count, np.nan, np.float32)
        return Said(Sampled(self._token_ids[at], nothing, np.empty((count, 0), np.int32), nothing[:, None][:, :0]))

    def close(self) -> None: ...


@dataclass(frozen=True)
class Said:
    sampled: Sampled

    def sample(self, masks: I32) -> None:
        raise AssertionError(f"{len(masks)} late masks for a step that was sampled at once")

    def wait(self) -> Sampled:
        time.sleep(STEP_SECONDS)
        return self.sampled


def open_null(manifest: Manifest, tokenizer: Tokenizer) -> Served:
    limits = manifest.limits
    text = " ".join(random.Random(0).choices(WORDS, k=500))
    executor = NullExecutor(limits, tokenizer.encode(text))
    scheduler = Scheduler(limits, Pages(limits), executor.rules)
    loop = Loop(scheduler, Packer(limits, manifest.sizes.vocab_size, executor.rules), executor)
    settle_garbage()
    return Served(manifest.name, Bridge(loop, Intake.for_bundle(manifest, limits), tokenizer, Metrics()))


def main(path: Path, port: int, statistics: Path | None) -> None:
    bundle = open_bundle(path, verify_digests=False)
    tokenizer = Tokenizer(bundle.tokenizer_dir)
    app = create_app(lambda: open_null(bundle.manifest, tokenizer), ServeConfig(port=port, metrics_port=None))
    if statistics is None:
        run(app)
        return
    profile = cProfile.Profile(time.thread_time)
    profile.runcall(run, app)
    profile.dump_stats(statistics)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
