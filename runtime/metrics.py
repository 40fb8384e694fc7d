"""What /metrics shows, in a registry of its own with fixed label values (counted per event, read per scrape)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from .graphs import Coverage
from .scheduler import Scheduler

PREFIX = "ostinato:"
FINISHED_REASONS = ("stop", "length", "abort", "error")
PHASES = ("decode", "prefill")

_FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5, 10, 20, 40, 80, 160)
_BETWEEN_TOKENS_SECONDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2, 5, 10)
_WHOLE_REQUEST_SECONDS = (0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200, 400, 800)


class Metrics:
    """Counters and histograms of one server. A request here is one choice of a call."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that were admitted.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token.", _FIRST_TOKEN_SECONDS
        )
        self.between_tokens_seconds = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of one request.", _BETWEEN_TOKENS_SECONDS
        )
        self.request_seconds = self._histogram(
            "e2e_request_latency_seconds", "From submission to the last token.", _WHOLE_REQUEST_SECONDS
        )
        finished = Counter(
            PREFIX + "request_success", "Requests ended, by reason.", ["finished_reason"], registry=self._registry
        )
        self.finished = {reason: finished.labels(reason) for reason in FINISHED_REASONS}

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self._registry)

    def watch(self, scheduler: Scheduler) -> None:
        """Show what the scheduler counts, read at each scrape."""
        pages = scheduler.pages
        self._gauge("num_requests_running", "Requests with KV blocks.", lambda: scheduler.num_running)
        self._gauge("num_requests_waiting", "Requests that wait for their turn.", lambda: scheduler.num_waiting)
        self._gauge(
            "kv_cache_usage_perc", "Part of the KV blocks in use, 0 to 1.", lambda: 1 - pages.num_free / pages.num_total
        )
        for name, text, read in (
            ("prefix_cache_queries", "Prompt tokens looked up.", lambda: scheduler.num_prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found.", lambda: scheduler.num_prefix_hits),
            ("num_preemptions", "Requests that gave their blocks up.", lambda: scheduler.num_preemptions),
        ):
            self._registry.register(_ReadCounter(PREFIX + name, text, read))

    def watch_graphs(self, coverage: Coverage) -> None:
        """Show what an executor that replays graphs counts, read at each scrape."""
        self._registry.register(_GraphSteps(coverage))
        self._gauge(
            "graph_padding_share", "Of the tokens that graphs computed, the part that is pads, 0 to 1.",
            lambda: coverage.padding_share,
        )  # fmt: skip
        self._gauge(
            "graph_memory_bytes", "GPU memory that captured graphs take.", lambda: sum(coverage.graph_bytes.values())
        )

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        Gauge(PREFIX + name, text, registry=self._registry).set_function(read)

    def exposition(self) -> bytes:
        """The page that a scraper reads, in Prometheus's text format."""
        return generate_latest(self._registry)


class _ReadCounter(Collector):
    """A counter whose value lives elsewhere."""

    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._name = name
        self._text = text
        self._read = read

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._text, value=self._read())


class _GraphSteps(Collector):
    """Steps by phase, and whether a graph was replayed."""

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            PREFIX + "graph_steps", "Steps, by phase and by whether a graph was replayed.", labels=["phase", "mode"]
        )
        for phase in PHASES:
            for mode, count in zip(("replayed", "eager"), self._coverage.steps(phase), strict=True):
                family.add_metric([phase, mode], count)
        yield family
