"""The outermost layer of the server: makes each request a call (runs per request)."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from .call import Call, Caller


class Calls:
    """Gives each request its Call, as `request.state.call`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})["call"] = Call(Caller())
        await self._app(scope, receive, send)
