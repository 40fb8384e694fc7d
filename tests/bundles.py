"""Bundles of tiny random checkpoints, and the runtime's parts put together over one of them (once a session)."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ostinato.builder.pipeline import build
from ostinato.engines.bundle import Bundle, open_bundle
from ostinato.engines.manifest import FILE_NAME, manifest_from_json
from ostinato.engines.recipe import Recipe
from ostinato.engines.sizes import Limits
from ostinato.runtime.batch import Packer
from ostinato.runtime.loop import Loop
from ostinato.runtime.openvino import OpenVINOExecutor
from ostinato.runtime.pages import Pages
from ostinato.runtime.request import Event, Request
from ostinato.runtime.scheduler import Scheduler
from tests.tiny import write_tiny

NUM_BYTES = 256  # token ids that are plain bytes
BLOCK_SIZE = 32  # what OpenVINO's CPU plugin knows
MAX_CONTEXT = 224
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
LIMITS = Limits(BLOCK_SIZE, 32, 128, MAX_CONTEXT, 40 * MAX_CONTEXT, BUCKETS[:7], BUCKETS)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama untied": ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral window 40": ("mistral", {"sliding_window": 40}),
}


class _Silent:
    """Progress that nobody watches."""

    def stage(self, name: str, total_bytes: int = 0) -> None: ...

    def advance(self, num_bytes: int) -> None: ...

    def detail(self, text: str) -> None: ...


class Bundles:
    """Checkpoints and bundles under one folder, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[str, Any] = {}
        self._greedy: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def model(self, name: str) -> Any:
        """The transformers model of a name of MODELS; its checkpoint is on disk then."""
        if name not in self._models:
            architecture, overrides = MODELS[name]
            overrides = {**overrides, "max_position_embeddings": 256}
            self._models[name] = write_tiny(self._folder / name / "checkpoint", architecture, **overrides)
        return self._models[name]

    def bundle(self, name: str, weights: str = "float32", kv_cache: str = "float32") -> Path:
        """A bundle of such a model in that precision."""
        self.model(name)
        path = self._folder / name / f"{weights} {kv_cache}"
        if not path.exists() and kv_cache != "float32":  # only the manifest knows of it: this saves an export
            shutil.copytree(self.bundle(name, weights), path)
            manifest = manifest_from_json((path / FILE_NAME).read_text(), path)
            (path / FILE_NAME).write_text(replace(manifest, kv_cache=kv_cache).to_json())
        elif not path.exists():
            checkpoint = self._folder / name / "checkpoint"
            build(Recipe("tiny", str(checkpoint), "cpu", weights, kv_cache, LIMITS), path, _Silent())
        return path

    def greedy(self, name: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Token ids by transformers' own generation in float32, with no token that ends it."""
        key = (name, tuple(prompt))
        if len(self._greedy.get(key, ())) < num_tokens:
            model = self.model(name)
            model.generation_config.eos_token_id = None
            ids = torch.tensor([prompt])
            with _one_torch_thread():
                found = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
                )
            self._greedy[key] = found[0, len(prompt) :].tolist()
        return self._greedy[key][:num_tokens]


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Waking threads takes longer than a tiny model's step."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_prompts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(NUM_BYTES), k=length) for length in lengths]


@dataclass
class Bench:
    """A loop over a real executor; `logits` keeps what each step sampled from."""

    executor: OpenVINOExecutor
    loop: Loop
    scheduler: Scheduler
    packer: Packer
    logits: list[NDArray[np.float32]] = field(default_factory=list)

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.loop.submit(request)

    def run(self) -> list[Event]:
        return [event for events in self.loop.run_until_idle() for event in events]

    def step_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.loop.step()

    def caches(self) -> dict[str, NDArray[np.float32]]:
        """The float32 KV caches themselves, each [N, KV heads, block size, head size]."""
        request = self.executor._request
        names = [port.get_any_name() for port in request.get_compiled_model().inputs]
        return {name: request.get_tensor(name).data for name in names if "_cache." in name}

    def shapes(self) -> set[tuple[str, tuple[int, ...]]]:
        """Shapes of the step inputs that ran so far. Block tables don't count: they are read, not computed with."""
        return {(name, shape) for name, shape in self.executor._tensors if name != "block_tables"}


@contextmanager
def bench(path: Path, limits: Limits, num_threads: int = 2) -> Iterator[Bench]:
    """The parts over one bundle, warm, with limits of the test's own."""
    bundle: Bundle = open_bundle(path)
    logits: list[NDArray[np.float32]] = []
    executor = OpenVINOExecutor(
        bundle,
        limits,
        num_threads=num_threads,
        progress=lambda what, done, total: None,
        observe_logits=lambda seen: logits.append(seen.copy()),
    )
    executor.warm(lambda what, done, total: None)
    scheduler = Scheduler(limits, Pages(limits, prefix_caching=False), executor.rules)
    packer = Packer(limits, bundle.manifest.sizes.vocab_size, executor.rules)
    loop = Loop(scheduler, packer, executor)
    yield Bench(executor, loop, scheduler, packer, logits)
    loop.close()
