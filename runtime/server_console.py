"""The console: its page, its files, and the state that the page reads (lines run per request).

Files come from the package alone, and the page may load nothing from elsewhere: its policy says so to the browser.
"""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

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


def console_routes(door: Door) -> list[Route]:
    state = ConsoleState(door)
    pages = _responses()

    async def page(_: Request) -> Response:
        return _file("index.html")

    async def file(request: Request) -> Response:
        return _file(request.path_params["name"])

    async def snapshot(_: Request) -> Response:
        return JSONResponse(await state.snapshot(), headers={"cache-control": "no-store"})

    def _file(name: str) -> Response:
        if name not in pages:
            raise HttpError(404, "the console has no such file: open /")
        body, kind = pages[name]
        return Response(body, headers=_HEADERS, media_type=kind)

    return [
        Route("/", page, methods=["GET"]),
        Route("/console/{name}", file, methods=["GET"]),
        Route("/debug/state", snapshot, methods=["GET"]),
    ]


def _responses() -> dict[str, tuple[bytes, str]]:
    """Every file of the console by its name, with its type."""
    folder = files(__package__) / "console"
    return {
        path.name: (path.read_bytes(), _TYPES[path.name.rpartition(".")[2]])
        for path in folder.iterdir()
        if path.name.rpartition(".")[2] in _TYPES
    }
