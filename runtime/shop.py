"""Everything that serves one bundle, put together from tokenizer to loop (once at start)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ostinato.engines.bundle import Bundle, open_bundle
from ostinato.engines.errors import BundleError
from ostinato.engines.sizes import Limits

from .batch import Packer
from .config import RuntimeConfig
from .executor import Executor
from .intake import Intake
from .loop import Loop
from .openvino import LogitsObserver, OpenVINOExecutor
from .pages import Pages
from .progress import Show
from .resident import release_file_pages
from .scheduler import Scheduler
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Shop:
    """An opened bundle, ready to serve. The loop is not started: its driver decides how."""

    bundle: Bundle
    limits: Limits
    tokenizer: Tokenizer
    intake: Intake
    loop: Loop


def open_shop(path: Path, config: RuntimeConfig, progress: Show, observe_logits: LogitsObserver | None = None) -> Shop:
    """Open a bundle, compile and warm its engine. Raises BundleError where bundle and machine do not fit."""
    progress("check the bundle", 0, 1)
    bundle = open_bundle(path)
    progress("check the bundle", 1, 1)
    if bundle.manifest.target != "cpu":
        raise BundleError(
            f"{path} is for target {bundle.manifest.target}, this version runs bundles for target cpu: build one "
            "from a recipe with target cpu"
        )
    limits = config.limits(bundle.manifest)
    tokenizer = Tokenizer(bundle.tokenizer_dir)
    executor = _executor(bundle, limits, config, progress, observe_logits)
    pages = Pages(limits, config.prefix_cache)
    packer = Packer(limits, bundle.manifest.sizes.vocab_size)
    loop = Loop(Scheduler(limits, pages), packer, executor)
    return Shop(bundle, limits, tokenizer, Intake.for_bundle(bundle.manifest, limits), loop)


def _executor(
    bundle: Bundle, limits: Limits, config: RuntimeConfig, progress: Show, observe: LogitsObserver | None
) -> Executor:
    """The executor of target cpu."""
    executor = OpenVINOExecutor(bundle, limits, num_threads=config.threads, observe_logits=observe, progress=progress)
    executor.warm(progress)
    for file in bundle.rank_dir().iterdir():  # the engine repacked the weights: their file need not stay resident
        release_file_pages(file)
    return executor
