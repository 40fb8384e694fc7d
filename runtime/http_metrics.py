"""HTTP requests by handler, method and class of status, all from fixed sets (counted per request, read per scrape)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from .metrics import PREFIX

OTHER = "other"  # no route of ours, or a method that it does not have
METHODS = ("GET", "POST")
REJECTIONS = (
    *("queue_full", "queue_timeout", "not_ready", "rate_limit_exceeded"),
    *("grammars_busy", "bodies_busy", "call_timeout"),
)


class HttpMetrics(Collector):
    """One process's, on all its ports; it counts while the model is loading, too."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._rejections = dict.fromkeys(REJECTIONS, 0)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count(self, handler: str, method: str, status: int) -> None:
        """`handler`: a route's template or OTHER; a method that no route has is OTHER."""
        self._counts[handler, method if method in METHODS else OTHER, f"{status // 100}xx"] += 1

    def count_refusal(self, code: str | None) -> None:
        """A call that was turned away is counted by its reason; other refusals are the caller's fault."""
        if code in self._rejections:
            self._rejections[code] += 1

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(PREFIX + "http_requests", "HTTP requests.", labels=["handler", "method", "status"])
        for labels, count in list(self._counts.items()):  # calls end meanwhile
            family.add_metric(labels, count)
        yield family
        family = CounterMetricFamily(
            PREFIX + "admission_rejections", "Calls turned away, by the error's code.", labels=["reason"]
        )
        for reason, count in self._rejections.items():
            family.add_metric([reason], count)
        yield family

    def exposition(self) -> bytes:
        return generate_latest(self._registry)
