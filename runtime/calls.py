"""The outermost layer of the server: makes each request a call, and accounts for it when it is over (per request)."""

from __future__ import annotations

import logging
import re

from starlette.types import ASGIApp, Receive, Scope, Send

from .access_log import log_access
from .accounting import Account
from .call import Call, Caller
from .door import Door
from .http_metrics import OTHER
from .wire_errors import refusal

logger = logging.getLogger(__name__)

_ANYBODY = Caller()
_CLIENT_ID = re.compile(r"[\x20-\x7e]{1,128}")
_LEFT = 499  # who asked went away before there was an answer: nginx's number


class Calls:
    """Gives each request its Call, as `request.state.call`, and the answer the call's id. Whatever fails is a 500."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(_ANYBODY, dict(reversed(scope["headers"])))
        given = call.field(b"x-request-id")
        call.client_id = given if given and _CLIENT_ID.fullmatch(given) else ""
        scope.setdefault("state", {})["call"] = call
        account = Account(call, send)
        try:
            await self._app(scope, receive, account.send)
        except Exception as error:
            logger.exception("%s failed", call.id)
            if not call.status:
                await refusal(error).response()(scope, receive, account.send)
        finally:
            self._account(call, scope)
            scope["state"].clear()  # uvicorn keeps the scope in a circle, until the next search for garbage

    def _account(self, call: Call, scope: Scope) -> None:
        call.close()
        call.status = call.status or _LEFT
        route = OTHER if call.status == 405 else getattr(scope.get("route"), "path", OTHER)
        self._door.http.count(route, scope["method"], call.status)
        self._door.http.count_refusal(call.refused)
        if scope["method"] == "POST" and route.startswith("/v1/") and (bridge := self._door.bridge) is not None:
            bridge.ledger.note_call(call, route, scope["headers"])
        log_access(call, scope["method"], route)
