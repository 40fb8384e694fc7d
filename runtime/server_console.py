"""The console: its page, its files, and the state that the page reads (lines run per request).

Files come from the package alone, and the page may load nothing from elsewhere: its policy says so to the browser.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from .console_state import ConsoleState
from .door import Door
from .wire_errors import HttpError

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def console_routes(door: Door) -> APIRouter:
    router = APIRouter()
    state = ConsoleState(door)
    pages = _responses()

    @router.get("/")
    async def page() -> Response:
        return _file("index.html")

    @router.get("/console/{name}")
    async def file(name: str) -> Response:
        return _file(name)

    @router.get("/debug/state")
    async def snapshot() -> Response:
        return JSONResponse(await state.snapshot(), headers={"cache-control": "no-store"})

    def _file(name: str) -> Response:
        if name not in pages:
            raise HttpError(404, "the console has no such file: open /")
        body, kind = pages[name]
        return Response(body, headers=_HEADERS, media_type=kind)

    return router


def _responses() -> dict[str, tuple[bytes, str]]:
    """Every file of the console by its name, with its type."""
    folder = files(__package__) / "console"
    return {
        path.name: (path.read_bytes(), _TYPES[path.name.rpartition(".")[2]])
        for path in folder.iterdir()
        if path.name.rpartition(".")[2] in _TYPES
    }
