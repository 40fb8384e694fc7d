"""One port's application: the call, the guard, the route, and refusals made of errors (lines run per request)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from ostinato.engines.errors import OstinatoError

from .call import Call
from .calls import Calls
from .door import Door
from .guard import Guard
from .wire_errors import HttpError, refusal
from .wrong_address import WrongAddress

logger = logging.getLogger(__name__)

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


class Application(Starlette):
    """Starlette without the layers that it wraps around every call: each error becomes a refusal in one place."""

    def __init__(
        self, door: Door, routes: Sequence[Route], *, lifespan: Lifespan | None = None, is_aside: bool = False
    ) -> None:
        super().__init__(routes=routes, lifespan=lifespan)
        self.router.redirect_slashes = False
        self.state.door = door
        self._layers = Calls(
            Guard(_Routes(self.router, WrongAddress(routes, door.config, is_aside)), door, is_aside), door
        )

    def build_middleware_stack(self) -> ASGIApp:
        return self._dispatch

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._layers if scope["type"] == "http" else self.router)(scope, receive, send)


class _Routes:
    """Finds a call's route, at once where its path has no parameters, and refuses what went wrong before an answer."""

    def __init__(self, router: Router, wrong: WrongAddress) -> None:
        self._router = router
        self._wrong = wrong
        self._plain = {
            (method, route.path): route
            for route in router.routes
            if isinstance(route, Route) and not route.param_convertors
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._plain.get((scope["method"], scope["path"]))
        try:
            if route is None:
                await self._router(scope, receive, send)
                return
            scope["route"] = route
            response = await route.endpoint(Request(scope, receive))
            await response(scope, receive, send)
        except HTTPException:  # the router's own
            await self._wrong.answer(scope["method"], scope["path"])(scope, receive, send)
        except (HttpError, OstinatoError) as error:
            call: Call = scope["state"]["call"]
            if call.status:  # the answer has begun
                raise
            await _response(call, error)(scope, receive, send)


def _response(call: Call, error: HttpError | OstinatoError) -> Response:
    told = refusal(error)
    if told.status == 500:
        logger.error("%s failed", call.id, exc_info=error)
    return told.response()
