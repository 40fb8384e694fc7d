"""One line for each call that is over: ids, counts and times, nothing that was said (per request)."""

from __future__ import annotations

import logging

from .call import Call

logger = logging.getLogger("ostinato.access")

_POLLED = frozenset({"/health", "/health/ready", "/metrics", "/debug/state"})  # only told of in a debug log


def log_access(call: Call, method: str, route: str) -> None:
    """`route` is a template, never what was asked for; of a method only a known one's name is repeated."""
    level = logging.DEBUG if route in _POLLED else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields = {
        "id": call.id,
        "method": method if method in ("GET", "POST", "OPTIONS", "HEAD", "PUT", "DELETE", "PATCH") else "other",
        "route": route,
        "status": call.status,
        "seconds": round(call.path.seconds, 6),
    }
    if call.num_prompt:
        fields |= {"prompt_tokens": call.num_prompt, "cached_tokens": call.num_cached, "output_tokens": call.num_output}
    if call.key_name:
        fields |= {"key": call.key_name, "tenant": call.caller.tenant}
    if call.client_id:
        fields["client_id"] = call.client_id
    logger.log(level, "%(method)s %(route)s %(status)d", fields, extra={"fields": fields})
