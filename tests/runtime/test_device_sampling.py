"""Lines for a device that keeps state: it samples what the host samples, whoever joins, leaves, fails or comes back."""

from __future__ import annotations

import numpy as np
import pytest

from ostinato.engines.io_table import BIAS_PAD, IN_PROMPT
from ostinato.engines.sizes import MAX_LOGIT_BIAS
from ostinato.plugins.sampling_rows import I32
from ostinato.runtime.device_rows import DeviceRows
from ostinato.runtime.device_sampling import DeviceSamplingPacker
from ostinato.runtime.masks import Masks
from ostinato.runtime.plan import PlanRow
from ostinato.runtime.request import Request, SamplingParams, Status
from ostinato.runtime.row_sets import RowSets
from tests.fakes import check_device_lines, make_request
from tests.sampling_schedule import LIMITS, MAX_ROWS, SCORED, VOCAB, HashGuide, Schedule, plan_of
from tests.scale import scaled

NUM_WORDS = 3


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_device_samples_what_the_host_samples(overlaps: bool) -> None:
    seen: set[str] = set()
    for seed in range(scaled(20, 3000)):
        schedule = Schedule(seed, overlaps=overlaps)
        schedule.run()
        seen |= schedule.seen
    assert seen == {"joined", "emptied", "scored", "masked", "back"} | ({"fed", "late"} if overlaps else set())


class _Device:
    """The packer of device lines over columns that follow it from step to step."""

    def __init__(self, num_in_flight: int = 2) -> None:
        self._row_sets = RowSets(MAX_ROWS, num_in_flight)
        self._packer = DeviceSamplingPacker(VOCAB, MAX_ROWS, num_in_flight)

    def pack(self, *rows: PlanRow) -> DeviceRows:
        lines = self._packer.pack(self._row_sets.columns(rows))
        check_device_lines(lines)
        return lines


def _request(number: int, params: SamplingParams, stop_ids: tuple[int, ...] = ()) -> Request:
    return make_request(number, [1, 2, 2, 5], params, LIMITS, eos=stop_ids)


def _last(request: Request) -> PlanRow:
    return PlanRow(request, len(request.tokens) - 1, len(request.tokens), 1)


def _fed(request: Request, line: int) -> PlanRow:
    return PlanRow(request, len(request.tokens), len(request.tokens) + 1, 1, line)


def _allowed(words: I32) -> set[int]:
    return {token for token in range(VOCAB) if words.view(np.uint32)[token // 32] >> (token % 32) & 1}


def test_who_joins_brings_bias_and_counts_in_the_device_form() -> None:
    params = SamplingParams(logit_bias=((9, 1.5), (3, -2.0), (9, 0.5)), presence_penalty=0.5)
    request = _request(0, params)
    request.tokens += [2, 8, 8]
    device = _Device()
    lines = device.pack(_last(request))
    (state,) = lines.joined
    assert state.line == lines.state_rows[0] in range(1, MAX_ROWS + 1)
    assert state.bias_ids is not None
    assert state.bias_values is not None
    assert state.counts is not None
    assert state.bias_ids.tolist() == [3, 9, 9] + [BIAS_PAD] * (MAX_LOGIT_BIAS - 3)
    assert state.bias_values.tolist() == [-2.0, 1.5, 0.5] + [0.0] * (MAX_LOGIT_BIAS - 3)
    expected = {1: IN_PROMPT, 2: IN_PROMPT + 1, 5: IN_PROMPT, 8: 2}
    assert {token: count for token, count in enumerate(state.counts.tolist()) if count} == expected
    request.tokens.append(4)
    assert device.pack(_last(request)).joined == ()


def test_a_line_is_written_only_where_its_old_content_does_harm() -> None:
    device = _Device()
    lines = device.pack(_last(_request(0, SamplingParams())), _last(_request(1, SamplingParams(min_p=0.1))))
    assert lines.joined == ()
    penal, biased = (
        _request(2, SamplingParams(frequency_penalty=1.0)),
        _request(3, SamplingParams(logit_bias=((3, 1.0),))),
    )
    counts, bias = device.pack(_last(penal), _last(biased)).joined
    assert (counts.bias_ids is None, counts.counts is None) == (True, False)
    assert (bias.bias_ids is None, bias.counts is None) == (False, True)


def test_a_line_goes_to_the_next_once_its_request_is_finished() -> None:
    device = _Device()
    old = [_request(number, SamplingParams(logit_bias=((3, 1.0),))) for number in range(MAX_ROWS)]
    first = device.pack(*map(_last, old))
    assert sorted(first.state_rows.tolist()) == list(range(1, MAX_ROWS + 1))
    old[2].status = Status.FINISHED
    heir = _request(9, SamplingParams())
    lines = device.pack(_last(old[0]), _last(heir))
    assert lines.state_rows.tolist() == [first.state_rows[0], first.state_rows[2]]
    (state,) = lines.joined
    assert state.bias_ids is not None
    assert (state.bias_ids == BIAS_PAD).all()
    with pytest.raises(AssertionError, match="more than 4 requests run"):
        device.pack(_last(_request(10, SamplingParams())))


def test_who_was_preempted_is_written_anew_with_what_it_has_said() -> None:
    device = _Device()
    request = _request(0, SamplingParams(presence_penalty=1.0))
    device.pack(_last(request))
    request.tokens += [7, 7]
    assert device.pack(_last(request)).joined == ()
    request.num_preemptions += 1
    assert device.pack(PlanRow(request, 0, 3, 0)).joined == (), "it is not sampled yet"
    (state,) = device.pack(_last(request)).joined
    assert state.counts is not None
    assert state.counts[7] == 2


def test_sets_that_take_turns_are_written_once() -> None:
    device = _Device(num_in_flight=2)
    requests = [_request(number, SamplingParams(presence_penalty=1.0)) for number in range(4)]
    for step in range(6):
        chosen = requests[step % 2 :: 2]
        assert len(device.pack(*map(_last, chosen)).joined) == (2 if step < 2 else 0)
        for request in chosen:
            request.tokens.append(3)


def test_scored_tokens_take_the_last_line_with_neutral_parameters() -> None:
    params = SamplingParams(presence_penalty=1.0, logit_bias=((2, 5.0),), logprobs=2, prompt_logprobs=3, top_k=4)
    lines = _Device().pack(PlanRow(_request(0, params), 0, 4, 4))
    own = lines.state_rows[3]
    assert own in range(1, MAX_ROWS + 1)
    assert lines.state_rows.tolist() == [SCORED] * 3 + [own]
    assert [state.line for state in lines.joined] == [own]
    assert lines.presence.tolist() == [0, 0, 0, 1]
    assert lines.num_logprobs.tolist() == [3, 3, 3, 2]
    assert lines.top_k.tolist() == [0, 0, 0, 4]
    assert [_allowed(lines.masks[row]) for row in lines.mask_rows[:3]] == [{2}, {2}, {5}]
    assert lines.mask_rows[0] == lines.mask_rows[1]
    assert lines.mask_rows[3] == -1


def test_equal_stop_ids_share_a_mask_and_min_tokens_go_by_the_token_to_come() -> None:
    params = SamplingParams(min_tokens=2, max_tokens=9)
    requests = [_request(number, params, stops) for number, stops in enumerate(((3, 40), (5,), (40, 3)))]
    device = _Device()
    rows = [_last(request) for request in requests]
    for _ in range(2):
        lines = device.pack(*rows)
        assert len(lines.masks) == 2
        masks = [_allowed(lines.masks[row]) for row in lines.mask_rows]
        assert masks == [set(range(VOCAB)) - stops for stops in ({3, 40}, {5}, {3, 40})]
        rows = [_fed(request, line) for line, request in enumerate(requests)]  # the second token, the first in flight
    for request in requests:
        request.tokens.append(9)
    lines = device.pack(*(_fed(request, line) for line, request in enumerate(requests)))
    assert lines.masks.shape == (0, NUM_WORDS)
    assert lines.mask_rows.tolist() == [-1] * 3


def test_masks_of_fed_guided_rows_come_late() -> None:
    stops = tuple(range(60))
    requests = [_request(number, SamplingParams(min_tokens=2, max_tokens=9), stops) for number in range(4)]
    guides = [HashGuide() for _ in requests]
    for request, guide in zip(requests[1:], guides[1:], strict=True):
        request.guide = guide
    device = _Device()
    assert device.pack(*map(_last, requests)).num_late_masks == 0
    rows = [*(_fed(request, line) for line, request in enumerate(requests[:3])), _last(requests[3])]
    lines = device.pack(*rows)
    assert lines.num_late_masks == 2
    assert lines.mask_rows.tolist() == [0, 2, 3, 1]
    requests[1].tokens.append(8)
    guides[1].accept(8)
    requests[2].status = Status.FINISHED
    late = Masks(VOCAB).late(plan_of(rows))
    assert late.shape == (2, NUM_WORDS)
    assert _allowed(late[0]) == _allowed(_mask_of(guides[1])) - set(stops)
    assert _allowed(late[1]) == set(range(VOCAB)), "what the finished one samples is thrown away"
    guides[1].is_broken = True
    assert _allowed(Masks(VOCAB).late(plan_of(rows))[0]) == set(), "nothing, which ends the request"


def _mask_of(guide: HashGuide) -> I32:
    words = np.zeros(NUM_WORDS, np.int32)
    guide.fill_mask(words)
    return words
