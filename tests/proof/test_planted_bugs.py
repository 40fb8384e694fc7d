"""Bugs planted on purpose in what runs steps: the checks of the other proofs find each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.engines.program import StepShape
from ostinato.plugins.sampling_rows import I32, Sampled
from ostinato.runtime import batch as batch_module
from ostinato.runtime.batch import Batch
from ostinato.runtime.block_tables import BlockTables
from ostinato.runtime.buffers import Arrays, StepSlot
from ostinato.runtime.cuda import Event, Stream
from ostinato.runtime.cuda_executor import CudaExecutor
from ostinato.runtime.gpu_rank import GpuRank
from ostinato.runtime.row_sets import RowSet, StepRows
from ostinato.runtime.state_lines import StateLines
from ostinato.runtime.step_inputs import StepInputs
from tests.proof.load import TIGHT, served
from tests.proof.tiny_proof import proof_bundle
from tests.scale import scaled

SEEDS = (None, *range(scaled(6, 50)))
Patch = pytest.MonkeyPatch


def reuse_staging_too_early(monkeypatch: Patch) -> None:
    """Both steps in flight share one block, and nobody waits until it has gone up."""
    launch = CudaExecutor._launch

    def into_the_first(executor: CudaExecutor, ticket: Any, batch: Batch) -> None:
        ticket.slot, ticket.inputs = executor._rank.buffers.slots[0], executor._rank.inputs[0][ticket.shape]
        launch(executor, ticket, batch)

    monkeypatch.setattr(CudaExecutor, "_launch", into_the_first)
    monkeypatch.setattr(StepSlot, "fill", lambda slot, shape: slot._inputs[shape.key])


def sample_before_the_masks_are_up(monkeypatch: Patch) -> None:
    _each_rank(monkeypatch, lambda rank: monkeypatch.setattr(rank.stream, "after", _no_order))


def send_masks_up_before_they_may(monkeypatch: Patch) -> None:
    _each_rank(monkeypatch, lambda rank: monkeypatch.setattr(rank.side_stream, "after", _no_order))


def download_beside_the_step(monkeypatch: Patch) -> None:
    """Outputs come down on the other stream, without an event."""
    beside: dict[Stream, Stream] = {}
    download = StepSlot.download
    _each_rank(monkeypatch, lambda rank: beside.update({rank.stream: rank.side_stream}))
    monkeypatch.setattr(StepSlot, "download", lambda slot, stream, shape: download(slot, beside[stream], shape))


def write_a_pad_into_a_live_block(monkeypatch: Patch) -> None:
    """A pad row of a decode step has a token, whose slot is the first one that requests get."""
    upload = StepSlot.upload

    def spoiled(slot: StepSlot, stream: Stream, shape: StepShape, mask_lines: int = 0) -> None:
        arrays = slot._inputs[shape.key]
        starts, count = arrays["query_starts"], int(arrays["query_starts"][-1])
        if shape.phase == "decode" and count < shape.rows:
            starts[count + 1 :] = count + 1
            arrays["slot_mapping"][count], arrays["block_tables"][count] = TIGHT.block_size, 1
        upload(slot, stream, shape, mask_lines)

    monkeypatch.setattr(StepSlot, "upload", spoiled)


def leave_starts_of_pads_rising(monkeypatch: Patch) -> None:
    """Every pad row has a token."""
    fill = StepInputs.fill

    def spoiled(inputs: StepInputs, batch: Batch, *others: Any) -> int:
        num_masks = fill(inputs, batch, *others)
        pads, (_, tokens, _) = inputs._starts[batch.num_rows + 1 :], inputs._tokens[0]
        pads[:] = np.minimum(batch.num_tokens + 1 + np.arange(len(pads)), len(tokens))
        return num_masks

    monkeypatch.setattr(StepInputs, "fill", spoiled)


def write_a_state_line_only_once(monkeypatch: Patch) -> None:
    """Whoever gets a line after another request finds that one's state."""
    write = StateLines.write
    written: set[tuple[StateLines, int]] = set()

    def once(lines: StateLines, stream: Stream, line: int, values: Any) -> None:
        if (lines, line) not in written:
            written.add((lines, line))
            write(lines, stream, line, values)

    monkeypatch.setattr(StateLines, "write", once)


def feed_from_the_line_after(monkeypatch: Patch) -> None:
    feed_rows = batch_module._feed_rows

    def shifted(rows: StepRows, query_starts: I32) -> I32 | None:
        fed = feed_rows(rows, query_starts)
        return None if fed is None else np.where(fed >= 0, fed + 1, fed)

    monkeypatch.setattr(batch_module, "_feed_rows", shifted)


def hand_out_pinned_memory(monkeypatch: Patch) -> None:
    """Results are views of what the next step of the same slot comes down into."""

    def uncopied(executor: CudaExecutor, outputs: Arrays, count: int) -> Sampled:
        return Sampled(*(outputs[name][:count] for name in ("tokens", "logprobs", "top_ids", "top_logprobs")))

    monkeypatch.setattr(CudaExecutor, "_sampled", uncopied)


def keep_tables_over_a_preemption(monkeypatch: Patch) -> None:
    clear = BlockTables._clear

    def stale(tables: BlockTables, row_set: RowSet) -> None:
        back = [seat for seat, request in zip(row_set.seats, row_set.requests, strict=True) if request.num_preemptions]
        kept = [(seat, tables._tables[seat].copy(), tables._num_written[seat]) for seat in back]
        clear(tables, row_set)
        for seat, table, num_written in kept:
            tables._tables[seat], tables._num_written[seat] = table, num_written

    monkeypatch.setattr(BlockTables, "_clear", stale)


def nothing(monkeypatch: Patch) -> None:
    """The control."""


BUGS = (
    reuse_staging_too_early,
    sample_before_the_masks_are_up,
    send_masks_up_before_they_may,
    download_beside_the_step,
    write_a_pad_into_a_live_block,
    leave_starts_of_pads_rising,
    write_a_state_line_only_once,
    feed_from_the_line_after,
    hand_out_pinned_memory,
    keep_tables_over_a_preemption,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return proof_bundle(tmp_path_factory.mktemp("rtx"), "rtx")


@pytest.mark.parametrize("plant", [*BUGS, nothing])
def test_a_planted_bug_is_found(path: Path, monkeypatch: Patch, plant: Callable[[Patch], None]) -> None:
    wanted = served(path, None).events
    plant(monkeypatch)
    assert any(_is_wrong(path, seed, wanted) for seed in SEEDS) == (plant is not nothing)


def _is_wrong(path: Path, seed: int | None, wanted: Any) -> bool:
    try:
        return bool(served(path, seed).events != wanted)
    except AssertionError:  # SimError among them
        return True


def _each_rank(monkeypatch: Patch, change: Callable[[GpuRank], None]) -> None:
    """Change every rank that is made from now on, as soon as it is ready."""
    ready = GpuRank._open

    def changed(rank: GpuRank, *others: Any) -> None:
        ready(rank, *others)
        change(rank)

    monkeypatch.setattr(GpuRank, "_open", changed)


def _no_order(event: Event) -> None:
    pass
