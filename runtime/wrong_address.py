"""What a call hears that no route takes: what it asked for, and what there is (lines run per such call)."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from starlette.responses import Response
from starlette.routing import Route

from .guard import is_for_operators
from .serve_config import ServeConfig
from .wire_errors import HttpError, refusal

_MAX_SHOWN_CHARS = 64
_NEAR = 0.75  # of difflib's likeness, at which a slip of the pen is meant
_UNSERVED = frozenset({
    "assistants", "audio", "batches", "containers", "conversations", "embeddings", "evals", "files", "fine_tuning",
    "images", "messages", "moderations", "organization", "realtime", "rerank", "score", "threads", "uploads",
    "vector_stores", "videos",
})  # fmt: skip


class WrongAddress:
    """Knows the routes of one port. `is_aside`: it is the metrics port, which has those for operators, too."""

    def __init__(self, routes: Sequence[Route], config: ServeConfig, is_aside: bool) -> None:
        self._routes = routes
        self._shown = {route.path.replace(":path", ""): route for route in routes}
        self._made = [
            path for path, route in self._shown.items() if path.startswith("/v1/") and "POST" in (route.methods or ())
        ]
        self._metrics_port = config.metrics_port
        self._is_aside = is_aside

    def answer(self, method: str, path: str) -> Response:
        """405 with the methods that there are, or 404 with the route that may be meant."""
        shown = path if len(path) <= _MAX_SHOWN_CHARS else path[:_MAX_SHOWN_CHARS] + "…"
        methods = {name for route in self._routes if route.path_regex.match(path) for name in route.methods or ()}
        if not methods:
            return refusal(HttpError(404, self._why(path, shown), code="unknown_url")).response()
        allowed = ", ".join(sorted(methods))
        told = f"{shown} does not take {method}: send {allowed.replace(', ', ' or ')}"
        response = refusal(HttpError(405, told, code="method_not_supported")).response()
        response.headers["allow"] = allowed
        return response

    def _why(self, path: str, shown: str) -> str:
        if not self._is_aside and is_for_operators(path):
            where = f" {self._metrics_port}" if self._metrics_port else ""  # 0: a free one, which the log names
            off = ", which is off: start with --metrics-port" if self._metrics_port is None else ""
            return f"{shown} is not on this port but on the metrics port{where}{off}"
        if path.removeprefix("/v1").strip("/").partition("/")[0] in _UNSERVED:
            return f"{shown} is not served here: this server makes text, at {', '.join(self._made)}"
        if any(path.startswith(f"{made}/") and path.strip("/") != made.strip("/") for made in self._made):
            return f"{shown} is not served here: answers are not stored, so keep the one that came"
        if near := get_close_matches(path[: 2 * _MAX_SHOWN_CHARS], self._shown, 1, _NEAR):
            return f"there is no route {shown}: is {min(self._shown[near[0]].methods or ('GET',))} {near[0]} meant?"
        return f"there is no route {shown}: there are {', '.join(self._shown)}"
