"""Who may call: hosts, origins, keys and what a key may use, all before any route is looked up (runs per request)."""

from __future__ import annotations

import re
from functools import lru_cache

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .call import Call
from .door import Door
from .keys import Key
from .serve_config import is_loopback
from .wire_errors import HttpError, refusal

OPEN_PATHS = ("/health", "/health/ready")  # to GET without a key
_LOOKED_AT = ("/", "/metrics")  # likewise on a metrics port that only this machine reaches
_LOOKED_BELOW = ("/console/", "/debug/")
_EXPOSED = b"retry-after, server-timing, x-ostinato-ignored, x-request-id"
_FIELD_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,1024}")
_PREFLIGHT_SECONDS = "600"


class Guard:
    """Refuses with an error object. Every OPTIONS is answered here, with nothing in it that needs a key.

    Where no key protects an address of this machine alone, calls must name it by one of its own names: otherwise any
    web page could call it under the page's name (DNS rebinding). A page whose origin was not named may send nothing:
    it could not read the answer, but make the machine work.
    """

    def __init__(self, app: ASGIApp, door: Door, is_aside: bool) -> None:
        config = door.config
        host = config.metrics_host if is_aside else config.host
        self._app = app
        self._keys = door.keys
        self._meter = door.meter
        self._origins = frozenset(config.cors_origins)
        self._is_local_aside = is_aside and is_loopback(host)
        self._checks_host = is_loopback(host) and (is_aside or not door.keys)
        self._hosts = frozenset(name.lower() for name in config.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope["state"]["call"]
        origin = call.field(b"origin") or ""
        if origin in self._origins:
            send = _allowing(origin, send)
        try:
            if self._checks_host:
                self._check_host(call.field(b"host"))
            if scope["method"] == "OPTIONS":
                await self._preflight(origin, call)(scope, receive, send)
                return
            if scope["method"] == "POST" and origin and origin not in self._origins:
                _check_same_origin(origin, call.field(b"host") or "")
            key = self._key(scope, call)
            if key is None or scope["method"] != "POST":
                await self._app(scope, receive, send)
                return
            with self._meter.call(key):
                await self._app(scope, receive, send)
        except HttpError as error:
            await refusal(error).response()(scope, receive, send)

    def _check_host(self, given: str | None) -> None:
        """A browser always sends one; HTTP/1.0 may leave it out."""
        if given is None:
            return
        name = _host_name(given)
        if not (is_loopback(name) or name in self._hosts):
            raise HttpError(
                403, "this server is not known by that host name: call 127.0.0.1, or let it start with --allowed-host"
            )

    def _key(self, scope: Scope, call: Call) -> Key | None:
        """The caller's key, None where none is needed."""
        if not self._keys or self._is_open(scope["method"], scope["path"]):
            return None
        key = self._keys.find(call.field(b"authorization") or "")
        if key is None:
            raise HttpError(
                401, "no valid API key: send it in the header Authorization: Bearer KEY", code="invalid_api_key"
            )
        call.caller, call.key_name = self._keys.caller(key), key.name
        return key

    def _is_open(self, method: str, path: str) -> bool:
        if method not in ("GET", "HEAD"):
            return False
        return path in OPEN_PATHS or (self._is_local_aside and is_for_operators(path))

    def _preflight(self, origin: str, call: Call) -> Response:
        if origin not in self._origins:
            return Response(status_code=204)
        wanted = call.field(b"access-control-request-headers") or ""
        allowed = {"access-control-allow-methods": "GET, POST", "access-control-max-age": _PREFLIGHT_SECONDS}
        if _FIELD_NAMES.fullmatch(wanted):
            allowed["access-control-allow-headers"] = wanted
        return Response(status_code=204, headers=allowed)


def is_for_operators(path: str) -> bool:
    """Whether it is a route of the metrics port alone."""
    return path in _LOOKED_AT or path.startswith(_LOOKED_BELOW)


@lru_cache(maxsize=64)
def _host_name(given: str) -> str:
    """A Host field without its port."""
    return re.sub(r":\d*$", "", given).strip("[]").rstrip(".").lower()


def _check_same_origin(origin: str, host: str) -> None:
    """The console's page calls the port it came from."""
    if origin.partition("://")[2] != host.lower():
        raise HttpError(403, "pages of this origin may not call: let the server start with --cors-origin")


def _allowing(origin: str, send: Send) -> Send:
    """Let a page of that origin, which was named at start, read the answer. It gets no credentials but those it has."""
    extra = [
        (b"access-control-allow-origin", origin.encode("ascii")),
        (b"access-control-expose-headers", _EXPOSED),
        (b"vary", b"origin"),
    ]

    async def send_allowed(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await send(message)

    return send_allowed
