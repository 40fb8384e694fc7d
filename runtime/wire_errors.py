"""OpenAI's error objects and the status that goes with each refusal (lines run per refused request)."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ostinato.engines.errors import OstinatoError, RequestError

from .bridge import BusyError, ClosedError
from .call import Call
from .grammar_trial import GrammarsBusyError
from .patience import CallTimeoutError, QueueTimeoutError
from .request import STEP_FAILED

MAX_MESSAGE_CHARS = 2000
RETRY_SECONDS = 1
_LATE_SECONDS = 10  # after a wait in a queue that did not move

_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error"}


class HttpError(Exception):
    """A refusal that HTTP has its own status for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_seconds: int = RETRY_SECONDS,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_seconds = retry_seconds


class Refusal(NamedTuple):
    """What a caller sees of an error."""

    status: int
    message: str
    type: str
    param: str | None
    code: str | None
    retry_seconds: int = RETRY_SECONDS

    def to_json(self) -> bytes:
        """{"error": {message, type, param, code}}"""
        message = self.message[:MAX_MESSAGE_CHARS]
        return orjson.dumps({"error": {"message": message, "type": self.type, "param": self.param, "code": self.code}})

    def response(self) -> Response:
        headers = {"retry-after": str(self.retry_seconds)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status in (408, 413):  # the rest of the body is not read
            headers["connection"] = "close"
        return _RefusalResponse(self.code, self.to_json(), self.status, headers, "application/json")


class _RefusalResponse(Response):
    """Leaves its code with the call, for the metrics."""

    def __init__(self, code: str | None, *args: Any) -> None:
        super().__init__(*args)
        self._code = code

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope["state"]["call"]
        call.refused = self._code
        await super().__call__(scope, receive, send)


def refusal(error: Exception) -> Refusal:
    """The refusal for any error; one of ours says what was wrong, any other says nothing of its inside."""
    match error:
        case HttpError():
            kind = _TYPES.get(error.status, "invalid_request_error")
            return Refusal(error.status, str(error), kind, error.param, error.code, error.retry_seconds)
        case RequestError(code=code) if code == STEP_FAILED:
            return Refusal(500, str(error), "server_error", None, code)
        case RequestError():
            return Refusal(400, str(error), "invalid_request_error", error.param, error.code)
        case GrammarsBusyError():
            return Refusal(429, str(error), "rate_limit_error", None, "grammars_busy")
        case BusyError():
            return Refusal(429, str(error), "rate_limit_error", None, "queue_full", error.retry_seconds)
        case QueueTimeoutError():
            return Refusal(503, str(error), "service_unavailable_error", None, "queue_timeout", _LATE_SECONDS)
        case CallTimeoutError():
            return Refusal(408, str(error), "invalid_request_error", None, "call_timeout")
        case ClosedError():
            return Refusal(503, str(error), "service_unavailable_error", None, "not_ready")
        case OstinatoError():
            return Refusal(500, str(error), "server_error", None, STEP_FAILED)
        case _:
            return Refusal(500, "the server failed at this request", "server_error", None, STEP_FAILED)
