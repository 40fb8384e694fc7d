"""Executors without a model: PosLM sees each token through the block tables, ScriptedLM ignores them (run per step)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ostinato.engines.sizes import Limits
from ostinato.plugins.fused_sampling import fused_sampling
from ostinato.plugins.sampling_rows import F32, I32, Sampled, SamplingRows
from ostinato.runtime.batch import Batch, Packer
from ostinato.runtime.context import check_fits
from ostinato.runtime.device_rows import DeviceRows
from ostinato.runtime.executor import StepRules
from ostinato.runtime.openvino_padding import computed_tokens, pad_tokens
from ostinato.runtime.pages import Pages
from ostinato.runtime.plan import Plan
from ostinato.runtime.request import Event, Request, SamplingParams
from ostinato.runtime.scheduler import Scheduler

U64 = NDArray[np.uint64]
MANY_ROWS = 1000
POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)


def mix(values: U64) -> U64:
    """A 64-bit hash of each value (SplitMix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def logits_of(states: U64, vocab_size: int, spread: float = 4.0) -> NDArray[np.float32]:
    """[S] hashed histories → [S, V] logits in [-spread, spread)."""
    words = mix(states[:, None] + np.arange(vocab_size, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95))
    return (((words >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - 1) * spread).astype(np.float32)


def histories(positions: NDArray[np.int64], token_ids: NDArray[np.int64]) -> U64:
    """What PosLM keeps in a slot: a hash of a position and a token."""
    return mix(mix(positions.astype(np.uint64)) ^ token_ids.astype(np.uint64))


@dataclass(frozen=True)
class Done:
    """A ticket of a step that is over."""

    sampled: Sampled

    def sample(self, masks: I32) -> None:
        raise AssertionError(f"{len(masks)} late masks in a step that was sampled at once")

    def wait(self) -> Sampled:
        return self.sampled


def bucket_rules(limits: Limits) -> StepRules:
    """One step at a time, whose rows are padded up to their bucket."""
    return StepRules(pad_tokens(limits), partial(computed_tokens, limits))


class PosLM:
    """Logits are a hash of every (position, token) read back through the block table, from slots it wrote itself.

    A wrong, stale or shared block changes all that follows. It also checks every batch's invariants.
    """

    trouble: str | None = None
    coverage = None

    def __init__(self, limits: Limits, vocab_size: int, spread: float = 4.0) -> None:
        self.rules = bucket_rules(limits)
        self._limits = limits
        self._vocab_size = vocab_size
        self._spread = spread
        self._slots = np.full(limits.num_blocks * limits.block_size, POISON, np.uint64)
        self.num_steps = 0

    def run(self, batch: Batch) -> Done:
        assert batch.feed_rows is None, "what the step before sampled is not known here"
        return Done(sampled_on_host(self.logits(batch), batch))

    def logits(self, batch: Batch) -> F32:
        """Run a step whose tokens are all known, up to its logits, [S, V]."""
        check_batch(batch, self._limits)
        self.num_steps += 1
        self._slots[batch.slot_mapping] = histories(batch.positions.astype(np.int64), batch.input_ids.astype(np.int64))
        states = np.zeros(batch.num_sampled, np.uint64)
        sampled = batch.logits_indices
        for row in range(batch.num_rows):
            start, end = batch.query_starts[row : row + 2]
            lines = np.flatnonzero((sampled >= start) & (sampled < end))
            if len(lines):
                states[lines] = self._row_states(batch, row)[sampled[lines] - start]
        return logits_of(states, self._vocab_size, self._spread)

    def _row_states(self, batch: Batch, row: int) -> U64:
        """The state after each of the row's tokens in this step."""
        context = int(batch.context_lens[row])
        total = context + int(batch.query_starts[row + 1] - batch.query_starts[row])
        at = np.arange(total)
        size = self._limits.block_size
        slots = batch.block_tables[row, at // size] * size + at % size
        factors = mix(at.astype(np.uint64)) | np.uint64(1)
        sums: U64 = np.cumsum(self._slots[slots] * factors)[context:]
        return sums

    def close(self) -> None:
        self._slots[:] = POISON


class ScriptedLM:
    """The same raw logits for every row, by step; a repeated last line when the script is over."""

    trouble: str | None = None
    coverage = None

    def __init__(self, script: Sequence[Iterable[float]]) -> None:
        self.rules = StepRules([0] * MANY_ROWS)
        self._script = [np.array(list(line), np.float32) for line in script]
        self.batches: list[Batch] = []

    def run(self, batch: Batch) -> Done:
        line = self._script[min(len(self.batches), len(self._script) - 1)]
        self.batches.append(batch)
        return Done(sampled_on_host(np.tile(line, (batch.num_sampled, 1)), batch))

    def close(self) -> None:
        self.batches.clear()


def sampled_on_host(logits: F32, batch: Batch) -> Sampled:
    assert isinstance(batch.sampling, SamplingRows), "lines for a device"
    return fused_sampling(logits, batch.sampling)


def check_batch(batch: Batch, limits: Limits) -> None:
    """Everything that a Batch promises to an executor."""
    num_rows, num_tokens = batch.num_rows, batch.num_tokens
    assert 0 < num_rows <= min(num_tokens, limits.max_rows)
    assert num_tokens <= limits.max_step_tokens
    assert batch.num_sampled <= limits.max_rows
    assert len(batch.positions) == len(batch.slot_mapping) == num_tokens
    assert batch.block_tables.shape[0] == num_rows
    width = batch.block_tables.shape[1]
    assert width == limits.max_blocks_per_row or width & (width - 1) == 0
    lengths = np.diff(batch.query_starts)
    assert len(lengths) == num_rows
    assert batch.query_starts[0] == 0
    assert batch.query_starts[-1] == num_tokens
    assert (lengths > 0).all()
    row_of = np.repeat(np.arange(num_rows), lengths)
    offsets = np.arange(num_tokens) - batch.query_starts[row_of]
    assert (batch.positions == batch.context_lens[row_of] + offsets).all()
    blocks, within = np.divmod(batch.slot_mapping, limits.block_size)
    assert (blocks == batch.block_tables[row_of, batch.positions // limits.block_size]).all()
    assert (within == batch.positions % limits.block_size).all()
    assert blocks.min() > 0, "a live token would write the null block"
    assert len(np.unique(batch.slot_mapping)) == num_tokens, "two tokens would write one slot"
    written = set(blocks.tolist())
    for row in range(num_rows):
        table = batch.block_tables[row]
        num_read = -(-int(batch.context_lens[row] + lengths[row]) // limits.block_size)
        assert table[:num_read].all(), "a row would read the null block"
        others = set(blocks[row_of != row].tolist()) & written
        assert not others & set(table[:num_read].tolist()), "a row would read a block that another one writes"
    check_feed(batch, lengths[row_of])
    check_lines(batch, row_of)
    arrays = (getattr(batch, field.name) for field in fields(batch) if field.name != "sampling")
    assert all(array is None or array.dtype == np.int32 for array in arrays)


def check_feed(batch: Batch, lengths: I32) -> None:
    """A token that comes from the step before is a row's only one, and no other row has the same; [T] row lengths."""
    if batch.feed_rows is not None:
        assert batch.feed_rows.shape == batch.input_ids.shape
        fed = batch.feed_rows >= 0
        assert fed.any()
        assert (batch.feed_rows[~fed] == -1).all()
        assert not batch.input_ids[fed].any()
        assert (lengths[fed] == 1).all()
        assert len(np.unique(batch.feed_rows[fed])) == np.count_nonzero(fed)


def check_lines(batch: Batch, row_of: NDArray[np.int64]) -> None:
    """Sampled lines are the last tokens of their rows, in order; every sampling array has a line for each."""
    sampled = batch.logits_indices
    assert (np.diff(sampled) > 0).all()
    counts = np.bincount(row_of[sampled], minlength=batch.num_rows)
    for row in range(batch.num_rows):
        end = batch.query_starts[row + 1]
        assert (sampled[row_of[sampled] == row] == np.arange(end - counts[row], end)).all()
    lines = batch.sampling
    floats = (lines.uniforms, lines.temperature, lines.top_p, lines.min_p, lines.repetition, lines.presence)
    assert all(array.dtype == np.float32 for array in (*floats, lines.frequency))
    for array in (*floats, lines.top_k, lines.frequency, lines.num_logprobs):
        assert len(array) == batch.num_sampled
    if isinstance(lines, SamplingRows):
        assert len(lines.bias_ids) == len(lines.bias_values) == batch.num_sampled
        assert len(lines.prompt_counts) == len(lines.output_counts) == batch.num_sampled
        assert lines.allowed is None or len(lines.allowed) == batch.num_sampled
    else:
        check_device_lines(lines)


def check_device_lines(lines: DeviceRows) -> None:
    """Masks are no more than lines, and each is somebody's; who joins is sampled."""
    num_masks = len(lines.masks) + lines.num_late_masks
    assert num_masks <= len(lines.mask_rows) == len(lines.state_rows)
    assert ((lines.mask_rows >= -1) & (lines.mask_rows < num_masks)).all()
    late = lines.mask_rows[lines.mask_rows >= len(lines.masks)]
    assert late.tolist() == list(range(len(lines.masks), num_masks)), "late masks come in the order of their lines"
    assert lines.state_rows.min(initial=1) > 0, "line 0 is for pads"
    joined = [state.line for state in lines.joined]
    assert len(set(joined)) == len(joined)
    assert set(joined) <= set(lines.state_rows.tolist())


def make_limits(
    *, block_size: int = 16, max_rows: int = 8, max_step_tokens: int = 64, max_context: int = 128, num_blocks: int = 64
) -> Limits:
    """Limits with power-of-two buckets; `num_blocks` without the null block."""

    def buckets(top: int) -> tuple[int, ...]:
        return (*(1 << power for power in range(top.bit_length()) if 1 << power < top), top)

    kv_tokens = num_blocks * block_size
    return Limits(
        block_size=block_size,
        max_rows=max_rows,
        max_step_tokens=max_step_tokens,
        max_context=min(max_context, kv_tokens),
        kv_tokens=kv_tokens,
        row_buckets=buckets(max_rows),
        token_buckets=buckets(max_step_tokens),
    )


def make_request(
    number: int,
    prompt: Sequence[int],
    params: SamplingParams,
    limits: Limits,
    *,
    eos: Iterable[int] = (),
    choice: int = 0,
) -> Request:
    """A request as the door would make it; its seed is its params' or its number."""
    return Request(
        id=number,
        tokens=list(prompt),
        num_prompt=len(prompt),
        params=params,
        max_tokens=check_fits(len(prompt), params.max_tokens, limits),
        seed=number if params.seed is None else params.seed,
        choice=choice,
        stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos)),
    )


class Desk:
    """Pages, scheduler and packer over an executor, stepped by a test; keeps every event."""

    def __init__(
        self, limits: Limits, vocab_size: int, executor: PosLM | ScriptedLM | None = None, pages: Pages | None = None
    ) -> None:
        self.pages = Pages(limits) if pages is None else pages
        self.executor = PosLM(limits, vocab_size) if executor is None else executor
        self.scheduler = Scheduler(limits, self.pages, self.executor.rules)
        self.packer = Packer(limits, vocab_size, self.executor.rules)
        self.events: dict[int, list[Event]] = {}

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.events[request.id] = []
            self.keep(self.scheduler.submit(request))

    def abort(self, request_id: int) -> None:
        self.keep(self.scheduler.abort(request_id))

    def keep(self, event: Event | None) -> None:
        if event is not None:
            self.events[event.request_id].append(event)

    def step(self) -> Plan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            sampled = self.executor.run(self.packer.pack(plan)).wait()
            for event in self.scheduler.commit(plan, sampled):
                self.keep(event)
        return plan

    def run(self, max_steps: int = 100_000) -> None:
        """Until idle; then nothing may be held."""
        for _ in range(max_steps):
            if self.step() is None:
                break
        self.check_idle()

    def check_idle(self) -> None:
        assert self.scheduler.is_idle
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.pages.num_free == self.pages.num_total
        self.pages.check_integrity()

    def token_ids(self, request_id: int) -> list[int]:
        return [event.token_id for event in self.events[request_id] if event.token_id is not None]

    def finish(self, request_id: int) -> str | None:
        events = self.events[request_id]
        assert all(event.finish is None for event in events[:-1]), "an event came after the last"
        return events[-1].finish if events else None
