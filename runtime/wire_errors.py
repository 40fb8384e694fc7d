"""OpenAI's error objects and the status that goes with each refusal (lines run per refused request)."""

from __future__ import annotations

from typing import NamedTuple

import orjson
from starlette.responses import Response

from ostinato.engines.errors import OstinatoError, RequestError

from .bridge import BusyError, ClosedError
from .request import STEP_FAILED

MAX_MESSAGE_CHARS = 2000
RETRY_SECONDS = "1"


class HttpError(Exception):
    """A refusal that HTTP has its own status for."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class Refusal(NamedTuple):
    """What a caller sees of an error."""

    status: int
    message: str
    type: str
    param: str | None
    code: str | None

    def to_json(self) -> bytes:
        """{"error": {message, type, param, code}}"""
        message = self.message[:MAX_MESSAGE_CHARS]
        return orjson.dumps({"error": {"message": message, "type": self.type, "param": self.param, "code": self.code}})

    def response(self) -> Response:
        headers = {"retry-after": RETRY_SECONDS} if self.status in (429, 503) else {}
        if self.status in (408, 413):  # the rest of the body is not read
            headers["connection"] = "close"
        return Response(self.to_json(), self.status, headers, "application/json")


def refusal(error: Exception) -> Refusal:
    """The refusal for any error; one of ours says what was wrong, any other says nothing of its inside."""
    match error:
        case HttpError():
            return Refusal(error.status, str(error), "invalid_request_error", error.param, error.code)
        case RequestError(code=code) if code == STEP_FAILED:
            return Refusal(500, str(error), "server_error", None, code)
        case RequestError():
            return Refusal(400, str(error), "invalid_request_error", error.param, error.code)
        case BusyError():
            return Refusal(429, str(error), "rate_limit_error", None, "queue_full")
        case ClosedError():
            return Refusal(503, str(error), "service_unavailable_error", None, "not_ready")
        case OstinatoError():
            return Refusal(500, str(error), "server_error", None, STEP_FAILED)
        case _:
            return Refusal(500, "the server failed at this request", "server_error", None, STEP_FAILED)
