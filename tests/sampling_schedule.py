"""Random schedules of sampled lines in both forms, host and device, compared line by line (in tests)."""

from __future__ import annotations

import random

import numpy as np

from ostinato.engines.io_table import BIAS_PAD
from ostinato.plugins.fused_sampling import fused_sampling
from ostinato.plugins.sampling_rows import I32, Sampled
from ostinato.runtime.device_rows import DeviceRows
from ostinato.runtime.device_sampling import DeviceSamplingPacker
from ostinato.runtime.masks import Masks
from ostinato.runtime.plan import Plan, PlanRow
from ostinato.runtime.request import Request, SamplingParams, Status
from ostinato.runtime.row_sets import RowSets
from ostinato.runtime.sampling import SamplingPacker
from tests.device_sampler import DeviceSampler
from tests.fakes import check_device_lines, make_limits, make_request
from tests.guides import Endless

VOCAB = 70
MAX_ROWS = 4
NUM_STEPS = 24
LIMITS = make_limits(max_rows=MAX_ROWS)
SCORED = MAX_ROWS + 1  # the line of scored prompt tokens


class HashGuide(Endless):
    """Half of the tokens, which ones depends on all that it accepted."""

    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.is_broken = False

    def fill_mask(self, words: I32) -> None:
        if self.is_broken:
            raise ValueError("lost")
        words[:] = np.random.default_rng(self.accepted).integers(-(2**31), 2**31, len(words), np.int32)

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


class Forms:
    """The packers of both forms; steps land in order, each compared line by line."""

    def __init__(self, rng: random.Random) -> None:
        self.sampler = DeviceSampler(MAX_ROWS, VOCAB)
        self._device_sets, self._host_sets = RowSets(MAX_ROWS, 2), RowSets(3 * MAX_ROWS, 1)
        self._device, self._host = DeviceSamplingPacker(VOCAB, MAX_ROWS, 2), SamplingPacker(VOCAB, 3 * MAX_ROWS)
        self._logits = np.random.default_rng(rng.randrange(2**32))

    def pack(self, rows: list[PlanRow]) -> DeviceRows:
        lines = self._device.pack(self._device_sets.columns(rows))
        check_device_lines(lines)
        return lines

    def late_masks(self, rows: list[PlanRow]) -> I32:
        return Masks(VOCAB).late(plan_of(rows))

    def land(self, rows: list[PlanRow], lines: DeviceRows, masks: I32) -> Sampled:
        """Sample on both sides, now that every token is known; what FINISHED requests sample does not count."""
        logits = (self._logits.standard_normal((len(lines.state_rows), VOCAB)) * 3).astype(np.float32)
        found = self.sampler.sample(logits, lines, masks)
        known = self._host.pack(self._host_sets.columns([row._replace(fed_from=-1) for row in rows]))
        wanted = fused_sampling(logits, known)
        owners = [row.request for row in rows for _ in range(row.num_sampled)]
        live = [line for line, request in enumerate(owners) if request.status is not Status.FINISHED]
        width = wanted.top_ids.shape[1]
        np.testing.assert_array_equal(found.tokens[live], wanted.tokens[live])
        np.testing.assert_array_equal(found.logprobs[live], wanted.logprobs[live])
        np.testing.assert_array_equal(found.top_ids[live, :width], wanted.top_ids[live])
        np.testing.assert_array_equal(found.top_logprobs[live, :width], wanted.top_logprobs[live])
        return found


class Schedule:
    """Requests that join, leave, are preempted and fail with a step; in overlap it is packed before the last lands."""

    def __init__(self, seed: int, *, overlaps: bool) -> None:
        self.rng = random.Random(seed)
        self.forms = Forms(self.rng)
        self.overlaps = overlaps
        self.running: list[Request] = []
        self.away: list[Request] = []
        self.num_made = 0
        self.in_flight: tuple[list[PlanRow], DeviceRows] | None = None
        self.seen: set[str] = set()

    def run(self) -> None:
        for _ in range(NUM_STEPS):
            self._change_rows()
            rows = self._plan()
            if not rows:
                self._land(None)
                continue
            lines = self.forms.pack(rows)
            self._note(rows, lines)
            self._land((rows, lines))
            if not self.overlaps:
                self._land(None)

    def _change_rows(self) -> None:
        rng = self.rng
        for request in list(self.running):
            if rng.random() < 0.06:  # aborted, or stopped by a string: even in flight
                request.status = Status.FINISHED
                self.running.remove(request)
        if self.running and rng.random() < 0.1:
            self._land(None)
            if self.running:
                victim = self.running.pop(rng.randrange(len(self.running)))
                victim.num_preemptions, victim.num_computed = victim.num_preemptions + 1, 0
                self.away.append(victim)
        while len(self.running) < MAX_ROWS and rng.random() < 0.6:
            self.running.append(self.away.pop() if self.away and rng.random() < 0.5 else self._make())

    def _make(self) -> Request:
        rng, number = self.rng, self.num_made
        self.num_made += 1
        bias = tuple((rng.randrange(VOCAB), rng.uniform(-9, 9)) for _ in range(rng.choice([0, 0, 1, 5])))
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.3]),
            top_k=rng.choice([0, 0, 7]),
            top_p=rng.choice([1.0, 0.8]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.5]),
            presence_penalty=rng.choice([0.0, 0.0, 0.9]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.6]),
            logit_bias=bias + bias[:1],  # a token may come twice
            min_tokens=rng.choice([0, 0, 2, 5]),
            logprobs=rng.choice([None, 0, 3]),
            prompt_logprobs=rng.choice([None, None, None, 2]),
        )
        prompt = rng.choices(range(8), k=rng.randint(1, 9))
        stops = rng.choice([(), (3, 40), (40, 3), tuple(range(60))])
        request = make_request(number, prompt, params, LIMITS, eos=stops, choice=number % 2)
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        if rng.random() < 0.25:
            request.guide = HashGuide()
        return request

    def _plan(self) -> list[PlanRow]:
        """Mostly everybody who can run, in a stable order."""
        pending = self._pending_lines()
        rows = []
        for request in self.running:
            if self.rng.random() < 0.1:
                continue
            start = request.num_computed
            if request.id in pending:
                if request.is_scored and pending[request.id] >= 0:
                    rows.append(PlanRow(request, start, start + 1, 1, pending[request.id]))
            else:
                total = len(request.tokens)
                end = self.rng.randint(start + 1, total) if self.rng.random() < 0.4 else total
                rows.append(PlanRow(request, start, end, max(0, end - max(start, request.first_sampled))))
        for row in rows:
            row.request.num_computed = row.end
        return rows

    def _pending_lines(self) -> dict[int, int]:
        """For each request in flight the line of its next token; -1 if it is still in its prompt."""
        pending: dict[int, int] = {}
        line = 0
        for row in self.in_flight[0] if self.in_flight else ():
            line += row.num_sampled
            is_last = row.num_sampled and row.end >= len(row.request.tokens)
            pending[row.request.id] = line - 1 if is_last else -1
        return pending

    def _land(self, following: tuple[list[PlanRow], DeviceRows] | None) -> None:
        """Land what is in flight, then let the step behind it fly."""
        if self.in_flight is not None:
            rows, lines = self.in_flight
            masks = self.forms.late_masks(rows)
            if self.rng.random() < 0.05:
                if self.rng.random() < 0.5:  # else not even what joins was written
                    self.forms.land(rows, lines, masks)
                for row in rows:
                    row.request.status = Status.FINISHED
                self.running = [request for request in self.running if request.status is not Status.FINISHED]
            else:
                self._commit(rows, self.forms.land(rows, lines, masks))
        self.in_flight = following

    def _commit(self, rows: list[PlanRow], sampled: Sampled) -> None:
        line = 0
        for row in rows:
            request, is_last = row.request, row.num_sampled and row.end == len(row.request.tokens)
            line += row.num_sampled
            if request.status is Status.FINISHED:
                continue
            if request.params.prompt_logprobs is not None:
                request.prompt_logprobs += [None] * (row.num_sampled - is_last)
            if not is_last:
                continue
            token_id = int(sampled.tokens[line - 1])
            if token_id < 0 or self.rng.random() < 0.05:
                request.status = Status.FINISHED
                self.running.remove(request)
            if token_id >= 0:
                request.tokens.append(token_id)
                if request.guide is not None:
                    request.guide.accept(token_id)

    def _note(self, rows: list[PlanRow], lines: DeviceRows) -> None:
        happened = {
            "joined": bool(lines.joined),
            "emptied": any(state.bias_ids is not None and state.bias_ids[0] == BIAS_PAD for state in lines.joined),
            "scored": SCORED in lines.state_rows,
            "masked": bool(len(lines.masks)),
            "late": bool(lines.num_late_masks),
            "fed": any(row.fed_from >= 0 for row in rows),
            "back": any(row.request.num_preemptions and row.request.num_output for row in rows),
        }
        self.seen |= {name for name, is_so in happened.items() if is_so}


def plan_of(rows: list[PlanRow]) -> Plan:
    return Plan(tuple(rows), sum(row.num_tokens for row in rows), sum(row.num_sampled for row in rows))
