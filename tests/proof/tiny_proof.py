"""The model that the proofs run: as tiny as a bundle can be, with few blocks, on simulated devices of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cuda.bindings.driver import CUresult as Status

from ostinato.engines.sizes import Limits
from ostinato.runtime.cuda_executor import CudaExecutor
from ostinato.runtime.executor import StepRules
from tests.fakes import make_limits
from tests.overlap_requests import VOCAB
from tests.sim.sim_bundle import SimulatedRank, fence, simulated
from tests.sim.standin_builds import tiny_bundle
from tests.sim_desk import silent

LIMITS = make_limits(block_size=4, max_rows=8, max_step_tokens=32, max_context=64, num_blocks=30)
_SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


@dataclass(frozen=True)
class Machine:
    """An executor and the simulated device that it runs on."""

    rank: SimulatedRank
    executor: CudaExecutor


def proof_bundle(folder: Path, target: str, *, vocab_size: int = VOCAB, limits: Limits = LIMITS) -> Path:
    return tiny_bundle(folder, target, overrides=_SHAPE | {"vocab_size": vocab_size}, limits=limits).path


class OneAtATime(CudaExecutor):
    """No step is launched before the one before it has landed."""

    @property
    def rules(self) -> StepRules:
        return replace(super().rules, num_in_flight=1, feeds_tokens=False)


def graphs(path: Path, *, seed: int | None = None, limits: Limits = LIMITS) -> Machine:
    """Everything is captured, two steps are in flight, and kernels stay within their buffers' fences."""
    machine = _machine(CudaExecutor, simulated(path, seed=seed, limits=limits), limits)
    fence(machine.rank, machine.executor._rank.buffers)
    return machine


def eager(path: Path, kind: Callable[..., CudaExecutor] = CudaExecutor) -> Machine:
    """Nothing is captured."""
    rank = simulated(path)
    rank.driver.faults.calls["cuStreamBeginCapture"] = Status.CUDA_ERROR_UNKNOWN
    machine = _machine(kind, rank, LIMITS)
    rank.driver.faults.calls.clear()
    assert not machine.executor.coverage.graph_bytes
    return machine


def _machine(kind: Callable[..., CudaExecutor], rank: SimulatedRank, limits: Limits) -> Machine:
    return Machine(rank, kind(rank.bundle, limits, libraries=rank.libraries(), progress=silent))
