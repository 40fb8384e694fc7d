"""What /metrics shows, in a registry of its own with fixed label values (counted per event, read per scrape)."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from .call import CallRecord
from .critical_path import SPANS, seconds_by_span
from .graphs import Coverage
from .scheduler import Scheduler
from .tally import Tallies, Tally
from .timeline import REASONS, Segment, Stage

PREFIX = "ostinato:"
FINISHED_REASONS = ("stop", "length", "abort", "error")
PHASES = ("decode", "prefill")

# vLLM's buckets, so that its dashboards and alerts fit; the shortest ones between tokens are ours.
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_BETWEEN_TOKENS_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_SPAN_SECONDS = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 60)
_STEP_TOKENS = tuple(2**power for power in (0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14))
_MAX_PENDING = 64  # calls
_REQUEST_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

_End = tuple[str, float, int, int, Sequence[Segment]]  # reason, seconds, prompt and output tokens, turns


class Metrics:
    """Counters and histograms of one server. A request here is one choice of a call; spans are of calls."""

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
            "e2e_request_latency_seconds", "From submission to the last token.", _REQUEST_SECONDS
        )
        self._watch_stages()
        self.iteration_tokens = self._histogram("iteration_tokens_total", "Tokens of a step.", _STEP_TOKENS)
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request that has ended.", _REQUEST_TOKENS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a request that has ended.", _REQUEST_TOKENS
        )
        self.slow_readers = self._counter("slow_readers", "Answers given up because their reader did not read.")
        spans = Tallies(
            PREFIX + "request_span_seconds", "Where the calls' time went; a call's spans add up to it.",
            _SPAN_SECONDS, "span", SPANS,
        )  # fmt: skip
        self._registry.register(spans)
        self._spans = spans.by_value
        finished = Counter(
            PREFIX + "request_success", "Requests ended, by reason.", ["finished_reason"], registry=self._registry
        )
        self.finished = {reason: finished.labels(reason) for reason in FINISHED_REASONS}
        self._ends: list[_End] = []  # not yet counted: many at once cost less
        self._calls: list[CallRecord] = []

    def _watch_stages(self) -> None:
        self._stage_seconds = {
            stage: self._histogram(f"request_{name}_time_seconds", text, _REQUEST_SECONDS)
            for stage, name, text in (
                (Stage.QUEUE, "queue", "A request's time in the queue."),
                (Stage.PREFILL, "prefill", "A request's time in its prompt, from its start or restart."),
                (Stage.DECODE, "decode", "A request's time from its first token on."),
            )
        }
        self._inference_seconds = self._histogram(
            "request_inference_time_seconds", "A request's time in steps.", _REQUEST_SECONDS
        )
        self._per_token_seconds = self._histogram(
            "request_time_per_output_token_seconds", "A request's decode time by its tokens after the first.",
            _BETWEEN_TOKENS_SECONDS,
        )  # fmt: skip

    def count_end(
        self, reason: str, seconds: float, num_prompt: int, num_output: int, segments: Sequence[Segment]
    ) -> None:
        """A request has ended, `seconds` after it was submitted; `segments` are its turns."""
        self._ends.append((reason, seconds, num_prompt, num_output, segments))

    def count_call(self, record: CallRecord) -> None:
        """A call is over."""
        self._calls.append(record)
        if len(self._calls) >= _MAX_PENDING:
            self.settle()

    def settle(self) -> None:
        """Take in what has ended, all at once, on the thread that counts: before somebody reads."""
        self._settle_ends()
        calls, self._calls = self._calls, []
        self.slow_readers.inc(sum(record.is_slow for record in calls))
        for name, seconds in seconds_by_span([record.path for record in calls]).items():
            self._spans[name].observe_all(seconds)

    def _settle_ends(self) -> None:
        ends, self._ends = self._ends, []
        if not ends:
            return
        reasons, seconds, num_prompt, num_output, turns = zip(*ends, strict=True)
        for reason, count in collections.Counter(reasons).items():
            self.finished[reason].inc(count)
        self.request_seconds.observe_all(seconds)
        self.request_prompt_tokens.observe_all(num_prompt)
        self.request_generation_tokens.observe_all(num_output)
        stages = [(_seconds_by_stage(segments), count) for segments, count in zip(turns, num_output, strict=True)]
        totals = [total for total, _ in stages if total]
        for stage, histogram in self._stage_seconds.items():
            histogram.observe_all([total[stage] for total in totals])
        self._inference_seconds.observe_all([total[Stage.PREFILL] + total[Stage.DECODE] for total in totals])
        decodes = [(total[Stage.DECODE], count - 1) for total, count in stages if total]
        self._per_token_seconds.observe_all([decode / count for decode, count in decodes if decode and count > 0])

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, registry=self._registry)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Tally:
        family = Tallies(PREFIX + name, text, bounds)
        self._registry.register(family)
        return family.by_value[""]

    def watch(self, scheduler: Scheduler, reason: Callable[[], str]) -> None:
        """Show what the scheduler counts, and why who waits has to, read at each scrape."""
        self._registry.register(_WaitingByReason(scheduler, reason))
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
        """The page that a scraper reads, in Prometheus's text format; what is settled shows."""
        return generate_latest(self._registry)


def _seconds_by_stage(segments: Sequence[Segment]) -> dict[Stage, float]:
    """Nothing where the loop did not take it in."""
    totals = dict.fromkeys(Stage, 0.0) if segments else {}
    for stage, start, end in segments:
        totals[stage] += end.at - start.at
    return totals


class _ReadCounter(Collector):
    """A counter whose value lives elsewhere."""

    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._name = name
        self._text = text
        self._read = read

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._text, value=self._read())


class _WaitingByReason(Collector):
    """Who waits, under the one reason that holds now."""

    def __init__(self, scheduler: Scheduler, reason: Callable[[], str]) -> None:
        self._scheduler = scheduler
        self._reason = reason

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            PREFIX + "num_requests_waiting_by_reason", "Requests that wait, by what they wait for.", labels=["reason"]
        )
        now, num_waiting = self._reason(), self._scheduler.num_waiting
        for reason in REASONS:
            family.add_metric([reason], num_waiting if reason == now else 0)
        yield family


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
