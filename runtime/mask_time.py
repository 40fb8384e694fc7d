"""How much of a step its grammars' masks may take, and whose turn it is (runs per step with one)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from .request import Request

STEP_SECONDS = 0.003  # of a processor: a hundred masks of JSON, one or two of rules that go letter by letter
UNKNOWN_SECONDS = 0.001  # of a mask whose like was not made yet


class MaskTime:
    """A step's allowance. Masks are made on the loop's thread, so what they take is taken from all rows of the step.

    A row may be put off to a later step, but not the one that has waited longest: a step takes its allowance and two
    masks at most, and what one takes is bounded where it is made (`grammar_trial.MASK_BOUNDS`). `used`: the thread's
    seconds of a processor, so that a mask costs the same on a busy machine.
    """

    def __init__(self, used: Callable[[], float] = time.thread_time) -> None:
        self._used = used

    def turns(self, requests: Sequence[Request]) -> Iterator[int]:
        """The numbers of those whose masks are to be made now; all others are put off. What the caller does between two
        of them is the mask. Cheap ones come first, and whoever waits comes nearer.
        """
        left, delayed = STEP_SECONDS, 0.0
        longest = max((request.num_put_off for request in requests), default=0)
        for at in sorted(range(len(requests)), key=lambda at: _rank(requests[at])):
            request = requests[at]
            if not request.num_output:  # its mask was made before (`Grammar`), and prompt logprobs may come with it
                yield at
                continue
            if request.num_put_off == longest:
                longest = -1  # it is the one
            elif _expected(request) > left:
                request.num_rests = int(delayed / STEP_SECONDS)
                request.num_put_off += 1 + request.num_rests
                delayed += _expected(request)
                continue
            began_at = self._used()
            yield at
            request.mask_seconds = self._used() - began_at
            request.num_put_off = request.num_rests = 0
            left -= request.mask_seconds


def _expected(request: Request) -> float:
    return request.mask_seconds or UNKNOWN_SECONDS


def _rank(request: Request) -> float:
    return _expected(request) / (1 + request.num_put_off)
