"""What one sampled row means for its request: new token, prompt logprobs, how it ended (runs per step)."""

from __future__ import annotations

from ostinato.engines.errors import OstinatoError, RequestError
from ostinato.plugins.sampling_rows import Sampled

from .guide import Guide, log_failure
from .plan import PlanRow, new_tuple
from .request import STEP_FAILED, Event, Request, TokenLogprob
from .timeline import Stage, guiding

NO_TOKEN = -1  # the sampler's answer where no token is legal


class SampledLines:
    """A step's samples as Python values; logprobs are converted only if a request asked for them."""

    def __init__(self, sampled: Sampled) -> None:
        self.tokens: list[int] = sampled.tokens.tolist()
        self._sampled = sampled

    def logprob(self, line: int, token_id: int, num_top: int) -> TokenLogprob:
        """The logprob of a line's token and of its `num_top` best."""
        ids = self._sampled.top_ids[line, :num_top].tolist()
        logprobs = self._sampled.top_logprobs[line, :num_top].tolist()
        return TokenLogprob(token_id, float(self._sampled.logprobs[line]), tuple(zip(ids, logprobs, strict=True)))


def apply_samples(row: PlanRow, lines: SampledLines, line: int) -> Event | None:
    """Take a row's samples, the lines from `line` on, into its request; None if it is still in its prompt."""
    request, _, end, num_sampled, _ = row
    ends_at_last = end == len(request.tokens)
    if ends_at_last and num_sampled == 1 and request.max_tokens:
        return _take_token(request, lines, line)
    num_scored = num_sampled - ends_at_last
    if num_scored and NO_TOKEN in lines.tokens[line : line + num_scored]:
        return _illegal(request, "its prompt can't be scored")
    for offset in range(num_scored):
        _score(request, lines, line + offset)
    if not ends_at_last:
        return None
    if request.max_tokens == 0:
        return _event(request, None, None, "length")
    return _take_token(request, lines, line + num_scored)


def _score(request: Request, lines: SampledLines, line: int) -> None:
    token_id = request.tokens[len(request.prompt_logprobs)]
    assert lines.tokens[line] == token_id, f"a forced line gave {lines.tokens[line]}, the prompt has {token_id}"
    num_top = request.params.prompt_logprobs
    assert num_top is not None, "a request without prompt logprobs was scored"
    request.prompt_logprobs.append(lines.logprob(line, token_id, num_top))


def _take_token(request: Request, lines: SampledLines, line: int) -> Event:
    token_id = lines.tokens[line]
    if token_id == NO_TOKEN:
        return _no_token(request)
    params, tokens = request.params, request.tokens
    num_output = len(tokens) - request.num_prompt
    finish = None
    if token_id in request.stop_ids and num_output >= params.min_tokens:
        finish = "stop"
    elif num_output + 1 == request.max_tokens:
        finish = "length"
    forced: tuple[int, ...] = ()
    if request.guide is not None:
        try:
            with guiding(request.timeline):
                finish, forced = _guide(request, request.guide, token_id, finish)
        except Exception as error:
            log_failure(request.id, error)
            request.fault = error
            return _unguided(request)
    logprob = None if params.logprobs is None else lines.logprob(line, token_id, params.logprobs)
    if num_output:
        event = new_tuple(Event, (request.id, token_id, logprob, finish, None, 0, None, forced))
    else:
        event = _event(request, token_id, logprob, finish, forced)
    if request.is_catching_up:
        request.is_catching_up = False
        request.turn(Stage.DECODE)
    tokens.append(token_id)
    tokens += forced
    return event


def _guide(request: Request, guide: Guide, token_id: int, finish: str | None) -> tuple[str | None, tuple[int, ...]]:
    """Tell the guide: (how the request ends with that, the tokens that it forces next). Its end is an end in any case.

    A forced token ends it by the same rules as a sampled one.
    """
    guide.accept(token_id)
    if guide.has_ended:
        return "stop", ()
    taken: list[int] = []
    num_output = request.num_output + 1
    while finish is None and (forced := guide.forced()):
        for token_id in forced:
            guide.accept(token_id)
            taken.append(token_id)
            if token_id in request.stop_ids and num_output >= request.params.min_tokens:
                finish = "stop"
            elif num_output + 1 == request.max_tokens:
                finish = "length"
            num_output += 1
            if finish is not None:
                break
    return finish, tuple(taken)


def _event(
    request: Request,
    token_id: int | None,
    logprob: TokenLogprob | None,
    finish: str | None,
    forced: tuple[int, ...] = (),
) -> Event:
    """The request's first event."""
    prompt_logprobs = None if request.params.prompt_logprobs is None else tuple(request.prompt_logprobs)
    return Event(request.id, token_id, logprob, finish, None, request.num_cached, prompt_logprobs, forced)


def _no_token(request: Request) -> Event:
    """The end of a request whose line gave none: a mask forbids them all, or else no logit is a number."""
    if request.fault is not None:
        return _unguided(request)
    if request.guide is not None or request.num_output < request.params.min_tokens:
        return _illegal(request, "no token is legal at this place")
    error = RequestError(
        f"the model's logits after {request.num_output} output tokens are no numbers: see that the bundle was built in "
        "a precision that holds its activations (ostinato verify)",
        code=STEP_FAILED,
    )
    return Event(request.id, None, None, "error", error, request.num_cached)


def _unguided(request: Request) -> Event:
    """The end of a request whose guide raised."""
    error = request.fault
    if not isinstance(error, RequestError):
        reason = str(error) if isinstance(error, OstinatoError) else "its guide failed inside the server"
        error = RequestError(f"the output can't be held to its form: {reason}", code=STEP_FAILED)
    return Event(request.id, None, None, "error", error, request.num_cached)


def _illegal(request: Request, why: str) -> Event:
    error = RequestError(
        f"{why} (after {request.num_output} output tokens): every one is masked out or its logit is not a number; "
        "relax min_tokens, stop_token_ids or logit_bias",
        code="no_legal_token",
    )
    return Event(request.id, None, None, "error", error, request.num_cached)
