"""Graphs on a GPU through our buffers and captures: replays are what eager steps are, and allocate nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.toy import write_files

from .gpu import Gpu
from .replay_checks import check_replay
from .sheet import Sheet
from .stack_checks import check_stack
from .stack_program import GPU_STACK


@pytest.mark.parametrize("seed", range(3))
def test_the_made_up_rank_replays_to_the_bit(gpu: Gpu, tmp_path: Path, seed: int) -> None:
    write_files(tmp_path)
    check_replay(gpu, tmp_path, seed, 400)


@pytest.mark.usefixtures("torch_on_gpu")
def test_a_decoder_with_torch_between_our_kernels_replays_to_the_bit(gpu: Gpu, sheet: Sheet) -> None:
    for key, num_bytes in check_stack(gpu, GPU_STACK, 0, 60).items():
        sheet.add("graph memory", num_bytes / 2**20, "MiB", step=key)
