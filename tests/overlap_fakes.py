"""A device without a model that really lags: steps run when something waits for them, or at random (run per step)."""

from __future__ import annotations

import random
from collections import deque
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np

from ostinato.engines.sizes import Limits
from ostinato.plugins.sampling_rows import I32, Sampled
from ostinato.runtime.batch import Batch
from ostinato.runtime.device_rows import DeviceRows
from ostinato.runtime.executor import StepRules
from tests.device_sampler import DeviceSampler
from tests.fakes import POISON, PosLM, check_batch
from tests.guides import Endless

NO_TOKEN_YET = -77  # what lies in the output block before a step wrote it


def overlap_rules(limits: Limits) -> StepRules:
    """One GPU: the next step is launched while one runs, and fed by it."""
    return StepRules([0] * (limits.max_rows + 1), num_in_flight=2, feeds_tokens=True, keeps_state=True)


def pipeline_rules(limits: Limits, num_stages: int) -> StepRules:
    """As many steps in flight as stages; no step is fed."""
    return StepRules([0] * (limits.max_rows + 1), num_in_flight=num_stages, keeps_state=True)


@dataclass
class Step:
    """A launched step, whose arrays are its own."""

    number: int
    batch: Batch
    late_masks: I32 | None = None
    sampled: Sampled | None = None
    is_waited_for: bool = False


class LaggingLM:
    """PosLM as a device with a stream: a step computes nothing before `wait`, or before chance (`rng`) lets it.

    The sampling's state and the tokens that feed the next step are kept as on a device; what no step has written yet is
    poison. `log` has ("launch" | "sample" | "wait", step), `faults` what raises at such a place; `trouble` is set by a
    test. A step that fails leaves poison in its slots and tokens.
    """

    def __init__(
        self, limits: Limits, vocab_size: int, rules: StepRules, rng: random.Random | None = None, spread: float = 4.0
    ) -> None:
        assert rules.keeps_state
        self.rules = rules
        self.trouble: str | None = None
        self.coverage = None
        self.log: list[tuple[str, int]] = []
        self.faults: dict[tuple[str, int], BaseException] = {}
        self.batches: list[Batch] = []
        self._limits = limits
        self._vocab_size = vocab_size
        self._model = PosLM(limits, vocab_size, spread)
        self._rng = rng
        self._steps: deque[Step] = deque()  # that did not run
        self._num_in_flight = 0
        self._num_launches = 0
        self._tokens = np.full(limits.max_rows, NO_TOKEN_YET, np.int32)
        self._newest = -1  # the step that left them
        self._sampler = DeviceSampler(limits.max_rows, vocab_size)

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    def run(self, batch: Batch) -> LaggingTicket:
        number = self._num_launches
        self._num_launches += 1
        self._meet("launch", number)
        assert self._num_in_flight < self.rules.num_in_flight, "more steps in flight than there is room for"
        assert self.rules.feeds_tokens or batch.feed_rows is None
        assert batch.feed_rows is None or self._num_in_flight, "the step that would feed it has landed"
        check_batch(batch, self._limits)
        self._num_in_flight += 1
        self.batches.append(batch)
        step = Step(number, deepcopy(batch))
        self._steps.append(step)
        self._run_by_chance()
        return LaggingTicket(self, step)

    def sample(self, step: Step, masks: I32) -> None:
        self._meet("sample", step.number)
        assert isinstance(step.batch.sampling, DeviceRows)
        assert step.late_masks is None, "sampled twice"
        assert masks.shape == (step.batch.sampling.num_late_masks, -(-self._vocab_size // 32))
        assert len(masks) > 0, "no mask was late"
        step.late_masks = masks.copy()
        self._run_by_chance()

    def wait(self, step: Step) -> Sampled:
        assert not step.is_waited_for, "waited twice"
        step.is_waited_for = True
        self._num_in_flight -= 1
        try:
            self._meet("wait", step.number)
        except BaseException:
            self._spoil(step)
            raise
        while step.sampled is None:
            self._run_next()
        return step.sampled

    def drop(self, step: Step) -> None:
        """A step that failed at `sample` is never waited for."""
        self._num_in_flight -= 1
        self._spoil(step)

    def close(self) -> None:
        self._model.close()

    def _meet(self, place: str, number: int) -> None:
        self.log.append((place, number))
        if (error := self.faults.get((place, number))) is not None:
            raise error

    def _run_by_chance(self) -> None:
        while self._rng is not None and self._steps and self._rng.random() < 0.3:
            sampling = self._steps[0].batch.sampling
            if isinstance(sampling, DeviceRows) and sampling.num_late_masks and self._steps[0].late_masks is None:
                return
            self._run_next()

    def _spoil(self, step: Step) -> None:
        """Everything before it runs; then it leaves poison where it would have written."""
        while self._steps and self._steps[0].number < step.number:
            self._run_next()
        if self._steps and self._steps[0] is step:
            self._steps.popleft()
        self._model._slots[step.batch.slot_mapping] = POISON
        if step.number >= self._newest:  # else the one after it has run, and left its own
            self._set_tokens(step, np.zeros(0, np.int32))

    def _run_next(self) -> None:
        step = self._steps.popleft()
        batch = step.batch
        if batch.feed_rows is not None:
            fed = np.maximum(self._tokens[batch.feed_rows], 0)
            batch = replace(batch, input_ids=np.where(batch.feed_rows >= 0, fed, batch.input_ids), feed_rows=None)
        assert isinstance(batch.sampling, DeviceRows)
        step.sampled = self._sampler.sample(self._model.logits(batch), batch.sampling, step.late_masks)
        self._set_tokens(step, step.sampled.tokens)

    def _set_tokens(self, step: Step, tokens: I32) -> None:
        """What the step leaves for the next one to be fed from."""
        self._newest = step.number
        self._tokens[:] = NO_TOKEN_YET
        self._tokens[: len(tokens)] = tokens


@dataclass(frozen=True)
class LaggingTicket:
    executor: LaggingLM
    step: Step

    def sample(self, masks: I32) -> None:
        try:
            self.executor.sample(self.step, masks)
        except BaseException:
            self.executor.drop(self.step)
            raise

    def wait(self) -> Sampled:
        return self.executor.wait(self.step)


class HashGuide(Endless):
    """Allows some tokens, by all that it accepted; `fails_at` counts its calls."""

    def __init__(self, vocab_size: int, fails_at: int = -1) -> None:
        self.accepted: list[int] = []
        self.num_calls = 0
        self._vocab_size = vocab_size
        self._fails_at = fails_at

    def fill_mask(self, words: I32) -> None:
        self._call()
        words[:] = 0
        for token_id in self.allowed():
            words.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)

    def accept(self, token_id: int) -> None:
        self._call()
        assert token_id in self.allowed(), f"token {token_id} after {self.accepted} is not of the form"
        self.accepted.append(token_id)

    def allowed(self) -> list[int]:
        state = sum((at + 1) * token_id for at, token_id in enumerate(self.accepted))
        return [token_id for token_id in range(self._vocab_size) if token_id % 5 == state % 5]

    def _call(self) -> None:
        self.num_calls += 1
        if self.num_calls == self._fails_at:
            raise ValueError("the guide is lost")
